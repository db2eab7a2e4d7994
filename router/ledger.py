"""What became of the latest requests, and the figures that operators watch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backends.base import KVTransfer, Usage

if TYPE_CHECKING:
    from policies import Decision
    from router.results import Attempt

KEPT = 1000
"""Requests remembered: enough to look one up, little enough for memory to stay flat."""


@dataclass(frozen=True, slots=True)
class Record:
    """One finished request. Seconds from its arrival; None where it never came that far."""

    request_id: str
    surface: str
    decision: Decision | None
    target: str | None
    status: int
    attempts: tuple[Attempt, ...]
    usage: Usage | None
    ttft_s: float | None
    tpot_s: float | None
    total_s: float
    cost_usd: float | None
    transfer: KVTransfer | None
    placement: str | None
    """Where within its provider it was sent, and why."""
    error: str | None
    """The code or type of what ended it, None where it ended well; `cancelled` where its client left."""

    @property
    def met(self) -> bool | None:
        """Whether it kept its goals; None where it had none, or where it cannot be told."""
        goals = self.decision.goals if self.decision is not None else None
        if goals is None or self.ttft_s is None:
            return None
        if goals.ttft_ms is not None and self.ttft_s * 1000 > goals.ttft_ms:
            return False
        return goals.tpot_ms is None or self.tpot_s is None or self.tpot_s * 1000 <= goals.tpot_ms


class Ledger:
    """The latest records, newest last; `add` also keeps the metrics."""

    def __init__(self) -> None:
        from router.metrics import Metrics  # on first use: the Prometheus client takes a while to import

        self._records: deque[Record] = deque(maxlen=KEPT)
        self.metrics = Metrics()

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def find(self, request_id: str) -> Record | None:
        """The newest record of that id."""
        return next((record for record in reversed(self._records) if record.request_id == request_id), None)

    def add(self, record: Record) -> None:
        self._records.append(record)
        self.metrics.observe(record)
