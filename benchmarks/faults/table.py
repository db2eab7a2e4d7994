"""Every fault, streamed and not, with somebody to fall back to and without, at every gateway."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx

from benchmarks.faults.asking import HUNG_S, Outcome, ask
from benchmarks.faults.servers import Gateway
from benchmarks.report import progress, show
from router.chaos import TEXT, WORDS, FakeProvider, model_for_words

_EXPECTED = {
    "filtered": WORDS[0],
    "huge:200": "x" * (200 << 10),
    "doubled": "".join(word * 2 for word in WORDS),
}
_BOTH = (
    "ok",
    "once:500",
    "status:429",
    "bare:429",
    "bare:503",
    "bare:400",
    model_for_words("prompt is too long: 10 tokens > 5 maximum"),
    "reset",
    "never-answers",
    "empty",
    "error-body",
    "html",
    "bad-gzip",
)
_STREAMED = (
    "slow-first:60000",
    "role-then-silence",
    "comments-forever",
    "cut:0",
    "cut:3",
    "ends-tidily:0",
    "ends-tidily:3",
    "token-then-silence",
    "token-then-comments",
    "malformed:0",
    "malformed:3",
    "error-event:0",
    "error-event:3",
    "old",
    "filtered",
    "huge:200",
    "doubled",
)
_WHOLE = ("half-a-body", "malformed")
_FAULTS = (*_BOTH, *_STREAMED, *_WHOLE)
_COLUMNS = {
    "stream-alone": (True, (*_BOTH, *_STREAMED)),
    "stream-fallback": (True, (*_BOTH, *_STREAMED)),
    "whole-alone": (False, (*_BOTH, *_WHOLE)),
    "whole-fallback": (False, (*_BOTH, *_WHOLE)),
}


def run_table(gateways: Sequence[Gateway]) -> dict[str, Any]:
    found: dict[str, dict[str, dict[str, Outcome]]] = {}
    for gateway in progress(gateways, "faults"):
        found[gateway.name] = asyncio.run(_rows(gateway))
    for column in _COLUMNS:
        rows = [
            (_short(fault), *(str(found[gateway.name][column][fault]) for gateway in gateways))
            for fault in _COLUMNS[column][1]
        ]
        show(column, ("fault", *(gateway.name for gateway in gateways)), rows)
    totals = {
        name: Counter(outcome.kind for rows in columns.values() for outcome in rows.values())
        for name, columns in found.items()
    }
    kinds = ("whole", "error", "half", "hung")
    longest = {
        name: max(outcome.seconds for rows in columns.values() for outcome in rows.values())
        for name, columns in found.items()
    }
    show(
        f"in all (half: an answer cut short that looks whole; hung: after {HUNG_S:.0f} s)",
        ("", *kinds, "longest s"),
        [(name, *(total[kind] for kind in kinds), longest[name]) for name, total in totals.items()],
    )
    return {
        "totals": {name: {kind: total[kind] for kind in kinds} for name, total in totals.items()},
        "rows": {
            name: {
                column: {
                    _short(fault): {"outcome": one.kind, "status": one.status, "seconds": round(one.seconds, 2)}
                    for fault, one in rows.items()
                }
                for column, rows in columns.items()
            }
            for name, columns in found.items()
        },
    }


async def _rows(gateway: Gateway) -> dict[str, dict[str, Outcome]]:
    found = {}
    with FakeProvider() as provider, gateway.serving(provider.url, _FAULTS, tuple(_COLUMNS)) as url:
        for column, (stream, faults) in _COLUMNS.items():
            provider.forget()
            async with httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits()) as client:

                async def one(
                    fault: str, client: httpx.AsyncClient = client, stream: bool = stream, column: str = column
                ) -> Outcome:
                    model, headers = gateway.asked(provider.url, fault, column)
                    return await ask(client, model, stream=stream, expected=_EXPECTED.get(fault, TEXT), headers=headers)

                outcomes = await asyncio.gather(*(one(fault) for fault in faults))
            found[column] = dict(zip(faults, outcomes, strict=True))
    return found


def _short(fault: str) -> str:
    return "too-long" if fault.startswith("says") else fault
