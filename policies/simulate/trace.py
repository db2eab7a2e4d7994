"""Traces of traffic: who came when, with how long a prompt, and how long the answer was.

Known by their columns or keys: Azure's LLM inference traces (CSV: TIMESTAMP, ContextTokens, GeneratedTokens),
Mooncake's (JSON lines: timestamp in ms, input_length, output_length, hash_ids of 512 tokens each), and splitroute's
own (JSON lines: at_s, prompt_tokens, output_tokens, and what else a request said).
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from policies.model import Goals

HASHED_TOKENS = 512
"""How many tokens each of Mooncake's `hash_ids` stands for."""
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(Exception):
    """A trace that cannot be used; the message has the line."""


@dataclass(frozen=True, slots=True)
class Request:
    at_s: float
    """Since the trace's beginning."""
    prompt_tokens: int
    output_tokens: int
    """As many as the answer has; the policy is not told."""
    model: str | None = None
    max_tokens: int | None = None
    goals: Goals = field(default_factory=Goals)
    session: str | None = None
    prefixes: tuple[int, ...] = ()
    """Names of the prompt's blocks of HASHED_TOKENS, from its beginning: those that occurred before are cached."""


def read_trace(lines: Iterable[str]) -> list[Request]:
    """By arrival. Raises TraceError."""
    numbered = iter(enumerate(lines, 1))
    first = next(((number, line) for number, line in numbered if line.strip()), None)
    if first is None:
        raise TraceError("the trace is empty")
    number, line = first
    as_json = line.lstrip().startswith("{")
    read = _json_lines([(number, line), *numbered]) if as_json else _azure(line, numbered)
    requests = sorted(read, key=lambda request: request.at_s)
    if not requests:
        raise TraceError("the trace has no request")
    begun = requests[0].at_s
    return [replace(request, at_s=request.at_s - begun) for request in requests]


def _azure(header: str, numbered: Iterator[tuple[int, str]]) -> Iterator[Request]:
    names = _cells(header)
    missing = [name for name in _AZURE if name not in names]
    if missing:
        raise TraceError(
            f"line 1: no column {missing[0]!r}; a CSV trace has {', '.join(_AZURE)}, others are JSON lines"
        )
    places = [names.index(name) for name in _AZURE]
    for number, line in numbered:
        if not line.strip():
            continue
        row = _cells(line)
        try:
            at, context, generated = (row[place] for place in places)
            # Seven digits of a second: one more than datetime takes.
            stamp, _, fraction = at.partition(".")
            seconds = datetime.fromisoformat(stamp.rstrip("Z") + "+00:00").timestamp()
            yield Request(seconds + float(f"0.{fraction[:9].rstrip('Z+:') or 0}"), _count(context), _count(generated))
        except (ValueError, IndexError) as error:
            raise TraceError(f"line {number}: not a request: {error}") from None


def _cells(line: str) -> list[str]:
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return []  # which lacks every column


def _json_lines(numbered: Iterable[tuple[int, str]]) -> Iterator[Request]:
    for number, line in numbered:
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("a line must be a JSON object")
            yield _mooncake(row) if "input_length" in row else _own(row)
        except KeyError as error:
            raise TraceError(f"line {number}: not a request: no {error.args[0]!r}") from None
        except (ValueError, TypeError) as error:
            raise TraceError(f"line {number}: not a request: {error}") from None


def _mooncake(row: dict[str, Any]) -> Request:
    prefixes = tuple(int(name) for name in row.get("hash_ids") or ())
    return Request(
        _amount(row["timestamp"]) / 1000, _count(row["input_length"]), _count(row["output_length"]), prefixes=prefixes
    )


def _own(row: dict[str, Any]) -> Request:
    limit = row.get("max_tokens")
    goals = Goals(*(None if row.get(name) is None else _amount(row[name]) for name in ("ttft_ms", "tpot_ms")))
    return Request(
        _amount(row["at_s"]),
        _count(row["prompt_tokens"]),
        _count(row["output_tokens"]),
        model=row.get("model"),
        max_tokens=None if limit is None else _count(limit),
        goals=goals,
        session=row.get("session"),
    )


def _count(value: Any) -> int:
    number = int(value)
    if number < 0:
        raise ValueError(f"{value!r} tokens")
    return max(1, number)


def _amount(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{value!r} is no time")
    return number
