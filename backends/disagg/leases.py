"""How long a prompt's KV is kept for the worker that decodes from it. Plain Python: the time is passed in.

A lease begins when the prompt is computed and is extended by each heartbeat of the decode side, for as long as it is at
work on the request: were it to die, another could still pull the same KV. What nobody speaks for any more is freed
when its lease ends, whichever others are still alive (vllm#58222, vllm#46283, sglang#39428).
"""

from __future__ import annotations

from collections.abc import Iterable

_CHECK_SHARE = 0.05
"""Ends are looked for after this share of a lease at the earliest: it is done before every engine step."""


class Leases:
    """Requests whose KV is kept, each for `length_s` seconds since it was last heard of."""

    def __init__(self, length_s: float) -> None:
        self.length_s = length_s
        self._ends: dict[int, float] = {}
        self._check_at = 0.0

    def begin(self, request: int, now: float) -> None:
        self._ends[request] = now + self.length_s

    def extend(self, requests: Iterable[int], now: float) -> None:
        """Those that have ended already stay so."""
        for request in requests:
            if request in self._ends:
                self._ends[request] = now + self.length_s

    def drop(self, request: int) -> None:
        self._ends.pop(request, None)

    def ended(self, now: float) -> list[int]:
        """Requests whose lease is over; `drop` them."""
        if now < self._check_at:
            return []
        self._check_at = now + self.length_s * _CHECK_SHARE
        return [request for request, end in self._ends.items() if end <= now]

    def requests(self) -> list[int]:
        """Those whose KV is kept, the oldest first."""
        return list(self._ends)
