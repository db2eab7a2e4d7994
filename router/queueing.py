"""Requests that wait for a target that is full: the urgent before the patient, and none for longer than makes sense.

A queue has a bound, so overload becomes refusals that say when to come back, not ever longer waits. Whoever is asked
for with a higher priority takes the place of whoever came with the lowest.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from policies import Policy, RouterState
from router.errors import RouterError

_FORGET = 0.9


@dataclass(eq=False, slots=True)
class _Waiting:
    targets: frozenset[str]
    rank: tuple[float, float, int]
    """The least goes first: its priority negated, when it wants to begin at the latest, and when it came."""
    granted: asyncio.Future[str] = field(repr=False)


class Queues:
    """Those of every target. For one event loop."""

    def __init__(self, policy: Policy, state: RouterState) -> None:
        self._policy = policy
        self._state = state
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()
        self._held_s: dict[str, float] = {}
        """How long a request occupies a target, lately."""
        self.shed: Callable[[str], None] = lambda why: None
        """Told of each that is turned away."""

    def __len__(self) -> int:
        return len(self._waiting)

    def waiting_at(self, target: str) -> int:
        return sum(target in one.targets for one in self._waiting)

    def freed(self, target: str, held_s: float | None = None) -> None:
        """A request left `target`: whoever is next may go there."""
        if held_s is not None:
            known = self._held_s.get(target, held_s)
            self._held_s[target] = known * _FORGET + held_s * (1 - _FORGET)
        if not self._waiting:
            return
        known_state = self._state[target]
        limit = known_state.limit(self._policy.targets[target]) if target in self._policy.targets else None
        while limit is None or known_state.inflight + known_state.reserved < limit:
            able = [one for one in self._waiting if target in one.targets]
            if not able:
                return
            first = min(able, key=lambda one: one.rank)
            self._waiting.remove(first)
            known_state.reserved += 1
            first.granted.set_result(target)

    async def wait(self, targets: frozenset[str], priority: float, begin_by: float, deadline: float) -> None:
        """Until one of the full `targets` has a place. Raises RouterError (503) where it is not worth waiting."""
        waiting = _Waiting(
            targets,
            (-priority, begin_by, next(self._numbers)),
            asyncio.get_running_loop().create_future(),
        )
        self._make_room(waiting, deadline)
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                target = await waiting.granted
        except TimeoutError:
            raise self._refused("the queue did not move in time", targets) from None
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(waiting)
            if waiting.granted.done() and not waiting.granted.cancelled() and not waiting.granted.exception():
                # The place was kept for this one; from here on it is taken, or somebody else's.
                self._state[waiting.granted.result()].reserved -= 1
        assert target in targets

    def _make_room(self, newcomer: _Waiting, deadline: float) -> None:
        """Raises RouterError where the newcomer is the one to be turned away."""
        ahead = sum(one.rank < newcomer.rank and not one.targets.isdisjoint(newcomer.targets) for one in self._waiting)
        places = sum(self._state[name].limit(self._policy.targets[name]) or 1 for name in newcomer.targets)
        held_s = min((self._held_s[name] for name in newcomer.targets if name in self._held_s), default=0.0)
        if time.monotonic() + (ahead + 1) * held_s / places + held_s > deadline:
            raise self._refused(f"{ahead} requests wait before this one, too many for its deadline", newcomer.targets)
        room = sum(self._policy.targets[name].queue for name in newcomer.targets)
        waiting = [one for one in self._waiting if not one.targets.isdisjoint(newcomer.targets)]
        if len(waiting) < room:
            return
        last = max(waiting, key=lambda one: one.rank, default=None)
        if last is None or -newcomer.rank[0] <= -last.rank[0]:
            raise self._refused(f"{len(waiting)} requests wait already, which is as many as may", newcomer.targets)
        self._waiting.remove(last)
        last.granted.set_exception(self._refused("a more urgent request took its place in the queue", last.targets))

    def _refused(self, why: str, targets: frozenset[str]) -> RouterError:
        self.shed(why)
        held_s = min((self._held_s[name] for name in targets if name in self._held_s), default=1.0)
        places = sum(self._state[name].limit(self._policy.targets[name]) or 1 for name in targets)
        wait_s = max(1.0, len(self._waiting) * held_s / places)
        named = ", ".join(sorted(targets))
        return RouterError(f"{named}: {why}", status=503, code="target_busy", retry_after_s=wait_s)
