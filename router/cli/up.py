"""`splitroute up`: the gateway and what its policy names, until stopped."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from router.cli.errors import CliError
from router.cli.parser import Parser, port

if TYPE_CHECKING:
    from policies import Policy
    from router.keys import Doorkeeper

_EXAMPLES = """\
examples:
  splitroute up                                  the bundled cluster, on 127.0.0.1:8080
  splitroute up --policy policy.yaml --port 9000 your own policy
  splitroute up --port 0                         a free port; the first line says which
  splitroute up --keys keys.json --host 0.0.0.0  for other machines too, with keys

then:
  curl http://127.0.0.1:8080/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"model": "chat", "messages": [{"role": "user", "content": "Name three rivers."}]}'
"""

DEFAULT_PORT = 8080


def register(commands: argparse._SubParsersAction[Parser], common: Parser) -> None:
    up = commands.add_parser(
        "up",
        parents=[common],
        help="serve a policy until stopped",
        description="Serve the gateway, and the clusters its policy names, until stopped.",
        epilog=_EXAMPLES,
    )
    up.add_argument("--policy", metavar="FILE", help="the policy, in YAML (default: the bundled cluster)")
    up.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    up.add_argument("--port", type=port, default=DEFAULT_PORT, help="0 takes a free one (default: %(default)s)")
    up.add_argument("--state", metavar="FILE", help="keep what is learned of the targets there, over restarts")
    up.add_argument("--keys", metavar="FILE", help="let in who shows one of its keys (see splitroute key create)")
    up.add_argument("--open", action="store_true", help="let in anybody, also from other machines")
    up.set_defaults(run=_up, parser=up)


def _up(args: argparse.Namespace) -> int:
    import os

    import policies
    from backends import PROVIDER_OPTIONS
    from router.cli.listening import listen
    from router.cli.policy import load
    from router.gateway.server import run
    from router.keys import Doorkeeper

    if not (args.keys or args.open or _is_loopback(args.host)):
        raise CliError(
            f"--host {args.host}: other machines could ask without a key",
            hint="--keys FILE lets in who has one (splitroute key create --help), --open anybody",
        )
    if args.policy is None:
        policy = policies.load(
            policies.preset("local"), filename="local.yaml", env=os.environ, provider_types=PROVIDER_OPTIONS
        )
    else:
        policy = load(args.policy)
    with listen(args.host, args.port) as listener:
        pull_models(policy)
        file, state = (None if name is None else Path(name) for name in (args.policy, args.state))
        run(_serve(policy, listener, file, state, Doorkeeper(Path(args.keys)) if args.keys else None))
    return 0


def _is_loopback(host: str) -> bool:
    import ipaddress

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def pull_models(policy: Policy) -> None:
    """Fetch the weights that the policy's own clusters need and that are not here, with a progress bar."""
    from backends.options import DisaggOptions

    wanted = [
        provider.options.model for provider in policy.providers.values() if isinstance(provider.options, DisaggOptions)
    ]
    if not wanted:
        return
    from backends.models import resolve
    from router.cli.console import download_bar

    for name in wanted:
        with download_bar(name) as report:
            resolve(name, pull_missing=True, progress=report)


async def _serve(
    policy: Policy, listener: socket.socket, file: Path | None, state: Path | None, doorkeeper: Doorkeeper | None
) -> None:
    import asyncio

    from router.cli.console import err, out
    from router.cli.listening import url
    from router.cli.policy import load
    from router.gateway.app import create_app
    from router.gateway.server import Server
    from router.memory import keep_saving, recall
    from router.reloading import follow
    from router.sdk import Router

    router = Router(policy)
    server = Server(create_app(router, doorkeeper))
    # Started here and not by the application's lifespan alone, so that a failure is one message.
    with err().status("starting"):
        await router.start()
    try:
        serving = await server.start_on(listener)
        routes = ", ".join(policy.routes)
        out().print(f"serving {url(listener)}/v1 (models: {routes}); Ctrl-C stops", markup=False, soft_wrap=True)
        beside = [asyncio.create_task(follow(router, file, lambda: load(str(file))))] if file is not None else []
        if state is not None:
            recall(router, state)
            beside.append(asyncio.create_task(keep_saving(router, state)))
        try:
            await serving
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
    finally:
        await router.aclose()
