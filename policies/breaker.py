"""When a target gets nothing for a while, because it failed or said that it had too many requests.

Closed: requests go. Open: none do, until the latest moment that any reason gave. Half-open after that: one request is
let through, and how it fares decides. Failures in a row open it, and so does their share of a window (Nygard, Release
It!, 2007; the rate as in resilience4j). A failure of what began before the last success is in no row: of a thousand
requests at once, those that ran into a timer fail together, long after others were answered. A 429 opens it at once,
for as long as the provider said: where targets share a quota, theirs is one breaker, so that none hammers what another
was refused by (litellm#34399). Errors that are the request's own fault never count (sglang#9312). No clock: whoever
asks says what time it is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_WINDOW_LEAST = 20
"""Requests in a window without which a share of failures says nothing."""
_WINDOW_MOST = 1000


@dataclass(frozen=True, slots=True)
class BreakerRule:
    """Milliseconds of any clock. `failures` 0 for never."""

    failures: int = 5
    """So many in a row open it."""
    rate: float = 0.5
    """So large a share of the last window's requests opens it, from 20 on."""
    window_ms: int = 30000
    open_ms: int = 1000
    """For how long; twice as long after each probe that fails."""
    most_ms: int = 60000
    """And never for longer, unless the provider said so."""


class Breaker:
    """One target's, or one quota's."""

    __slots__ = (
        "_ended",
        "_failed",
        "_in_a_row",
        "_probing",
        "_trips",
        "_well_s",
        "opened",
        "rule",
        "status",
        "until_s",
        "why",
    )

    def __init__(self, rule: BreakerRule | None = None) -> None:
        self.rule = rule or BreakerRule()
        self.opened = False
        """Whether it is open or half-open."""
        self.until_s = 0.0
        """When it is half-open; the latest of all reasons."""
        self.status = 503
        """What the latest failure was."""
        self.why = ""
        self._probing = False
        self._in_a_row = 0
        self._trips = 0
        self._well_s = float("-inf")
        """When it last answered."""
        self._ended: deque[tuple[float, bool]] = deque(maxlen=_WINDOW_MOST)
        """(when, whether it failed) in the window."""
        self._failed = 0
        """How many of those did."""

    def wait_s(self, now_s: float) -> float:
        """0 where a request may go now; where a probe is under way, what it is worth waiting before asking again."""
        if not self.opened:
            return 0.0
        if now_s < self.until_s:
            return self.until_s - now_s
        return self.rule.open_ms / 1000 if self._probing else 0.0

    def begin(self, now_s: float) -> bool:
        """A request goes; whether it is the probe. Asked only where `wait_s` is 0."""
        if not self.opened or self._probing or now_s < self.until_s:
            return False
        self._probing = True
        return True

    def answered(self, now_s: float, probe: bool) -> None:
        """It was answered, or refused for its own fault. One that began before it opened does not close it."""
        if not self.opened or probe:
            self._in_a_row = 0
            self._well_s = now_s
        if probe:
            self.opened = self._probing = False
            self._trips = 0
            self._ended.clear()
            self._failed = 0
        if not self.opened:
            self._note(now_s, False)

    def failed(self, now_s: float, probe: bool, status: int, why: str, began_s: float | None = None) -> None:
        """It was not answered, or not wholly; `began_s` None for just now."""
        self._probing = self._probing and not probe
        self._in_a_row += began_s is None or began_s >= self._well_s
        self._note(now_s, True)
        rule = self.rule
        if not rule.failures:
            return
        many = len(self._ended) >= _WINDOW_LEAST and self._failed >= rule.rate * len(self._ended)
        if probe or (not self.opened and (self._in_a_row >= rule.failures or many)):
            said = f"{self._in_a_row} in a row" if self._in_a_row >= rule.failures else f"{self._failed} lately"
            self._open(now_s, status, f"it failed ({said}; the last time with {status}: {why})")

    def refused(self, now_s: float, probe: bool, status: int, why: str, retry_after_s: float | None) -> None:
        """A 429, or another status with a time to come back (litellm#20722: none shortens another)."""
        self._probing = self._probing and not probe
        if retry_after_s is not None:
            # Zero would be an invitation to hammer.
            self._open(now_s, status, why, max(retry_after_s, self.rule.open_ms / 1000 / 10))
        elif probe or not self.opened:
            self._open(now_s, status, why)

    def abandoned(self, probe: bool) -> None:
        """It was given up for no fault of the target: nothing was learned."""
        self._probing = self._probing and not probe

    def _open(self, now_s: float, status: int, why: str, seconds: float | None = None) -> None:
        if seconds is None:
            seconds = min(self.rule.open_ms * 2.0**self._trips, self.rule.most_ms) / 1000
            self._trips = min(self._trips + 1, 30)
        self.opened = True
        self.status, self.why = status, why
        self.until_s = max(self.until_s, now_s + seconds)

    def _note(self, now_s: float, failed: bool) -> None:
        ended = self._ended
        if len(ended) == _WINDOW_MOST:
            self._failed -= ended.popleft()[1]
        ended.append((now_s, failed))
        self._failed += failed
        since = now_s - self.rule.window_ms / 1000
        while ended[0][0] < since:
            self._failed -= ended.popleft()[1]
