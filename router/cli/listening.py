"""A listening socket before anything slow starts: a port in use must not cost the time to load a model."""

from __future__ import annotations

import errno
import socket

from router.cli.errors import CliError


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to `host`:`port`; port 0 takes a free one. Raises CliError with what to do."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise _refusal(error, host, port) from error


def url(listener: socket.socket) -> str:
    """Where a client on this machine reaches `listener`."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _refusal(error: OSError, host: str, port: int) -> CliError:
    if error.errno == errno.EADDRINUSE:
        return CliError(
            f"port {port} on {host} is in use by another program",
            hint=f"--port {port + 1 if port < 65535 else port - 1}, or --port 0 for a free one",
        )
    if error.errno == errno.EACCES:
        return CliError(f"port {port} needs more rights than this user has", hint="a port above 1023")
    # `create_server` wraps a failed look-up in a plain OSError that keeps the resolver's negative number.
    if error.errno == errno.EADDRNOTAVAIL or (error.errno is not None and error.errno < 0):
        return CliError(
            f"{host!r} is no address of this machine",
            hint="--host 127.0.0.1, or --host 0.0.0.0 for every interface",
        )
    return CliError(f"cannot listen on {host}:{port}: {error.strerror or error}", hint="another --port")
