"""The bundled cluster as a `Backend`: prompts are templated and tokenized, answers detokenized, here."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from backends.base import BackendError, Call, Forecast, Goals, Health, PromptCount, Sample, Surface
from backends.disagg.changes import change
from backends.disagg.choice import Choice
from backends.disagg.cluster import Cluster
from backends.disagg.generation import Generation
from backends.disagg.grammars import check_grammar, grammar_of
from backends.disagg.messages import Sampling
from backends.disagg.refusals import unsupported
from backends.disagg.reply import DisaggReply
from backends.disagg.request import chat_messages, completion_prompt, parse_request
from backends.disagg.roster import Roster
from backends.disagg.status import described, samples
from backends.disagg.tools import parse_tools
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
from backends.options import DisaggOptions


class DisaggBackend:
    """One model on its own workers. `start` loads it; nothing is read or spawned before."""

    surfaces: ClassVar[frozenset[Surface]] = frozenset({"chat.completions", "completions"})

    def __init__(self, name: str, options: DisaggOptions) -> None:
        self.name = name
        self.options = options
        self._cluster: Cluster | None = None
        self._roster: Roster | None = None
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
        adaptive = self.options.disaggregate == "adaptive"
        self._roster = Roster(self.options, files, mark, self._context)
        cluster = Cluster(self._roster.workers(), adaptive=adaptive, planner=self.options.planner)
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
                ids = self._encode_chat(self._tokenizer, body)
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

    def forecast(self, prompt: PromptCount, max_tokens: int | None, goals: Goals) -> Forecast | None:
        if self._cluster is None or prompt.prompt_ids is None:
            return None
        return self._cluster.foresee(list(prompt.prompt_ids), max_tokens or self._context, goals)

    @staticmethod
    def _encode_chat(tokenizer: Tokenizer, body: Mapping[str, Any]) -> list[int]:
        style = tokenizer.tool_style
        if style is None and body.get("tools") and body.get("tool_choice") != "none":
            raise unsupported("tools", body["tools"], "this model's chat template knows no tools")
        tools = parse_tools(body)
        return tokenizer.encode_chat(chat_messages(body, style), tools.definitions if tools else None)

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
            logprobs=request.logprobs,
        )
        grammar = grammar_of(request, tokenizer.tool_style)
        if grammar is not None:
            await check_grammar(grammar, "tool_choice" if request.schema is None else "response_format")
        generations: list[Generation] = []
        try:
            for index in range(request.n):  # each has a stream of random numbers of its own
                seeded = msgspec.structs.replace(sampling, seed=(request.seed + index) & ((1 << 64) - 1))
                generations.append(cluster.submit(list(prompt_ids), seeded, call.goals, grammar))
        except BackendError:
            for generation in generations:
                cluster.end(generation)
            raise
        choices = [Choice(index, tokenizer, request, frozenset(ends)) for index in range(request.n)]
        return DisaggReply(cluster, generations, choices, call, request, len(prompt_ids))

    def health(self) -> Health:
        if self._cluster is None:
            return Health(False, {"state": "not running"})
        pools = [pool for pool in (self._cluster.prefill, self._cluster.decode) if pool]
        ok = all(any(worker.up for worker in pool) for pool in pools)
        detail = {"model": self.options.model, "mode": self.options.mode, **described(self._cluster)}
        return Health(ok, detail)

    async def manage(
        self,
        action: str,
        worker: str | None = None,
        role: str | None = None,
        address: str | None = None,
        *,
        now: bool = False,
    ) -> dict[str, Any]:
        """Change the cluster while it serves: see `changes`. Raises BackendError."""
        if self._cluster is None or self._roster is None:
            raise BackendError(f"provider {self.name} is not running", status=503)
        return await change(self._cluster, self._roster, action, worker, role, address, now=now)

    def samples(self) -> list[Sample]:
        return [] if self._cluster is None else samples(self._cluster)


def _read(model: str) -> tuple[ModelFiles, ModelConfig, str, Tokenizer]:
    files = resolve(model, pull_missing=True)
    return files, load_config(files), fingerprint(files), load_tokenizer(files)
