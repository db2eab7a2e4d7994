"""A request being served, as the coordinator sees it: its tokens in order, whoever they come from."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backends.base import BackendError, Goals, KVTransfer
from backends.disagg.messages import Sampling, Source, TokenOut

if TYPE_CHECKING:
    from backends.disagg.handle import WorkerHandle


@dataclass(frozen=True, slots=True)
class Kept:
    """Where a prompt's KV is kept until its answer is complete."""

    worker: WorkerHandle
    source: Source


@dataclass(eq=False)
class Generation:
    """Iterate for its tokens in order, none twice; always `Cluster.end` it."""

    prompt_ids: list[int]
    sampling: Sampling
    goals: Goals
    grammar: str | None
    keys: list[bytes] = field(default_factory=list)
    """The prompt's `prefix_keys`."""
    tokens: list[int] = field(default_factory=list)
    """The answer so far: what another worker replays where the one that decodes dies."""
    kept: Kept | None = None
    serving: WorkerHandle | None = None
    """Who decodes, or will."""
    parts: dict[int, WorkerHandle] = field(default_factory=dict)
    """What it is called by the workers that know of it; each number is used once."""
    landed: bool = False
    """Whoever decodes has the prompt's KV."""
    computing: tuple[WorkerHandle, int] | None = None
    """Who computes the prompt, and how many tokens of it, until the first token is there."""
    distrusted: set[WorkerHandle] = field(default_factory=set)
    """Those whose KV could not be had."""
    placement: str = ""
    """Where it was sent, and why, in words."""
    transfer: KVTransfer | None = None
    recoveries: int = 0
    _strikes: int = 0
    _progress: int = -1
    finished: bool = False
    _early: dict[int, TokenOut] = field(default_factory=dict)
    """Tokens of one worker that arrived before another's: ordered by index, none twice."""
    _ready: deque[TokenOut | BackendError] = field(default_factory=deque)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, token: TokenOut) -> None:
        """Take a token from a worker; one that was given before is not given again."""
        if self.finished or token.index < len(self.tokens):
            return
        self._early[token.index] = token
        while (following := self._early.pop(len(self.tokens), None)) is not None:
            self.tokens.append(following.token)
            self._ready.append(following)
            self.finished = self.finished or following.finish_reason is not None
        self._wake.set()

    def fail(self, error: BackendError) -> None:
        if not self.finished:
            self.finished = True
            self._ready.append(error)
            self._wake.set()

    def stop(self) -> None:
        """No more tokens are wanted; who waits for one is told so."""
        self.finished = True
        self._wake.set()

    def strike(self) -> int:
        """Count a worker lost under this request; the result is how many in a row it lost without a new token."""
        self.recoveries += 1
        self._strikes = self._strikes + 1 if self._progress == len(self.tokens) else 1
        self._progress = len(self.tokens)
        self._early.clear()
        return self._strikes

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> TokenOut:
        """The next token; the one with a finish reason is the last. Raises BackendError."""
        while not self._ready:
            if self.finished:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        item = self._ready.popleft()
        if isinstance(item, BackendError):
            raise item
        return item
