"""Which KV blocks are free, which belong to whom, and which hold a prefix that others may share. No bytes here.

Paged KV as in vLLM's PagedAttention (Kwon et al. 2023): fixed-size blocks, no contiguity, no fragmentation. A
full prompt block can be found by its key, a hash over its tokens and the key of the block before it, so one key
names a whole prefix. Several sequences may own such a block; nobody's block is ever written again once it has a
key. A block that nobody owns any more stays findable until its room is needed, the longest unused first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

Key = bytes


def prefix_keys(tokens: Sequence[int], block_size: int) -> list[Key]:
    """The key of each full block of `tokens`. 128-bit BLAKE2b: a collision would show one prompt another's KV."""
    keys: list[Key] = []
    parent = b""
    for end in range(block_size, len(tokens) + 1, block_size):
        block = array("q", tokens[end - block_size : end]).tobytes()
        parent = hashlib.blake2b(parent + block, digest_size=16).digest()
        keys.append(parent)
    return keys


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens, all free at first."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks: num_blocks={num_blocks}, block_size={block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._unowned: OrderedDict[int, None] = OrderedDict()
        """Blocks with a key and no owner, the longest unused first."""
        self._owners = [0] * num_blocks
        self._key_of: dict[int, Key] = {}
        self._block_of: dict[Key, int] = {}
        self.changes: dict[Key, bool] | None = None
        """Where somebody wants to know and empties it: keys that became findable (True) or are so no more."""

    @property
    def free_count(self) -> int:
        """Blocks that nobody owns."""
        return len(self._empty) + len(self._unowned)

    @property
    def cached_count(self) -> int:
        """Blocks that can be found by a key, owned or not."""
        return len(self._block_of)

    def keys(self) -> list[Key]:
        """Those of all that can be found."""
        return list(self._block_of)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks of one's own, or None (and nothing taken) where fewer are free. Their KV is garbage."""
        if count > self.free_count:
            return None
        taken = []
        for _ in range(count):
            if self._empty:
                block = self._empty.pop()
            else:
                block, _ = self._unowned.popitem(last=False)
                key = self._key_of.pop(block)
                del self._block_of[key]
                if self.changes is not None:
                    self.changes[key] = False
            self._owners[block] = 1
            taken.append(block)
        return taken

    def find(self, keys: Sequence[Key]) -> list[int]:
        """The blocks of the longest prefix of `keys` that is here."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def share(self, blocks: Sequence[int]) -> None:
        """Own blocks that `find` gave, beside whoever else does."""
        for block in blocks:
            if not self._owners[block]:
                del self._unowned[block]
            self._owners[block] += 1

    def seal(self, block: int, key: Key) -> None:
        """Let an owned, completely computed `block` be found by `key`; the first block with a key keeps it."""
        if not self._owners[block] or block in self._key_of:
            raise ValueError(f"block {block} is {'sealed already' if self._owners[block] else 'not owned'}")
        if key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key
            if self.changes is not None:
                self.changes[key] = True

    def give_back(self, blocks: Sequence[int]) -> None:
        """Give up one ownership of each of `blocks`. Doing so twice is a bug and raises before anything changes."""
        if len(set(blocks)) != len(blocks) or not all(self._owners[block] for block in blocks):
            raise ValueError(f"blocks freed twice: {blocks}")
        for block in reversed(blocks):  # a prefix outlives its ends: those are the first to make room
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            if block in self._key_of:
                self._unowned[block] = None
            else:
                self._empty.append(block)
