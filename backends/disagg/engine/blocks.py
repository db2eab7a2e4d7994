"""Which KV blocks are free and which belong to whom. Plain bookkeeping; the bytes are `kv_cache`'s.

Paged KV as in vLLM's PagedAttention (Kwon et al. 2023): fixed-size blocks, no contiguity, no fragmentation.
"""

from __future__ import annotations


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens, all free at first."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks: num_blocks={num_blocks}, block_size={block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._used = bytearray(num_blocks)

    @property
    def free_count(self) -> int:
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int] | None:
        """`count` free blocks, or None (and nothing taken) where there are fewer."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._used[block] = 1
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """Free `blocks`. Freeing a block twice is a bug and raises before anything changes."""
        if len(set(blocks)) != len(blocks) or not all(self._used[block] for block in blocks):
            raise ValueError(f"blocks freed twice: {blocks}")
        for block in blocks:
            self._used[block] = 0
        self._free.extend(reversed(blocks))
