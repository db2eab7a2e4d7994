"""`splitroute worker`: this host's part of a cluster whose gateway runs on another."""

from __future__ import annotations

import argparse
import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from router.cli.errors import CliError
from router.cli.parser import Parser, port

if TYPE_CHECKING:
    from backends.disagg.node import Node, NodeOptions

SECRET_VARIABLE = "SPLITROUTE_CLUSTER_SECRET"
DEFAULT_PORT = 7101

_EXAMPLES = f"""\
examples:
  splitroute worker --secret-file secret.txt                    on every address, port {DEFAULT_PORT}
  splitroute worker --host 10.0.0.5 --secret-file secret.txt --tls-cert c.pem --tls-key k.pem --tls-ca ca.pem
  {SECRET_VARIABLE}=... splitroute worker --port 7102         a second one on this host

then, in the gateway's policy:
  providers:
    own:
      type: disagg
      model: smollm2-135m
      secret: ${{{SECRET_VARIABLE}}}
      workers:
        - {{role: decode, address: 10.0.0.5:{DEFAULT_PORT}}}

or while it serves:
  splitroute cluster add --role decode --address 10.0.0.5:{DEFAULT_PORT}
"""


def register(commands: argparse._SubParsersAction[Parser], common: Parser) -> None:
    worker = commands.add_parser(
        "worker",
        parents=[common],
        help="be a worker for a gateway on another host",
        description="Wait for a gateway that knows the cluster's secret, and be a worker of its cluster.",
        epilog=_EXAMPLES,
    )
    worker.add_argument("--host", default="0.0.0.0", help="address to listen on (default: %(default)s)")
    worker.add_argument("--port", type=port, default=DEFAULT_PORT, help="0 takes a free one (default: %(default)s)")
    worker.add_argument(
        "--secret-file", metavar="FILE", help=f"what every host of the cluster knows (default: ${SECRET_VARIABLE})"
    )
    worker.add_argument(
        "--when-alone",
        choices=("keep", "stop"),
        default="keep",
        help="what becomes of the worker when its gateway is gone: keep its model for the next, or stop its process "
        "(default: %(default)s); what it was computing is freed either way",
    )
    worker.add_argument("--kv-host", metavar="HOST", help="where others pull KV from (default: as the gateway came)")
    worker.add_argument("--kv-port", type=port, default=0, help="and which port (default: a free one)")
    for name, about in (("cert", "certificate to show"), ("key", "its key"), ("ca", "whose certificates to believe")):
        worker.add_argument(f"--tls-{name}", metavar="FILE", help=f"PEM file: {about}")
    worker.set_defaults(run=_worker, parser=worker)


def _worker(args: argparse.Namespace) -> int:
    from backends.disagg.node import Node
    from router.cli.listening import listen
    from router.gateway.server import run

    node = Node(_options(args), say=lambda text: print(text, flush=True))
    with listen(args.host, args.port) as listener:
        run(_serve(node, listener))
    return 0


async def _serve(node: Node, listener: socket.socket) -> None:
    import asyncio

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        await node.start(listener)
    except OSError as error:
        raise CliError(f"--tls-cert and --tls-key: {error}", hint="name PEM files that belong together") from None
    host, port = listener.getsockname()[:2]
    print(f"listening on {host}:{port} for a gateway that knows the secret; Ctrl-C stops", flush=True)
    try:
        await stop.wait()
    finally:
        await node.aclose()


def _options(args: argparse.Namespace) -> NodeOptions:
    """Raises CliError."""
    from backends.disagg.messages import TLSFiles
    from backends.disagg.node import NodeOptions

    files = [args.tls_cert, args.tls_key, args.tls_ca]
    if any(files) and not all(files):
        raise CliError("TLS needs all of --tls-cert, --tls-key and --tls-ca")
    for file in filter(None, files):
        if not os.access(file, os.R_OK):
            raise CliError(f"{file} cannot be read", hint="name a PEM file")
    return NodeOptions(
        secret=_secret(args.secret_file),
        kv_host=args.kv_host,
        kv_port=args.kv_port,
        keep=args.when_alone == "keep",
        tls=TLSFiles(*files) if all(files) else None,
    )


def _secret(file: str | None) -> str:
    """Raises CliError, which never shows it."""
    from backends.disagg.proof import MIN_SECRET

    make = "make one: python -c 'import secrets; print(secrets.token_hex(16))' > secret.txt; chmod 600 secret.txt"
    if file is not None:
        try:
            secret = Path(file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise CliError(f"--secret-file {file} cannot be read: {error}", hint=make) from None
        where = file
    else:
        secret, where = os.environ.get(SECRET_VARIABLE, ""), f"${SECRET_VARIABLE}"
    if len(secret) < MIN_SECRET:
        said = "is not set" if not secret else f"has {len(secret)} characters; a secret has at least {MIN_SECRET}"
        raise CliError(f"{where} {said}", hint=make)
    return secret
