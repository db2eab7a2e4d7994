"""`splitroute explain`: where a request would go, and why each target was kept or dropped. Nothing is sent."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from router.cli.parser import Parser, milliseconds, positive

if TYPE_CHECKING:
    from rich.table import Table

    from policies import Decision

_EXAMPLES = """\
examples:
  splitroute explain --policy policy.yaml --model chat --prompt-tokens 6000 --ttft-ms 400
  splitroute explain --policy policy.yaml --model chat --prompt-tokens 6000 --json

The decision is the one a gateway makes that has just started: it has seen no traffic, so predictions that need
some are shown as unknown. A running gateway explains itself in its response headers.
"""


def register(commands: argparse._SubParsersAction[Parser], common: Parser) -> None:
    explain = commands.add_parser(
        "explain",
        parents=[common],
        help="show where a request would go, and why",
        description="Show where a policy sends a request, and why each candidate was kept or dropped.",
        epilog=_EXAMPLES,
    )
    explain.add_argument("--policy", metavar="FILE", required=True, help="the policy, in YAML")
    explain.add_argument("--model", metavar="NAME", required=True, help="the model name the client asks for")
    explain.add_argument("--prompt-tokens", metavar="N", type=positive, required=True, help="length of the prompt")
    explain.add_argument("--max-tokens", metavar="N", type=positive, help="limit of the answer's length")
    explain.add_argument("--ttft-ms", metavar="MS", type=milliseconds, help="goal: time to first token")
    explain.add_argument("--tpot-ms", metavar="MS", type=milliseconds, help="goal: time per output token")
    explain.add_argument("--json", action="store_true", help="print the decision as JSON")
    explain.set_defaults(run=_explain, parser=explain)


def _explain(args: argparse.Namespace) -> int:
    import json
    import random

    from policies import Goals, NoCandidate, NoRoute, Profile, RouterState, decide
    from router.cli.errors import CliError
    from router.cli.policy import load

    policy = load(args.policy)
    profile = Profile(
        model=args.model,
        prompt_tokens=args.prompt_tokens,
        exact=True,
        max_tokens=args.max_tokens,
        goals=Goals(ttft_ms=args.ttft_ms, tpot_ms=args.tpot_ms),
        stream=True,
        tokens_by_target={},
    )
    try:
        decision = decide(policy, profile, RouterState(), random.Random(0))
    except NoRoute as error:
        raise CliError(str(error), hint=f"--model with a route of {args.policy}") from None
    except NoCandidate as error:
        decision = error.decision  # shown all the same: it has each target's reason
    if args.json:
        print(json.dumps(decision.to_dict(), indent=2, ensure_ascii=False))
    else:
        from router.cli.console import out

        out().print(f"model {decision.route}, class {decision.class_name}: {decision.reason}", markup=False)
        out().print(_table(decision))
    return 0 if decision.order else 1


def _table(decision: Decision) -> Table:
    from rich.table import Table
    from rich.text import Text

    shown = Table()
    for heading in ("order", "target", "kept", "why"):
        shown.add_column(heading, overflow="fold")
    for heading in ("TTFT ms", "TPOT ms", "P(goals met)", "cost USD"):
        shown.add_column(heading, justify="right")
    for candidate in decision.candidates:
        place = decision.order.index(candidate.target) + 1 if candidate.target in decision.order else None
        shown.add_row(
            str(place or "–"),
            Text(candidate.target),
            "yes" if candidate.kept else "no",
            Text(candidate.reason),
            _figure(candidate.ttft_ms, ",.0f"),
            _figure(candidate.tpot_ms, ",.1f"),
            _figure(candidate.p_meet, ".0%"),
            _figure(candidate.cost_usd, ".6f"),
        )
    return shown


def _figure(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)
