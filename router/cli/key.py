"""`splitroute key`: who may ask a gateway."""

from __future__ import annotations

import argparse
from pathlib import Path

from router.cli.errors import CliError
from router.cli.parser import Parser, add_command

_EXAMPLES = """\
examples:
  splitroute key create --keys keys.json --label search-team
  splitroute key create --keys keys.json --label intern --route chat      may ask for that route only
  splitroute key list --keys keys.json
  splitroute key revoke --keys keys.json search-team                      every key of that label, or one by its id

then:
  splitroute up --policy policy.yaml --keys keys.json --host 0.0.0.0
"""


def register(commands: argparse._SubParsersAction[Parser], common: Parser) -> None:
    group = commands.add_parser("key", help="who may ask a gateway", description="Make and revoke a gateway's keys.")
    actions = group.add_subparsers(title="commands", metavar="COMMAND", required=True)
    create = add_command(actions, common, "create", "make a key and show it once", _EXAMPLES)
    create.add_argument("--label", metavar="NAME", required=True, help="whose it is; policies may ask for it")
    create.add_argument("--route", metavar="NAME", action="append", default=[], help="may ask for it (default: all)")
    create.set_defaults(run=_create, parser=create)
    listed = add_command(actions, common, "list", "show the keys there are, without their secrets", _EXAMPLES)
    listed.set_defaults(run=_list, parser=listed)
    revoke = add_command(actions, common, "revoke", "make keys invalid, at once for a gateway that serves", _EXAMPLES)
    revoke.add_argument("key", metavar="ID|LABEL", help="a key's id, or a label for all of its keys")
    revoke.set_defaults(run=_revoke, parser=revoke)
    for command in (create, listed, revoke):
        command.add_argument("--keys", metavar="FILE", required=True, help="where the gateway's keys are kept")


def _create(args: argparse.Namespace) -> int:
    from router import keys
    from router.cli.console import err

    key, shown = keys.create(Path(args.keys), args.label, args.route)
    err().print(f"key {key.id} for {key.label}, shown this once:", markup=False, highlight=False)
    print(shown)
    return 0


def _list(args: argparse.Namespace) -> int:
    from rich.table import Table

    from router.cli.console import out
    from router.keys import read_keys

    table = Table("id", "label", "routes", "created")
    for key in read_keys(Path(args.keys)).values():
        table.add_row(key.id, key.label, ", ".join(key.routes) or "all", key.created)
    out().print(table)
    return 0


def _revoke(args: argparse.Namespace) -> int:
    from router import keys
    from router.cli.console import out

    gone = keys.revoke(Path(args.keys), args.key)
    if not gone:
        raise CliError(f"{args.keys} has no key {args.key!r}", hint=f"splitroute key list --keys {args.keys}")
    for key in gone:
        out().print(f"revoked {key.id} ({key.label})", markup=False, highlight=False)
    return 0
