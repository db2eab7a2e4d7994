"""The connection between a coordinator and a node on another host: TLS where it is wanted, `proof`, then frames.

A preamble and three pieces of fixed length come first, then frames as in `messages`. A stranger is read 78 bytes and no
more. Neither side is told why the other hung up before both have proved to know the secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import ssl

from backends.disagg import proof
from backends.disagg.messages import LENGTH, MAX_MESSAGE_BYTES

PREAMBLE = b"splitroute-1 \n"
HANDSHAKE_TIMEOUT_S = 10.0
DEFAULT_PORT = 7101

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ControlError(Exception):
    """The connection cannot be used; the message says why and names no secret."""


def parse_address(text: str) -> tuple[str, int]:
    """`HOST`, `HOST:PORT` or `[IPV6]:PORT`. Raises ValueError."""
    host, port = text, str(DEFAULT_PORT)
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!r} is not an address: write [IPV6]:PORT")
        port = rest[1:] or port
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    elif ":" in text:
        try:
            ipaddress.IPv6Address(text)
        except ValueError:
            raise ValueError(f"{text!r} is not an address: write HOST:PORT") from None
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not an address: write HOST:PORT")
    return host, int(port)


async def connect(address: str, secret: str, tls: ssl.SSLContext | None) -> Streams:
    """The coordinator's side. Raises ControlError."""
    writer: asyncio.StreamWriter | None = None
    try:
        host, port = parse_address(address)
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=tls)
            _watch_closely(writer)
            mine = proof.nonce()
            writer.write(PREAMBLE + mine)
            answered = await reader.readexactly(proof.ANSWER_BYTES)
            writer.write(proof.connectors_proof(secret, "control", mine, answered))
        return reader, writer
    except (OSError, TimeoutError, EOFError, ValueError, proof.NotProved) as error:
        if writer is not None:
            writer.close()
        if isinstance(error, EOFError):
            raise ControlError("what listens there is no splitroute worker, or expects TLS") from None
        if isinstance(error, proof.NotProved):
            raise ControlError("it does not know this cluster's secret") from None
        if isinstance(error, ConnectionError) and error.errno:
            raise ControlError(os.strerror(error.errno)) from None
        raise ControlError(str(error) or f"no answer within {HANDSHAKE_TIMEOUT_S:g} s") from None


async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str) -> None:
    """The node's side. Raises ControlError."""
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            _watch_closely(writer)
            if await reader.readexactly(len(PREAMBLE)) != PREAMBLE:
                raise ControlError("it does not speak this protocol")
            theirs, mine = await reader.readexactly(proof.NONCE_BYTES), proof.nonce()
            writer.write(proof.answer(secret, "control", theirs, mine))
            said = await reader.readexactly(proof.MAC_BYTES)
        proof.check_connector(secret, "control", theirs, mine, said)
    except (OSError, TimeoutError, EOFError) as error:
        raise ControlError(str(error) or "it said too little for too long") from None
    except proof.NotProved as error:
        raise ControlError(str(error)) from None


def _watch_closely(writer: asyncio.StreamWriter) -> None:
    """Notice within a quarter of a minute where the other host is gone without a word."""
    raw: socket.socket = writer.get_extra_info("socket")
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("KEEPIDLE", 5), ("KEEPINTVL", 3), ("KEEPCNT", 3), ("USER_TIMEOUT", 15_000)):
        option = getattr(socket, f"TCP_{name}", None)
        if option is not None:
            with contextlib.suppress(OSError):
                raw.setsockopt(socket.IPPROTO_TCP, option, value)


async def read_frame(reader: asyncio.StreamReader, most: int = MAX_MESSAGE_BYTES) -> bytes:
    """The next frame, with its length before it. Raises EOFError; ControlError for one longer than `most`."""
    try:
        head = await reader.readexactly(LENGTH.size)
        (length,) = LENGTH.unpack(head)
        if length > most:
            raise ControlError(f"a message of {length} bytes; at most {most} are taken")
        return head + await reader.readexactly(length)
    except ConnectionError as error:
        raise EOFError from error


def own_address(towards: str) -> str:
    """The address of this machine from which `towards` would be reached; nothing is sent."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)
            found: str = probe.getsockname()[0]
            return found
    except OSError:
        return "127.0.0.1"
