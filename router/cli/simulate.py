"""`splitroute policy simulate` and `policy diff`: a trace replayed through a policy, without sending anything."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from router.cli.errors import CliError
from router.cli.parser import Parser, add_command, milliseconds, positive

if TYPE_CHECKING:
    from policies import Policy
    from policies.simulate import Outcome, Report, Request
    from policies.simulate.report import Figures

_SIMULATE = """\
examples:
  splitroute policy simulate policy.yaml AzureLLMInferenceTrace_conv.csv --ttft-ms 1000
  splitroute policy simulate policy.yaml trace.jsonl --limit 10000 --pace 0.1 --json

Decisions are those of the live code. How targets behave is declared by `speed` in the policy, else taken from `expect`,
else assumed; the table says which. Traces: Azure's CSV, Mooncake's JSON lines, or JSON lines with at_s, prompt_tokens,
output_tokens and, where you like, model, max_tokens, ttft_ms, tpot_ms, session.
"""
_DIFF = """\
examples:
  splitroute policy diff old.yaml new.yaml trace.csv      which requests would go elsewhere, and what that changes
"""


def register(actions: argparse._SubParsersAction[Parser], common: Parser) -> None:
    simulating = add_command(
        actions, common, "simulate", "replay a trace through a policy, in simulated time", _SIMULATE
    )
    simulating.add_argument("file", metavar="POLICY", help="the policy, in YAML")
    diff = add_command(actions, common, "diff", "say what a new policy changes for a trace, and for whom", _DIFF)
    diff.add_argument("file", metavar="OLD", help="the policy as it is")
    diff.add_argument("new", metavar="NEW", help="the policy as it would be")
    for command in (simulating, diff):
        command.add_argument("trace", metavar="TRACE", help="the requests")
        command.add_argument("--route", metavar="NAME", help="for requests that name no model (default: the first)")
        command.add_argument("--ttft-ms", metavar="MS", type=milliseconds, help="everybody's goal: first token")
        command.add_argument("--tpot-ms", metavar="MS", type=milliseconds, help="everybody's goal: per output token")
        command.add_argument("--limit", metavar="N", type=positive, help="no more than the first N requests")
        command.add_argument(
            "--pace", metavar="X", type=float, default=1.0, help="arrivals X times as fast (default 1)"
        )
        command.add_argument("--seed", metavar="N", type=int, default=0, help="of everything random (default 0)")
        command.add_argument("--json", action="store_true", help="print figures as JSON")
    simulating.set_defaults(run=_simulate, parser=simulating)
    diff.set_defaults(run=_diff, parser=diff)


def _requests(args: argparse.Namespace) -> list[Request]:
    from dataclasses import replace
    from itertools import islice
    from pathlib import Path

    from policies.simulate import TraceError, read_trace

    if args.pace <= 0:
        raise CliError(f"--pace {args.pace:g}: must be above 0")
    limit = None if args.limit is None else args.limit + 1  # and a header
    try:
        with Path(args.trace).open(encoding="utf-8") as file:
            requests = read_trace(islice(file, limit))[: args.limit]
    except TraceError as error:
        hint = "splitroute policy simulate --help says what a trace is"
        raise CliError(f"{args.trace}: {error}", hint=hint) from None
    except UnicodeDecodeError:
        raise CliError(f"{args.trace} is not text") from None
    return [replace(request, at_s=request.at_s / args.pace) for request in requests]


def _run(args: argparse.Namespace, file: str, requests: list[Request]) -> tuple[list[Outcome], Report]:
    from policies import Goals
    from policies.simulate import simulate, summarize, world_of
    from router.cli.console import progress
    from router.cli.policy import load

    policy = load(file)
    world = world_of(policy)
    with progress(f"simulating {file}", len(requests)) as report:
        outcomes = simulate(
            policy,
            requests,
            world,
            route=_route(args, policy),
            goals=Goals(args.ttft_ms, args.tpot_ms),
            seed=args.seed,
            progress=report,
        )
    return outcomes, summarize(outcomes, world)


def _route(args: argparse.Namespace, policy: Policy) -> str:
    routes = list(policy.routes)
    if args.route is None:
        return routes[0]
    if args.route not in routes:
        raise CliError(f"{policy.filename} has no route {args.route!r}; there are {', '.join(routes)}")
    return str(args.route)


def _simulate(args: argparse.Namespace) -> int:
    import json

    from router.cli.console import out

    _, report = _run(args, args.file, _requests(args))
    if args.json:
        print(json.dumps(report.to_dict(), indent=2, ensure_ascii=False))
        return 0
    out().print(_table(report))
    for line in _shares(report):
        out().print(line, markup=False, highlight=False)
    if report.brier is not None:
        out().print(f"Brier score of the predicted chances: {report.brier:.4f} (0 is perfect)", highlight=False)
    return 0


def _table(report: Report) -> Any:
    from rich.table import Table

    shown = Table(title=f"{report.total.requests:,} requests in {report.seconds:,.0f} s", title_justify="left")
    shown.add_column("class")
    for heading in ("requests", "refused", "goals met", "goodput/s", "cost USD"):
        shown.add_column(heading, justify="right")
    for heading in ("TTFT ms p50 p90 p99", "TPOT ms p50 p90 p99"):
        shown.add_column(heading, justify="right")
    for name, figures in [*report.classes.items(), ("all", report.total)]:
        cost = f"{figures.cost_usd:,.4f}" + (f" + {figures.unpriced:,} unpriced" if figures.unpriced else "")
        shown.add_row(
            name,
            f"{figures.requests:,}",
            f"{figures.refused:,}",
            f"{figures.attainment:.1%}",
            f"{figures.goodput_per_s:.2f}",
            cost,
            *(" ".join(f"{value:,.0f}" for value in times.values()) for times in (figures.ttft_ms, figures.tpot_ms)),
        )
    return shown


def _shares(report: Report) -> list[str]:
    """A bar for each target's share."""
    width = max((len(name) for name in report.origins), default=0)
    return [
        f"  {name:<{width}} {'█' * round(40 * share) or '▏'} {share:.1%}  (behaviour {report.origins[name]})"
        for name, share in sorted(report.total.targets.items(), key=lambda one: -one[1])
    ]


def _diff(args: argparse.Namespace) -> int:
    import json
    from collections import Counter

    from rich.table import Table

    from router.cli.console import out

    requests = _requests(args)
    before, old = _run(args, args.file, requests)
    after, new = _run(args, args.new, requests)
    moves = Counter(
        (one.class_name, other.class_name, one.target or "refused", other.target or "refused")
        for one, other in zip(before, after, strict=True)
        if (one.target, one.class_name) != (other.target, other.class_name)
    )
    if args.json:
        rows = [
            {"old_class": a, "new_class": b, "old_target": c, "new_target": d, "requests": count}
            for (a, b, c, d), count in moves.most_common()
        ]
        print(json.dumps({"old": old.to_dict(), "new": new.to_dict(), "moves": rows}, indent=2, ensure_ascii=False))
        return 0
    moved = sum(moves.values())
    out().print(f"{moved:,} of {len(requests):,} requests are decided otherwise", highlight=False)
    if moves:
        shown = Table()
        for heading in ("class", "from", "to"):
            shown.add_column(heading)
        shown.add_column("requests", justify="right")
        for (was, becomes, source, target), count in moves.most_common():
            shown.add_row(was if was == becomes else f"{was} → {becomes}", source, target, f"{count:,}")
        out().print(shown)
    for what, change in _changes(old.total, new.total):
        out().print(f"  {what:<12} {change}", markup=False, highlight=False)
    return 0


def _changes(old: Figures, new: Figures) -> list[tuple[str, str]]:
    changes = [
        ("goals met", f"{old.attainment:.1%} → {new.attainment:.1%}"),
        ("goodput", f"{old.goodput_per_s:.2f} → {new.goodput_per_s:.2f} /s"),
        ("cost", f"${old.cost_usd:,.4f} → ${new.cost_usd:,.4f}"),
    ]
    for what, one, other in (("TTFT", old.ttft_ms, new.ttft_ms), ("TPOT", old.tpot_ms, new.tpot_ms)):
        changes += [(f"{what} {q}", f"{one[q]:,.0f} → {other[q]:,.0f} ms") for q in one if q in other]
    return changes
