"""A second attempt beside a slow first one: when it is worth it, and what it may cost (Dean & Barroso, The Tail at
Scale, 2013)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from backends.base import BackendError
from policies.model import Hedge
from router.tried import Tried

_MOST_SAVED = 5.0
"""Second attempts that may be saved up for a bad moment."""
_HOUR_S = 3600.0


class HedgeBudget:
    """A route's. Plain arithmetic; whoever asks says what time it is."""

    def __init__(self) -> None:
        self._saved = 0.0
        self._spent: deque[tuple[float, float]] = deque()

    def request(self, hedge: Hedge) -> None:
        """A request came: that many hundredths of a second attempt more."""
        self._saved = min(self._saved + hedge.percent / 100, max(_MOST_SAVED, hedge.percent / 100))

    def take(self, hedge: Hedge, now_s: float, usd: float) -> bool:
        """Whether a second attempt that costs so much may be made; it is then accounted."""
        while self._spent and self._spent[0][0] <= now_s - _HOUR_S:
            self._spent.popleft()
        if self._saved < 1:
            return False
        if hedge.usd_per_hour is not None and sum(cost for _, cost in self._spent) + usd > hedge.usd_per_hour:
            return False
        self._saved -= 1
        if usd:
            self._spent.append((now_s, usd))
        return True


def hedge_at_ms(hedge: Hedge, goal_ms: float | None, slow_ms: float | None, other_ms: float | None) -> float | None:
    """When after its start a second attempt is worth it; None for never, as nothing is known.

    `slow_ms` is what the first attempt takes longer than only in `hedge.percent` of cases, so that the budget lasts.
    With a goal there is no hurry before the last moment at which the other target, which takes `other_ms`, would still
    keep it: then headroom is gone.
    """
    if slow_ms is None:
        return None
    if goal_ms is None or other_ms is None:
        return slow_ms
    return max(slow_ms, goal_ms - other_ms)


async def race(
    first: Coroutine[Any, Any, Tried], second: Callable[[], Coroutine[Any, Any, Tried] | None], after_s: float
) -> tuple[Tried, list[Tried]]:
    """The attempt that begins to answer first, and those that began by a moment later. All but the winner are released.

    `second` is asked for another attempt once `first` has taken `after_s`. Raises the latest BackendError where every
    attempt failed.
    """
    running = [asyncio.create_task(first)]
    won: Tried | None = None
    error: BackendError | None = None
    try:
        await asyncio.wait(running, timeout=after_s)
        if not running[0].done() and (other := second()) is not None:
            running.append(asyncio.create_task(other))
        while running and won is None:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            ended = next(task for task in running if task.done())
            running.remove(ended)
            try:
                won = ended.result()
            except BackendError as failed:
                error = failed
        if won is not None:
            return won, await _given_up(running)
    except BaseException:  # also where the client leaves while the slower ones are being given up
        await _given_up(running)
        if won is not None:
            await won.aclose()
        raise
    assert error is not None
    raise error


async def _given_up(tasks: Sequence[asyncio.Task[Tried]]) -> list[Tried]:
    """Cancel attempts; those that had just begun to answer are released."""
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    begun = [one for one in ended if isinstance(one, Tried)]
    for one in begun:
        await one.aclose()
    return begun
