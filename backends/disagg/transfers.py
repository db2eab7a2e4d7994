"""The hand-overs watched: how fast each pair is, and an alarm where they can be felt. Plain Python.

Past 50 ms a hand-over shows between two tokens. One slow transfer is noise; several of the last ones raise the alarm,
and it ends only when they are clearly below again, so that it does not flutter.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

ALARM_S = 0.050
_CLEAR_S = 0.040
_WINDOW = 8
_RAISE = 3
"""So many of the last `_WINDOW` transfers above `ALARM_S` raise the alarm; all of them below `_CLEAR_S` end it."""
_RATE = 0.3
_MIN_BYTES = 1 << 20
"""Smaller transfers say little of a link's speed."""


@dataclass(slots=True)
class PairSpeed:
    """What the transfers of one prefill → decode pair were like."""

    bytes_per_s: float
    """KV bytes, as they lie in the cache, whatever the codec made of them on the way."""
    fixed_s: float = 0.005
    """What even a small transfer takes, and what cannot hide behind the prompt's computation."""
    alarm: bool = False
    transfers: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def exposed_s(self, moved: int, prefill_s: float) -> float:
        """Seconds that moving `moved` bytes will show, while the prompt's computation hides `prefill_s` of it."""
        return self.fixed_s + max(0.0, moved / self.bytes_per_s - prefill_s)

    def observe(self, moved: int, busy_s: float, exposed_s: float, prefill_s: float) -> bool:
        """Learn from one: `busy_s` on wire and codec. True where the alarm was raised or ended by it."""
        self.transfers += 1
        if moved >= _MIN_BYTES and busy_s > 0:
            per_byte = 1.0 / self.bytes_per_s
            rate = 1.0 if self.transfers == 1 else _RATE  # what was there before was a guess
            self.bytes_per_s = 1.0 / (per_byte + rate * (busy_s / moved - per_byte))
        hidden = max(0.0, moved / self.bytes_per_s - prefill_s)
        self.fixed_s += _RATE * (max(0.0, exposed_s - hidden) - self.fixed_s)
        self.recent.append(exposed_s)
        before = self.alarm
        if self.alarm:
            self.alarm = len(self.recent) < _WINDOW or max(self.recent) >= _CLEAR_S
        else:
            self.alarm = sum(seconds > ALARM_S for seconds in self.recent) >= _RAISE
            if self.alarm:
                self.recent.clear()
        return self.alarm != before
