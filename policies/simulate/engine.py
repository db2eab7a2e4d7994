"""A worker of a cluster in simulated time: prompts in order, and everybody who decodes a token further in each step.

Between two events nothing changes, so time is not stepped: streams share a clock that counts tokens, on which each ends
at a known mark, and only the clock's speed changes (processor sharing; Kleinrock 1967).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import Any

from policies.model import Speed

Event = tuple[float, str, Any]
"""(when, `prefilled` or `done`, whose)"""


class Worker:
    """Prompts are computed one after another, decoding goes on beside them, as with chunked prefill."""

    def __init__(self, speed: Speed, chunk: int, max_batch: int) -> None:
        self._speed = speed
        self._chunk = chunk
        self._max_batch = max_batch
        self.now = 0.0
        self._tokens = 0.0
        """The clock that counts tokens."""
        self._streams: list[tuple[float, int, float, Any]] = []
        """By the mark at which each ends: (mark, number, context, whose)."""
        self._context = 0.0
        self._waiting: deque[tuple[int, int, Any]] = deque()
        """Streams for whom the batch has no room: (tokens, context, whose)."""
        self._prompts: deque[list[Any]] = deque()
        """[seconds left, seconds of it in a step, whose]"""
        self._count = 0
        self.backlog_s = 0.0
        """Seconds of prompts to compute."""

    @property
    def streams(self) -> int:
        return len(self._streams) + len(self._waiting)

    def prompt_s(self, tokens: int, cached: int = 0) -> float:
        """Seconds to compute a prompt, the steps around it aside."""
        new, speed = tokens - cached, self._speed
        return (speed.prompt_ms_per_1k * new + speed.prompt_ms_per_1k_pairs * new * (cached + new / 2)) / 1e6

    def first_token_s(self, tokens: int, cached: int) -> float:
        """Until a prompt that came now would be computed."""
        seconds = self.prompt_s(tokens, cached) + self.backlog_s
        return seconds + max(1.0, seconds / max(self.prompt_s(self._chunk), 1e-9)) * self.step_s()

    def step_s(self, more: int = 0, context: float = 0.0) -> float:
        """Of a step with `more` streams of `context` tokens each beside those there are."""
        speed, batch, read = self._speed, len(self._streams) + more, self._context + more * context
        return (speed.step_ms + speed.step_ms_per_stream * batch + speed.step_ms_per_1k_context * read / 1e3) / 1e3

    def give_prompt(self, tokens: int, cached: int, whose: Any, spread: float = 1.0) -> None:
        """Compute a prompt of which `cached` tokens are here; `now` must be the time. It takes `spread` times as long
        as the model says."""
        seconds = self.prompt_s(tokens, cached) * spread
        self._prompts.append([seconds, seconds * min(1.0, self._chunk / (tokens - cached)), whose])
        self.backlog_s += seconds

    def give_stream(self, tokens: int, context: int, whose: Any) -> None:
        """Decode `tokens` more of an answer."""
        if len(self._streams) >= self._max_batch:
            self._waiting.append((tokens, context, whose))
            return
        self._count += 1
        mean = context + tokens / 2
        heapq.heappush(self._streams, (self._tokens + tokens, self._count, mean, whose))
        self._context += mean

    def _pace(self) -> tuple[float, float]:
        """(seconds for each token of the streams, seconds for each second of prompt computing)."""
        step = self.step_s()
        if not self._prompts:
            return step, math.inf
        piece = self._prompts[0][1]
        return step + piece, (step + piece) / max(piece, 1e-12)

    def next_at(self) -> float:
        """When the next thing happens; infinity for never."""
        return self._next()[0]

    def _next(self) -> tuple[float, bool]:
        """(when, whether it is the end of a stream: else of a prompt)."""
        if not self._streams and not self._prompts:
            return math.inf, False
        step, slowdown = self._pace()
        stream = self.now + max(0.0, self._streams[0][0] - self._tokens) * step if self._streams else math.inf
        prompt = self.now + self._prompts[0][0] * slowdown if self._prompts else math.inf
        return min(stream, prompt), stream <= prompt

    def advance(self, until: float) -> list[Event]:
        """Let time pass, and say what happened in it."""
        events: list[Event] = []
        while True:
            at, of_stream = self._next()
            if at > until or at == math.inf:
                break
            self._pass(at - self.now, *self._pace())
            self.now = at
            # What ends is what was next, not what has nothing left: after hours, less than the last bit of the time may
            # be left of it.
            if of_stream:
                ends, _, context, whose = heapq.heappop(self._streams)
                self._tokens = ends
                self._context -= context
                events.append((at, "done", whose))
                if self._waiting:
                    self.give_stream(*self._waiting.popleft())
                if not self._streams:
                    self._tokens = self._context = 0.0  # so that rounding does not add up
            else:
                left, _, whose = self._prompts.popleft()
                self.backlog_s = max(0.0, self.backlog_s - left)
                events.append((at, "prefilled", whose))
        if until > self.now and until < math.inf:
            self._pass(until - self.now, *self._pace())
            self.now = until
        return events

    def _pass(self, seconds: float, step: float, slowdown: float) -> None:
        if self._streams and step > 0:
            self._tokens += seconds / step
        if self._prompts and slowdown < math.inf:
            prompt = self._prompts[0]
            done = min(prompt[0], seconds / slowdown)
            prompt[0] -= done
            self.backlog_s = max(0.0, self.backlog_s - done)
