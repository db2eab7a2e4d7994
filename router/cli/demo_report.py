"""What `splitroute demo` reports: a row for each request, as a table and as JSON, and what the rows prove."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from backends.base import KVTransfer

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """Where one request went and what it took. Times in milliseconds; None where there is nothing to show."""

    request: str
    class_name: str
    target: str
    provider: str
    why: str
    prompt_tokens: int
    completion_tokens: int
    ttft_ms: float | None
    tpot_ms: float | None
    transfer: KVTransfer | None

    @property
    def kv_ms(self) -> float | None:
        """What the hand-over added before decode could step; what overlapped with prefill is not in it."""
        return None if self.transfer is None else self.transfer.exposed_s * 1000

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; the hand-over's phases are in milliseconds too."""
        moved = self.transfer
        return {
            "request": self.request,
            "class": self.class_name,
            "target": self.target,
            "provider": self.provider,
            "why": self.why,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "ttft_ms": _rounded(self.ttft_ms),
            "tpot_ms": _rounded(self.tpot_ms),
            "kv_bytes": moved.bytes if moved else 0,
            "kv_ms": _rounded(self.kv_ms),
            "kv": _transfer(moved) if moved else None,
        }


def table(rows: list[Row]) -> Table:
    from rich.table import Table

    shown = Table(title="where each request went", title_justify="left", show_lines=True)
    for heading in ("class", "target", "why"):
        shown.add_column(heading, overflow="fold")
    for heading in ("prompt tokens", "TTFT ms", "TPOT ms", "KV bytes", "KV ms"):
        shown.add_column(heading, justify="right")
    shown.add_column("prefill pid → decode pid", justify="right")
    for row in rows:
        moved = row.transfer
        shown.add_row(
            row.class_name,
            f"{row.target}\n({row.provider})",
            row.why,
            f"{row.prompt_tokens:,}",
            _number(row.ttft_ms),
            _number(row.tpot_ms),
            f"{moved.bytes:,}" if moved else "–",
            _number(row.kv_ms),
            f"{moved.prefill_pid} → {moved.decode_pid}" if moved else "–",
        )
    return shown


def as_json(rows: list[Row]) -> str:
    return json.dumps({"requests": [row.to_dict() for row in rows]}, indent=2, ensure_ascii=False) + "\n"


def missing_handover(row: Row) -> str | None:
    """Why `row`, the long request, is no proof that KV crossed between two processes; None when it is."""
    if row.transfer is None:
        return f"the long request went to {row.target!r} without a KV hand-over ({row.why})"
    if row.transfer.bytes <= 0:
        return "the long request's hand-over moved no bytes"
    if row.transfer.prefill_pid == row.transfer.decode_pid:
        return f"the long request was prefilled and decoded by one process, {row.transfer.decode_pid}"
    return None


def _transfer(moved: KVTransfer) -> dict[str, Any]:
    facts = dataclasses.asdict(moved)
    for name in [name for name in facts if name.endswith("_s")]:
        facts[f"{name.removesuffix('_s')}_ms"] = _rounded(facts.pop(name) * 1000)
    return facts


def _rounded(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else round(milliseconds, 3)


def _number(milliseconds: float | None) -> str:
    return "–" if milliseconds is None else f"{milliseconds:,.1f}"
