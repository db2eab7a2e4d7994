"""The engine: scheduler, model and KV cache put together; `step` advances everybody by one step."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from backends.disagg.engine.blocks import BlockPool
from backends.disagg.engine.kv_cache import KVCache, KVGeometry
from backends.disagg.engine.memory import give_back_freed_memory
from backends.disagg.engine.models import ARCHITECTURES
from backends.disagg.engine.models.decoder import Decoder
from backends.disagg.engine.runner import choose_runner
from backends.disagg.engine.sampler import TopTokens, logprobs, sample, top_tokens
from backends.disagg.engine.scheduler import Chunk, Scheduler
from backends.disagg.engine.sequence import Sequence
from backends.disagg.engine.warmup import measure_steps

if TYPE_CHECKING:
    from backends.models import ModelConfig

Quantization = Literal["none", "int8", "int4"]
"""How linear layers are kept: as `dtype`, or rounded. The embedding is int8 beside int4 layers."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`dtype` is a torch dtype's name; `kv_tokens` is the KV cache's size in tokens."""

    dtype: str
    device: str
    block_size: int
    kv_tokens: int
    max_model_len: int
    max_batch: int
    prefill_chunk: int
    prefix_cache: bool = True
    quantization: Quantization = "none"


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. `index` counts a sequence's output from 0."""

    seq: Sequence
    index: int
    token: int
    finish_reason: str | None
    logprobs: TopTokens | None = None
    """Its own, then those of the likeliest tokens."""


@dataclass(slots=True)
class StepResult:
    tokens: list[Token] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    """Prompt chunks whose KV is now complete in the cache."""
    receive: list[Sequence] = field(default_factory=list)
    """Sequences whose blocks await another worker's KV; tell `scheduler.received` when it is there."""

    idle: bool = False
    """Nothing was done and nothing can be until a sequence is added, received or freed."""


_GRAIN = 4
"""Prompts may be cut at any multiple of so many tokens where the runner computes the same wherever they are cut."""


class Engine:
    """Not thread-safe: one thread calls everything (another may write into blocks of receiving sequences)."""

    def __init__(
        self,
        model_config: ModelConfig,
        weights: Iterable[tuple[str, torch.Tensor]],
        config: EngineConfig,
    ) -> None:
        self.config = config
        self.device = torch.device(config.device)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        if model_config.architecture not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            raise ValueError(f"architecture {model_config.architecture!r} is not supported; supported: {known}")
        if config.quantization == "int4" and self.device.type != "cpu":
            raise ValueError("quantization int4 runs on the CPU only; use int8 or none on this device")
        decoder = Decoder(
            ARCHITECTURES[model_config.architecture],
            model_config,
            weights,
            dtype=self.dtype,
            device=self.device,
            max_len=config.max_model_len,
        )
        if config.quantization != "none":
            decoder.quantize(config.quantization)
        give_back_freed_memory()
        self.geometry = KVGeometry(
            layers=model_config.num_layers,
            kv_heads=model_config.num_kv_heads,
            head_dim=model_config.head_dim,
            block_size=config.block_size,
            dtype=config.dtype,
        )
        num_blocks = -(-config.kv_tokens // config.block_size)
        self.cache = KVCache(self.geometry, num_blocks, self.device)
        self.runner = choose_runner(decoder, self.cache, config.max_model_len)
        del decoder  # its weights are the runner's now, or gone
        give_back_freed_memory()
        self._ended: float | None = None
        self.scheduler = Scheduler(
            BlockPool(num_blocks, config.block_size),
            max_batch=config.max_batch,
            prefill_chunk=config.prefill_chunk,
            grain=_GRAIN if self.runner.exact else config.prefill_chunk,
            prefix_cache=config.prefix_cache,
        )

    @torch.inference_mode()
    def measure(self, most_s: float = 1.0) -> None:
        """Learn how long steps take, from made-up ones; `most_s` seconds and the step under way at most."""
        scheduler = self.scheduler
        measured = measure_steps(self.runner, scheduler.pool, scheduler.max_batch, self.config.prefill_chunk, most_s)
        scheduler.step_time.fit(measured)

    @torch.inference_mode()
    def step(self) -> StepResult:
        """Schedule and compute one step."""
        step = self.scheduler.schedule()
        for seq, blocks in step.swap_out:
            seq.host_kv = self.cache.save(blocks)
        for seq in step.swap_in:
            assert isinstance(seq.host_kv, torch.Tensor)
            self.cache.restore(seq.blocks, seq.host_kv)
            seq.host_kv = None
        result = StepResult(chunks=step.prefill, receive=step.receive, idle=step.empty)
        if not (step.prefill or step.decode):
            self._ended = None
            return result
        # From the end of the step before, where there was one: what is done between steps delays tokens too.
        begun = self._ended or time.perf_counter()
        load = self.scheduler.load_of(step)
        logits, sampled = self.runner.run(step)
        asked = logprobs(logits, sampled)
        drawn = dict(zip(sampled, sample(logits, sampled), strict=True))
        self._ended = time.perf_counter()
        self.scheduler.step_time.observe(load, self._ended - begun)
        for chunk in step.prefill:
            self._advance(chunk.seq, chunk.length, drawn.get(chunk.seq), asked.get(chunk.seq), result)
        for seq in step.decode:
            self._advance(seq, 1, drawn[seq], asked.get(seq), result)
        return result

    def _advance(
        self, seq: Sequence, computed: int, token: int | None, row: torch.Tensor | None, result: StepResult
    ) -> None:
        reason = self.scheduler.advance(seq, computed, token)
        if token is not None:
            top = None if row is None else top_tokens(row, token, seq.params.logprobs or 0)
            result.tokens.append(Token(seq, seq.output_len - 1, token, reason, top))
