"""The bundled cluster as a `Backend`: prompts are templated and tokenized, answers detokenized, here."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import secrets
from collections.abc import AsyncIterator, Mapping
from typing import Any

from backends.base import BackendError, Call, Health, KVTransfer, Piece, PromptCount, Surface, Usage
from backends.disagg.cluster import Cluster, Generation
from backends.disagg.messages import Role, Sampling, WorkerConfig
from backends.disagg.render import Renderer
from backends.disagg.request import GenerationRequest, chat_messages, completion_prompt, parse_request
from backends.models import (
    ModelConfig,
    ModelError,
    ModelFiles,
    Tokenizer,
    fingerprint,
    load_config,
    load_tokenizer,
    resolve,
)
from backends.models.detokenize import Detokenizer
from backends.models.stops import StopChecker
from backends.options import DisaggOptions

LEASE_S = 60.0
"""How long a prefill worker keeps a prompt's KV for a decode worker that does not come."""


class DisaggBackend:
    """One model on its own workers. `start` loads it; nothing is read or spawned before."""

    def __init__(self, name: str, options: DisaggOptions) -> None:
        self.name = name
        self.options = options
        self._cluster: Cluster | None = None
        self._tokenizer: Tokenizer | None = None
        self._context = 0

    # --- life ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read the tokenizer and start the workers. Raises BackendError with a hint."""
        if self._cluster is not None:
            return
        if importlib.util.find_spec("torch") is None:
            raise BackendError(
                f"provider {self.name}: the bundled cluster needs torch, which is not installed",
                status=503,
                hint="pip install 'splitroute[local]'",
            )
        try:
            # In a thread: it may fetch the weights, and reading the vocabulary takes a second.
            files, config, mark, self._tokenizer = await asyncio.to_thread(_read, self.options.model)
        except ModelError as error:
            raise BackendError(f"provider {self.name}: {error.message}", status=503, hint=error.hint) from None
        wanted = self.options.max_model_len or config.max_position_embeddings
        if wanted > config.max_position_embeddings:
            raise BackendError(
                f"provider {self.name}: max_model_len {wanted} is more than the "
                f"{config.max_position_embeddings} tokens {self.options.model} was made for",
                status=503,
                hint=f"set max_model_len to {config.max_position_embeddings} or less",
            )
        self._context = min(wanted, self.options.kv_tokens)
        cluster = Cluster(*worker_configs(self.options, files, mark, self._context))
        await cluster.start(self.options.start_timeout_s)
        self._cluster = cluster

    async def aclose(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            await cluster.aclose()

    # --- requests ------------------------------------------------------------------------------------

    def context_limit(self) -> int | None:
        return self._context or self.options.max_model_len

    def count_prompt(self, surface: Surface, body: Mapping[str, Any]) -> PromptCount | None:
        if self._tokenizer is None:
            return None
        try:
            if surface == "chat.completions":
                ids = self._tokenizer.encode_chat(chat_messages(body))
            else:
                prompt = completion_prompt(body)
                ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        except ModelError as error:  # the chat template refused the messages
            raise BackendError(error.message, status=400, param="messages", code="unsupported_parameter") from None
        if not ids:
            raise BackendError("invalid prompt: nothing in it is in the model's vocabulary", status=400, param="prompt")
        if max(ids) >= self._tokenizer.vocab_size:
            raise BackendError(
                f"invalid prompt: token id {max(ids)} is outside the vocabulary of {self._tokenizer.vocab_size}",
                status=400,
                param="prompt",
            )
        return PromptCount(len(ids), exact=True, prompt_ids=tuple(ids))

    async def open(self, call: Call) -> DisaggReply:
        cluster, tokenizer = self._cluster, self._tokenizer
        if cluster is None or tokenizer is None:
            raise BackendError(f"provider {self.name} is not running", status=503)
        request = parse_request(call.surface, call.body)
        prompt_ids = call.prompt_ids
        if prompt_ids is None:
            counted = self.count_prompt(call.surface, call.body)
            assert counted is not None and counted.prompt_ids is not None
            prompt_ids = counted.prompt_ids
        room = self._context - len(prompt_ids)
        if room < 1 or (request.max_tokens or 1) > room:
            raise BackendError(
                f"this model's maximum context length is {self._context} tokens; the request has "
                f"{len(prompt_ids)} in the prompt and asks for {request.max_tokens or 'at least 1'} more; "
                "shorten the prompt or lower max_tokens",
                status=400,
                code="context_length_exceeded",
                param="messages" if call.surface == "chat.completions" else "prompt",
            )
        if request.highest_token_id() >= tokenizer.vocab_size:
            raise BackendError(
                f"invalid logit_bias or stop_token_ids: token id {request.highest_token_id()} is outside the "
                f"vocabulary of {tokenizer.vocab_size}",
                status=400,
                code="invalid_value",
                param="logit_bias" if max(request.logit_bias, default=-1) >= tokenizer.vocab_size else "stop_token_ids",
            )
        ends = set(request.stop_token_ids) | (set() if request.ignore_eos else tokenizer.eos_token_ids)
        sampling = Sampling(
            max_tokens=request.max_tokens or room,
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            stop_ids=sorted(ends),
            top_k=request.top_k,
            min_p=request.min_p,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=request.repetition_penalty,
            logit_bias=sorted(request.logit_bias.items()),
            min_tokens=request.min_tokens,
        )
        generation = cluster.submit(list(prompt_ids), sampling, call.goals)
        return DisaggReply(cluster, generation, tokenizer, call, request, len(prompt_ids), frozenset(ends))

    def health(self) -> Health:
        if self._cluster is None:
            return Health(False, {"state": "not running"})
        workers = [
            {
                "name": worker.config.name,
                "role": worker.config.role,
                "pid": worker.started.pid if worker.started else None,
                "state": "up" if worker.started else "down",
                "active": len(worker.active),
                "free_blocks": worker.state.free_blocks if worker.state else None,
                "dtype": worker.started.dtype if worker.started else None,
            }
            for worker in self._cluster.workers
        ]
        pools = [pool for pool in (self._cluster.prefill, self._cluster.decode) if pool]
        ok = all(any(worker.up for worker in pool) for pool in pools)
        return Health(ok, {"model": self.options.model, "mode": self.options.mode, "workers": workers})


def _read(model: str) -> tuple[ModelFiles, ModelConfig, str, Tokenizer]:
    files = resolve(model, pull_missing=True)
    return files, load_config(files), fingerprint(files), load_tokenizer(files)


class DisaggReply:
    """An answer of the bundled cluster under way."""

    def __init__(
        self,
        cluster: Cluster,
        generation: Generation,
        tokenizer: Tokenizer,
        call: Call,
        request: GenerationRequest,
        prompt_tokens: int,
        ends: frozenset[int],
    ) -> None:
        self.status = 200
        self.headers: Mapping[str, str] = {"content-type": "text/event-stream" if call.stream else "application/json"}
        self._cluster = cluster
        self._generation = generation
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopChecker(request.stop)
        self._call = call
        self._request = request
        self._prompt_tokens = prompt_tokens
        self._cached_tokens = 0
        self._completion_tokens = 0
        self._finish_reason = ""
        self._ends = ends

    @property
    def transfer(self) -> KVTransfer | None:
        return self._generation.transfer

    async def aclose(self) -> None:
        self._cluster.end(self._generation)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        call = self._call
        renderer = Renderer(call.surface, secrets.token_hex(12), str(call.body.get("model", "")))
        try:
            if call.stream:
                opening = renderer.opening()
                if opening is not None:
                    yield opening
                async for text in self._texts():
                    if self._finish_reason:
                        include = self._request.include_usage
                        yield renderer.ending(text, self._finish_reason, self._usage(), include)
                    elif text:
                        yield renderer.text(text)
            else:
                whole = "".join([text async for text in self._texts()])
                yield renderer.whole(whole, self._finish_reason, self._usage())
        finally:
            self._cluster.end(self._generation)

    async def _texts(self) -> AsyncIterator[str]:
        """The answer's text as it becomes final; `_finish_reason` is set before the last piece."""
        async for token in self._generation:
            self._completion_tokens += 1
            self._cached_tokens += token.cached
            text = "" if token.token in self._ends else self._detokenizer.push([token.token])
            if token.finish_reason is not None:
                text += self._detokenizer.finish()
            text, stopped = self._stops.push(text)
            if stopped:
                self._finish_reason = "stop"
            elif token.finish_reason is not None:
                text += self._stops.flush()
                self._finish_reason = token.finish_reason
            yield text
            if self._finish_reason:
                return

    def _usage(self) -> Usage:
        return Usage(self._prompt_tokens, self._completion_tokens, self._cached_tokens)


def worker_configs(
    options: DisaggOptions, files: ModelFiles, mark: str, context: int
) -> tuple[list[WorkerConfig], list[WorkerConfig]]:
    """The prefill and decode workers `options` asks for, with the machine's cores divided among them."""
    split = options.mode == "split"
    roles: list[tuple[str, Role]] = [(f"prefill-{i}", "prefill") for i in range(options.prefill if split else 0)]
    decode_role: Role = "decode" if split else "unified"
    roles += [(f"{decode_role}-{i}", decode_role) for i in range(options.decode)]
    affinity = getattr(os, "sched_getaffinity", None)
    cores: list[int] = sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1))
    threads = options.threads or max(1, len(cores) // len(roles))
    token = secrets.token_hex(16)
    configs = [
        WorkerConfig(
            name=name,
            role=role,
            model=files.name,
            model_path=str(files.path),
            model_kind=files.kind,
            fingerprint=mark,
            device=options.device,
            dtype=options.dtype,
            block_size=options.block_size,
            kv_tokens=options.kv_tokens,
            max_model_len=context,
            max_batch=options.max_batch,
            prefill_chunk=options.prefill_chunk,
            prefix_cache=options.prefix_cache,
            quantization=options.quantization,
            threads=threads,
            cpus=[cores[(index * threads + i) % len(cores)] for i in range(threads)] if options.pin else None,
            transport=options.transport,
            token=token,
            lease_s=LEASE_S,
        )
        for index, (name, role) in enumerate(roles)
    ]
    return [c for c in configs if c.role == "prefill"], [c for c in configs if c.role != "prefill"]
