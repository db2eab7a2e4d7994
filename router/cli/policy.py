"""`splitroute policy check FILE`: a policy is loaded as the gateway would load it, and its checks are run. The group's
other commands are in `simulate`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from router.cli import simulate
from router.cli.parser import Parser, add_command

if TYPE_CHECKING:
    from policies import Policy

_EXAMPLES = """\
examples:
  splitroute policy check policy.yaml        in CI: exit 1 on a problem or a failed check

Every problem is printed as FILE:LINE:COLUMN: what is wrong (what to write instead). The environment variables
that the policy names must be set; their values are not used.
"""
_SCHEMA_EXAMPLES = """\
examples:
  splitroute policy schema > policy.schema.json

Editors with the YAML language server take it by a first line in the policy:
  # yaml-language-server: $schema=policy.schema.json
"""


def register(commands: argparse._SubParsersAction[Parser], common: Parser) -> None:
    group = commands.add_parser("policy", help="validate a policy", description="Work with policy files.")
    actions = group.add_subparsers(title="commands", metavar="COMMAND", required=True)
    check = actions.add_parser(
        "check",
        parents=[common],
        help="load a policy and run its checks",
        description="Load a policy, say everything that is wrong with it, and run its `checks:`.",
        epilog=_EXAMPLES,
    )
    check.add_argument("file", metavar="FILE", help="the policy, in YAML")
    check.set_defaults(run=_check, parser=check)
    schema = add_command(
        actions, common, "schema", "print the policy language as a JSON Schema, for editors", _SCHEMA_EXAMPLES
    )
    schema.set_defaults(run=_schema, parser=schema)
    simulate.register(actions, common)


def load(file: str) -> Policy:
    """The policy in `file`, read with this process's environment. Raises PolicyError or OSError."""
    import os

    import policies
    from backends import PROVIDER_OPTIONS
    from router.sdk import read_file

    return policies.load(
        read_file(file), filename=file, env=os.environ, provider_types=PROVIDER_OPTIONS, read=read_file
    )


def _schema(args: argparse.Namespace) -> int:
    import json

    from backends import PROVIDER_OPTIONS
    from policies.schema import schema

    print(json.dumps(schema(PROVIDER_OPTIONS), indent=2))
    return 0


def _check(args: argparse.Namespace) -> int:
    import policies
    from router.cli.console import err, out

    policy = load(args.file)
    summary = ", ".join(
        f"{len(named)} {kind}{'' if len(named) == 1 else 's'}"
        for kind, named in (
            ("provider", policy.providers),
            ("target", policy.targets),
            ("route", policy.routes),
            ("check", policy.checks),
        )
    )
    out().print(f"{args.file}: {summary}", markup=False)
    failures = policies.check(policy)
    for failure in failures:
        err().print(str(failure), markup=False, soft_wrap=True)
    passed = len(policy.checks) - len(failures)
    out().print(f"checks: {passed} passed, {len(failures)} failed", markup=False)
    return 1 if failures else 0
