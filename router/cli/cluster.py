"""`splitroute cluster`: the workers of a running gateway, seen and changed."""

from __future__ import annotations

import argparse
from typing import Any

from router.cli.errors import CliError
from router.cli.parser import Parser, add_command

_STATUS = """\
examples:
  splitroute cluster status                          workers, their roles and loads, and the transfers between them
  splitroute cluster status --url http://127.0.0.1:9000
"""
_ADD = """\
examples:
  splitroute cluster add --role decode               one more decode worker; waits until it serves
  splitroute cluster add --role decode --address 10.0.0.5:7101   behind `splitroute worker` on another host
"""
_DRAIN = """\
examples:
  splitroute cluster drain decode-1                  nothing new goes there; what it serves it finishes
  splitroute cluster drain decode-1 --undo           let it serve again
"""
_REMOVE = """\
examples:
  splitroute cluster remove decode-1                 stop it when it has nothing left to do
  splitroute cluster remove decode-1 --now           at once: others go on with its answers
"""
_FLIP = """\
examples:
  splitroute cluster flip decode-1                   a decode worker becomes a prefill worker, or the other way round
"""
_COLOURS = {"up": "green", "draining": "yellow", "down": "red"}


def register(commands: argparse._SubParsersAction[Parser], common: Parser) -> None:
    group = commands.add_parser(
        "cluster", help="see and change a running gateway's workers", description="A running gateway's own workers."
    )
    actions = group.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, about: str, examples: str, *, worker: bool = True) -> Parser:
        action = add_command(actions, common, name, about, examples)
        action.add_argument("--url", default="http://127.0.0.1:8080", help="the gateway (default: %(default)s)")
        action.add_argument("--provider", metavar="NAME", help="which provider's (default: the only one)")
        if worker:
            action.add_argument("worker", metavar="WORKER", help="its name, as `splitroute cluster status` shows it")
        return action

    status = add("status", "show workers, loads and transfers", _STATUS, worker=False)
    status.add_argument("--json", action="store_true", help="as JSON")
    status.set_defaults(run=_status, parser=status)
    adding = add("add", "start one more worker", _ADD, worker=False)
    adding.add_argument("--role", choices=("prefill", "decode", "unified"), required=True)
    adding.add_argument("--address", metavar="HOST:PORT", help="where `splitroute worker` waits (default: this host)")
    adding.set_defaults(run=_add, parser=adding)
    drain = add("drain", "give a worker nothing new", _DRAIN)
    drain.add_argument("--undo", action="store_true", help="give it requests again")
    drain.set_defaults(run=_drain, parser=drain)
    remove = add("remove", "stop a worker for good", _REMOVE)
    remove.add_argument("--now", action="store_true", help="do not wait for it to finish")
    remove.set_defaults(run=_remove, parser=remove)
    flip = add("flip", "let a worker change between prefill and decode", _FLIP)
    flip.set_defaults(run=_flip, parser=flip)


def _status(args: argparse.Namespace) -> int:
    import json

    from router.cli.console import out

    providers = _get(args)
    if args.provider is not None:
        providers = {_provider(args, providers): providers[args.provider]}
    if args.json:
        print(json.dumps(providers, indent=2, ensure_ascii=False))
        return 0
    for name, cluster in providers.items():
        out().print(_workers_table(name, cluster))
        if cluster.get("transfers"):
            out().print(_transfers_table(cluster["transfers"]))
    if not providers:
        out().print("no provider of this gateway has workers of its own")
    return 0


def _workers_table(name: str, cluster: dict[str, Any]) -> Any:
    from rich.table import Table

    shown = Table(title=f"{name}: {cluster.get('model', 'not running')}", title_justify="left")
    for heading in ("worker", "role", "state"):
        shown.add_column(heading)
    for heading in ("pid", "decoding", "prompt tokens to compute", "kept prompts", "free blocks"):
        shown.add_column(heading, justify="right")
    for worker in cluster.get("workers", []):
        colour = _COLOURS.get(worker["state"], "")
        facts = (worker[key] for key in ("pid", "decoding", "prompt_backlog_tokens", "kept_prompts", "free_blocks"))
        shown.add_row(
            worker["name"],
            worker["role"],
            f"[{colour}]{worker['state']}[/]",
            *("–" if fact is None else f"{fact}" for fact in facts),
        )
    return shown


def _transfers_table(transfers: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    shown = Table(title="KV transfers", title_justify="left")
    shown.add_column("pair")
    for heading in ("count", "MB/s", "last ones to be seen, ms"):
        shown.add_column(heading, justify="right")
    shown.add_column("alarm")
    for pair in transfers:
        shown.add_row(
            pair["pair"],
            str(pair["count"]),
            str(pair["megabytes_per_s"]),
            " ".join(f"{ms:g}" for ms in pair["recent_exposed_ms"]),
            "[red]above 50 ms[/]" if pair["alarm"] else "",
        )
    return shown


def _add(args: argparse.Namespace) -> int:
    from router.cli.console import err

    where = {} if args.address is None else {"address": args.address}
    with err().status(f"starting a {args.role} worker"):
        done = _post(args, {"action": "add", "role": args.role, **where})
    print(f"{done['added']} serves")
    return 0


def _drain(args: argparse.Namespace) -> int:
    _post(args, {"action": "undrain" if args.undo else "drain", "worker": args.worker})
    print(f"{args.worker} {'serves again' if args.undo else 'gets nothing new'}")
    return 0


def _remove(args: argparse.Namespace) -> int:
    from router.cli.console import err

    with err().status(f"waiting for {args.worker}"):
        _post(args, {"action": "remove", "worker": args.worker, "now": args.now})
    print(f"{args.worker} is stopped")
    return 0


def _flip(args: argparse.Namespace) -> int:
    done = _post(args, {"action": "flip", "worker": args.worker})
    print(f"{args.worker} is a {done['role']} worker from the next request on")
    return 0


def _provider(args: argparse.Namespace, providers: dict[str, Any]) -> str:
    known = ", ".join(providers) or "none"
    if args.provider is not None:
        if args.provider not in providers:
            raise CliError(f"no provider {args.provider!r} with workers of its own; there are: {known}")
        return str(args.provider)
    if len(providers) != 1:
        raise CliError(f"which provider's workers? There are: {known}", hint="name one: --provider NAME")
    return next(iter(providers))


def _get(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = _call(args, "GET", "/cluster", None)
    return found


def _post(args: argparse.Namespace, change: dict[str, Any]) -> dict[str, Any]:
    done: dict[str, Any] = _call(args, "POST", f"/cluster/{_provider(args, _get(args))}", change)
    return done


def _call(args: argparse.Namespace, method: str, path: str, body: dict[str, Any] | None) -> Any:
    import httpx

    try:
        with httpx.Client(base_url=args.url, timeout=None, trust_env=False) as client:
            reply = client.request(method, path, json=body)
            answer = reply.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CliError(
            f"no gateway answers at {args.url}: {error}", hint="start one: splitroute up; or name it: --url URL"
        ) from None
    except ValueError:
        raise CliError(f"what answers at {args.url} is no splitroute gateway") from None
    if reply.status_code != 200:
        said = answer.get("error", {}).get("message") if isinstance(answer, dict) else None
        raise CliError(said or f"the gateway said {reply.status_code}")
    return answer
