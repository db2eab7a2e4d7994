"""`splitroute chaos`: a provider that fails on purpose."""

from __future__ import annotations

import argparse
import signal
import threading

from router.cli.errors import CliError
from router.cli.parser import Parser, port

_EXAMPLES = """\
examples:
  splitroute chaos --port 9100
  curl localhost:9100/v1/chat/completions -d '{"model": "cut:3", "stream": true, "messages": []}'

in a policy, each model is a script:
  providers: {chaos: {type: openai, base_url: "http://127.0.0.1:9100/v1"}}
  targets:
    flaky: {provider: chaos, model: "once:503"}     # fails once
    slow: {provider: chaos, model: "slow-first:4000"}
"""


def register(commands: argparse._SubParsersAction[Parser], common: Parser) -> None:
    command = commands.add_parser(
        "chaos",
        parents=[common],
        help="serve a provider that fails on purpose, to test a policy with",
        description="Serve a provider that speaks OpenAI's and Anthropic's APIs and does what the model's name says.",
        epilog=_EXAMPLES,
    )
    command.add_argument("--port", type=port, default=9100, help="where it listens, on 127.0.0.1 (default: 9100)")
    command.add_argument("--list", action="store_true", help="show what it can do, and exit")
    command.set_defaults(run=_run, parser=command)


def _run(args: argparse.Namespace) -> int:
    from rich.table import Table

    from router.chaos import SCRIPTS, FakeProvider
    from router.chaos.scripts import Script
    from router.cli.console import out

    table = Table("model", "what happens")
    for name in SCRIPTS:
        about: str = getattr(Script, "do_" + name.replace("-", "_")).__doc__
        table.add_row(name, " ".join(about.split()))
    out().print(table)
    if args.list:
        return 0
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    try:
        with FakeProvider(port=args.port, kept=1000) as provider:
            out().print(f"chaos on {provider.url}; stop it with Ctrl-C", markup=False, highlight=False)
            stopped.wait()
    except OSError as error:
        raise CliError(
            f"port {args.port} cannot be listened on ({error.strerror})", hint="splitroute chaos --port 9101"
        ) from None
    return 0
