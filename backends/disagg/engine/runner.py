"""What computes a step, behind one seam: the compiled forward pass on CPUs, torch anywhere."""

from __future__ import annotations

from typing import Protocol

import torch

from backends.disagg.engine import native
from backends.disagg.engine.attention import TorchAttention
from backends.disagg.engine.batch import build_batch
from backends.disagg.engine.kv_cache import KVCache
from backends.disagg.engine.models.decoder import Decoder
from backends.disagg.engine.scheduler import Step
from backends.disagg.engine.sequence import Sequence


class Runner(Protocol):
    exact: bool
    """Whether a prompt's KV is the same, bit for bit, however it is cut into chunks."""

    def run(self, step: Step) -> tuple[torch.Tensor, list[Sequence]]:
        """Compute `step`, writing its KV; logits float32 [n, vocab] of the rows whose next token is wanted, and
        their sequences: those of prompts' last chunks, then those that decode."""


class TorchRunner:
    """The model in torch operations."""

    exact = False  # its kernels choose their order of summation by shape

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self._decoder = decoder
        self._cache = cache
        self._attention = TorchAttention(cache, decoder.config.attention_scale, decoder.config.window)

    def run(self, step: Step) -> tuple[torch.Tensor, list[Sequence]]:
        geometry, window = self._cache.geometry, self._decoder.config.window
        batch = build_batch(step, geometry.block_size, geometry.torch_dtype, self._cache.data.device, window)
        return self._decoder.forward(batch, self._cache, self._attention), batch.sampled


def choose_runner(decoder: Decoder, cache: KVCache, max_len: int) -> Runner:
    """The fastest that runs here. It may take `decoder`'s weights over."""
    if cache.data.device.type == "cpu" and cache.geometry.dtype in ("float32", "bfloat16"):
        library = native.load()
        if library is not None:
            from backends.disagg.engine.native.runner import NativeRunner, takes

            if takes(decoder):
                return NativeRunner(decoder, cache, library, max_len)
    return TorchRunner(decoder, cache)
