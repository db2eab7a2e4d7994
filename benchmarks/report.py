"""Benchmark results as a table for people and JSON for machines."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

Step = TypeVar("Step")


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile of `values` (not empty); `share` in (0, 1]."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """p50, p99 and max, rounded to a thousandth."""
    return {
        "p50": round(percentile(values, 0.5), 3),
        "p99": round(percentile(values, 0.99), 3),
        "max": round(max(values), 3),
    }


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import os

    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version()}


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(f"{cell:,.1f}" if isinstance(cell, float) else str(cell) for cell in row))
    Console().print(table)


def write_json(path: Path | None, results: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(results, indent=2) + "\n")
        print(f"written: {path}")


def progress(steps: Iterable[Step], name: str) -> Iterator[Step]:
    """`steps`, with a bar where somebody looks on."""
    from rich.progress import track

    yield from track(steps, name, console=Console(stderr=True), transient=True)
