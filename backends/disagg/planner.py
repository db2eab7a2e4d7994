"""Flips workers between the pools by load. Plain Python: the loads are passed in, the time too.

A pool is short when its work cannot keep up: prompts wait longer than a limit, or decode steps take several times what
a lone stream's do. A worker changes sides only when one pool is short, the other is not, and that has been so at some
looks in a row; then nothing changes for a while, so that the effect can be seen before the next flip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LOOK_EVERY_S = 2.0
_LOOKS = 3
_REST_S = 30.0
_PROMPTS_WAIT_S = 1.0
"""Prompts that wait longer for a prefill worker make that pool short."""
_PROMPTS_CALM_S = 0.2
_STEPS_SLOW = 3.0
"""Decode steps this many times as long as a lone stream's make that pool short."""
_STEPS_CALM = 1.5


@dataclass(frozen=True, slots=True)
class Pressure:
    """A worker that is up, as the planner sees it."""

    name: str
    role: str
    wait_s: float
    """Until a prompt given to it now would be computed."""
    slowdown: float
    """Its decode steps, in those of a lone stream."""
    busy: int
    """What it serves, to find the one that is disturbed least."""


class Planner:
    def __init__(self) -> None:
        self._wanted: str | None = None
        self._looks = 0
        self._rest_until = 0.0

    def look(self, workers: Sequence[Pressure], now: float) -> str | None:
        """The worker to flip now, if any."""
        prefill = [worker for worker in workers if worker.role == "prefill"]
        decode = [worker for worker in workers if worker.role == "decode"]
        short = self._short(prefill, decode)
        self._looks = self._looks + 1 if short is not None and short == self._wanted else int(short is not None)
        self._wanted = short
        if short is None or self._looks < _LOOKS or now < self._rest_until:
            return None
        givers = decode if short == "prefill" else prefill
        self._looks, self._rest_until = 0, now + _REST_S
        return min(givers, key=lambda worker: worker.busy).name

    @staticmethod
    def _short(prefill: Sequence[Pressure], decode: Sequence[Pressure]) -> str | None:
        """The pool that needs one more and can get it."""
        if not prefill or not decode:
            return None
        wait_s = min(worker.wait_s for worker in prefill)
        slowdown = min(worker.slowdown for worker in decode)
        if wait_s > _PROMPTS_WAIT_S and slowdown < _STEPS_CALM and len(decode) > 1:
            return "prefill"
        if slowdown > _STEPS_SLOW and wait_s < _PROMPTS_CALM_S and len(prefill) > 1:
            return "decode"
        return None
