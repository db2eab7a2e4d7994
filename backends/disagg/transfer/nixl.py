"""KV over NIXL: the decode side reads a prefill side's blocks where they lie, by RDMA or what else UCX finds.

Which blocks, and when, is said on the KV connection as for shared memory (`wire`); only their bytes go another way.
They are read beside the cache and copied into it, so a pull can be cancelled at any moment.

NIXL's own progress thread polls without a pause, which takes two fifths of a core from whoever computes. Here both
sides make progress themselves, and only while something is read. Sources: github.com/ai-dynamo/nixl, docs/nixl.md and
docs/BackendGuide.md; UCX completes one-sided reads without RDMA only while their target makes progress.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import mmap
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from backends.disagg.engine.kv_cache import KVCache

POLL_S = 0.0002
"""Between looks at a read, on both sides."""
_GIVE_UP_S = 10.0
"""A read that takes longer has failed."""


class NixlError(Exception):
    """NIXL cannot be had, or a read failed and its connection is of no more use."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def installed() -> str | None:
    """The name of the module to import, of those that NVIDIA publishes NIXL as; None where there is none."""
    for name in ("nixl_cu12", "nixl_cu13", "nixl"):
        if importlib.util.find_spec(name) is not None:
            return name
    return None


class Nixl:
    """One worker's NIXL agent, over its cache. Raises NixlError where NIXL cannot be had."""

    def __init__(self, name: str, cache: KVCache) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        module = installed()
        if module is None:
            raise NixlError("transport nixl: NIXL is not installed", hint="pip install 'splitroute[nixl]'")
        try:
            api = importlib.import_module(f"{module}._api")
            logging.getLogger("nixl").setLevel(logging.WARNING)
            logging.getLogger(module).setLevel(logging.WARNING)
            config = api.nixl_agent_config(
                enable_prog_thread=False, backends=["UCX"], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            )
            self._agent: Any = api.nixl_agent(name, config)
            self._keep: list[Any] = []
            """What is registered, and must stay where it is."""
            self.base = self._register(np.frombuffer(cache.bytes, dtype=np.uint8))
            self.metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:  # NIXL raises its bindings' own kinds
            raise NixlError(f"transport nixl: NIXL does not work here: {error}", hint="use transport tcp") from None
        self.block_bytes = cache.geometry.block_bytes

    def _register(self, memory: np.ndarray[Any, Any]) -> int:
        address: int = memory.ctypes.data
        self._keep.append(memory)
        self._agent.register_memory([(address, memory.nbytes, 0, "")], "DRAM")
        return address

    def progress(self) -> None:
        """Let peers' reads of this side go on."""
        self._agent.get_new_notifs()

    def reader(self, metadata: bytes, base: int, most: int) -> Reader:
        """For the blocks of the peer of whom the handshake said `metadata` and `base`, `most` of them at once."""
        staging = np.frombuffer(mmap.mmap(-1, most * self.block_bytes), dtype=np.uint8)
        try:
            peer = self._agent.add_remote_agent(metadata)
            return Reader(self._agent, peer, base, staging.reshape(most, -1), self._register(staging))
        except Exception as error:
            raise NixlError(f"the peer's NIXL metadata is of no use: {error}") from None


class Reader:
    """Reads blocks of one peer; for one thread."""

    def __init__(self, agent: Any, peer: str, base: int, staging: np.ndarray[Any, Any], at: int) -> None:
        self._agent = agent
        self._peer = peer
        self._base = base
        self._staging = staging
        self._at = at

    @property
    def most(self) -> int:
        """Blocks in one read."""
        return len(self._staging)

    def read(self, blocks: Sequence[int], alive: Callable[[], bool]) -> list[np.ndarray[Any, Any]]:
        """The bytes of `blocks`, good until the next read. Raises NixlError; `alive` says whether to go on waiting."""
        size, count = self._staging.shape[1], len(blocks)
        try:
            agent = self._agent
            mine = agent.get_xfer_descs([(self._at + at * size, size, 0) for at in range(count)], "DRAM")
            theirs = agent.get_xfer_descs([(self._base + block * size, size, 0) for block in blocks], "DRAM")
            handle = agent.initialize_xfer("READ", mine, theirs, self._peer, b"")
            state, until = agent.transfer(handle), time.monotonic() + _GIVE_UP_S
            while state == "PROC" and time.monotonic() < until and alive():
                time.sleep(POLL_S)
                state = agent.check_xfer_state(handle)
        except Exception as error:
            raise NixlError(f"NIXL read failed: {error}") from None
        if state != "DONE":  # the handle, and what it may still write to, are left as they are
            raise NixlError("a NIXL read did not end" if state == "PROC" else f"a NIXL read ended as {state}")
        agent.release_xfer_handle(handle)
        return list(self._staging[:count])

    def forget(self) -> None:
        """The peer is gone."""
        try:
            self._agent.remove_remote_agent(self._peer)
        except Exception as error:
            logging.getLogger("splitroute.transfer").debug("NIXL: %s", error)
