"""The `splitroute` command. Each subcommand is a file here; this one finds it and reports how it ended.

Exit status: 0 done, 1 failed, 2 the command line makes no sense, 130 stopped by Ctrl-C. A failure is one
message and what to try next, on stderr; a traceback appears only with --debug.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from router.cli import chaos, cluster, demo, explain, key, model, policy, up, worker
from router.cli.console import fail
from router.cli.errors import told
from router.cli.parser import USAGE, Parser, Version

__all__ = ["main"]

_EXAMPLES = """\
examples:
  splitroute demo                                    see it work: three requests, three routes
  splitroute up                                      serve the bundled cluster on 127.0.0.1:8080
  splitroute up --policy policy.yaml --port 9000     serve your own policy
  splitroute key create --keys keys.json --label me  let somebody in from outside this machine
  splitroute policy check policy.yaml                validate a policy and run its checks
  splitroute cluster status                          the workers of a running gateway
  splitroute worker --secret-file secret.txt         be a worker of a cluster whose gateway is elsewhere
  splitroute chaos --port 9100                       a provider that fails on purpose, to test a policy with
  splitroute explain --policy policy.yaml --model chat --prompt-tokens 6000 --ttft-ms 400
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit status."""
    parser = _parser()
    try:
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            args.parser.refuse_unknown(unknown)
    except SystemExit as stop:  # argparse ends --help, --version and usage errors this way
        return stop.code if isinstance(stop.code, int) else USAGE
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if args.debug:
            raise
        fail(told(error))
        return 1


def _parser() -> Parser:
    common = Parser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    parser = Parser(
        prog="splitroute",
        description="Route each LLM request where its latency goal is met at the least cost.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--version", action=Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (up, demo, cluster, worker, model, policy, explain, key, chaos):
        command.register(commands, common)
    return parser
