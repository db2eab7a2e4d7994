"""The bytes of the paged KV cache, in memory that other processes can be given.

Layout: `[block, layer, K/V, kv_head, token in block, head_dim]`. A block is one contiguous piece over all
layers, so handing it over is one copy or one iovec; a layer's K is a strided view of it.

On CPU the cache itself lies in an anonymous shared file (memfd): nothing has a name, so nothing can be left
behind, however the processes die. On CUDA a host mirror of the same shape lies there, and `publish` and
`land` copy single blocks between the two; on CPU they do nothing.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """What two workers must agree on before a block of one means anything to the other."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * self.torch_dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size


def anonymous_file(size: int) -> int:
    """A file descriptor of `size` bytes of shareable memory that no path leads to.

    Raises OSError (ENOMEM, ENOSPC) where there is not that much.
    """
    if sys.platform == "linux":
        fd = os.memfd_create("splitroute-kv", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


class KVCache:
    """`num_blocks` blocks of `geometry` on `device`."""

    def __init__(self, geometry: KVGeometry, num_blocks: int, device: torch.device) -> None:
        self.geometry = geometry
        self.num_blocks = num_blocks
        shape = (
            num_blocks,
            geometry.layers,
            2,
            geometry.kv_heads,
            geometry.block_size,
            geometry.head_dim,
        )
        self.fd = anonymous_file(num_blocks * geometry.block_bytes)
        self.bytes = memoryview(mmap.mmap(self.fd, num_blocks * geometry.block_bytes))
        self._host = torch.frombuffer(self.bytes, dtype=geometry.torch_dtype).view(shape)
        self.data = self._host if device.type == "cpu" else torch.zeros_like(self._host, device=device)

    def block(self, index: int) -> memoryview:
        """Block `index` as writable host bytes: published by `publish`, or to be landed by `land`."""
        size = self.geometry.block_bytes
        return self.bytes[index * size : (index + 1) * size]

    def prefault(self) -> None:
        """Let the system map every page now: doing so in the middle of a hand-over takes longer than the copy, and in
        the middle of a step longer than the attention."""
        torch.frombuffer(self.bytes, dtype=torch.uint8)[:: mmap.PAGESIZE] = 0

    def publish(self, blocks: list[int]) -> None:
        """Make the device's `blocks` readable in host memory."""
        if self.data is not self._host:
            index = torch.tensor(blocks)
            self._host[index] = self.data[index.to(self.data.device)].cpu()

    def land(self, blocks: list[int]) -> None:
        """Bring `blocks` written in host memory to the device."""
        if self.data is not self._host:
            index = torch.tensor(blocks)
            self.data[index.to(self.data.device)] = self._host[index].to(self.data.device)

    def save(self, blocks: list[int]) -> torch.Tensor:
        """A host copy of `blocks`, for a preempted sequence."""
        return self.data[torch.tensor(blocks, device=self.data.device)].cpu()

    def restore(self, blocks: list[int], saved: torch.Tensor) -> None:
        """Write what `save` returned into the first of `blocks`."""
        index = torch.tensor(blocks[: saved.shape[0]], device=self.data.device)
        self.data[index] = saved.to(self.data.device)


def as_bytes(saved: torch.Tensor) -> memoryview:
    """What `KVCache.save` returned, as bytes: block after block."""
    return memoryview(saved.view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]
