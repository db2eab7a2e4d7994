"""Where a prefill worker listens, and whole frames over blocking sockets."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import socket
import ssl
import struct
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable

from backends.disagg.tls import TLSConnection
from backends.disagg.transfer.wire import (
    HEADER_BYTES,
    MAX_CONTROL_BYTES,
    MAX_STRANGER_BYTES,
    Header,
    Kind,
    WireError,
    decode_header,
)

Connection = socket.socket | TLSConnection

HANDSHAKE_TIMEOUT_S = 10.0
_MAX_IOVECS = 512


def listen(transport: str, host: str = "127.0.0.1", port: int = 0) -> tuple[socket.socket, str]:
    """A listening socket and the address a peer passes to `connect`: `unix:NAME` or `tcp:HOST:PORT`.

    Where `host` is a name for this machine that only others know, it listens on every address. On Linux a Unix socket
    lies in the abstract namespace: it is gone with its process. Raises OSError.
    """
    if transport != "shm":
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=64)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listener = socket.create_server(("", port), backlog=64)
        return listener, f"tcp:{host}:{listener.getsockname()[1]}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if sys.platform == "linux":
        name = f"@splitroute-{secrets.token_hex(12)}"
    else:
        name = os.path.join(tempfile.mkdtemp(prefix="splitroute-"), "kv")
    listener.bind(name.replace("@", "\0", 1))
    listener.listen(64)
    return listener, f"unix:{name}"


def connect(address: str, tls: ssl.SSLContext | None = None) -> Connection:
    """Connect to an address `listen` gave. Raises OSError."""
    kind, _, rest = address.partition(":")
    if kind == "unix":
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.settimeout(HANDSHAKE_TIMEOUT_S)
        peer.connect(rest.replace("@", "\0", 1))
        return peer
    host, _, port = rest.rpartition(":")
    peer = socket.create_connection((host, int(port)), timeout=HANDSHAKE_TIMEOUT_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls is None:
        return peer
    try:
        return TLSConnection(peer, tls, server_name=host)
    except OSError:
        peer.close()
        raise


@functools.cache
def host_name() -> str:
    """Names this boot of this machine: where two processes give the same, their monotonic clocks agree."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return f"{socket.gethostname()}-{uuid.getnode():x}"


def same_user(peer: socket.socket) -> bool:
    """Whether the process behind a Unix socket runs as this user (True where the system cannot tell)."""
    if peer.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid == os.getuid()


def send(peer: Connection, header: Header, payload: Iterable[bytes | memoryview] = ()) -> None:
    """Write a whole frame; `header.payload_bytes` must be the payload's length. Raises OSError."""
    parts = [memoryview(header.encode()), *(memoryview(part) for part in payload)]
    at = 0
    while at < len(parts):
        sent = peer.sendmsg(parts[at : at + _MAX_IOVECS])
        while at < len(parts) and sent >= len(parts[at]):
            sent -= len(parts[at])
            at += 1
        if sent:
            parts[at] = parts[at][sent:]


def send_control(peer: Connection, kind: Kind, payload: bytes = b"", *, request: int = 0) -> None:
    """Write a frame that carries no KV."""
    send(peer, Header(kind, request=request, payload_bytes=len(payload)), (payload,) if payload else ())


def receive_into(peer: Connection, view: memoryview, until: float | None = None) -> None:
    """Fill `view`, by `until` (as `time.monotonic`) where given. Raises EOFError where the peer closed before, and
    TimeoutError, however the bytes trickle in."""
    while len(view):
        if until is not None:
            peer.settimeout(max(0.001, until - time.monotonic()))
        count = peer.recv_into(view)
        if not count:
            raise EOFError("the peer closed the connection")
        view = view[count:]


def receive_bytes(peer: Connection, count: int, until: float | None = None) -> bytearray:
    data = bytearray(count)
    receive_into(peer, memoryview(data), until)
    return data


def receive_header(peer: Connection, until: float | None = None, *, stranger: bool = False) -> Header:
    """The next frame's header. Raises WireError, EOFError or OSError."""
    header = decode_header(receive_bytes(peer, HEADER_BYTES, until))
    most = MAX_STRANGER_BYTES if stranger else MAX_CONTROL_BYTES
    if header.kind is not Kind.BLOCKS and header.payload_bytes > most:
        raise WireError(f"a {header.kind.name} frame announces {header.payload_bytes} bytes of payload")
    return header


def receive_control(
    peer: Connection, expected: Kind, *, until: float | None = None, stranger: bool = False
) -> bytearray:
    """The payload of the next frame, which must be of kind `expected`. A refusal becomes a WireError."""
    header = receive_header(peer, until, stranger=stranger)
    if header.kind is Kind.BLOCKS:
        raise WireError(f"expected a {expected.name} frame, got BLOCKS")
    payload = receive_bytes(peer, header.payload_bytes, until)
    if header.kind is Kind.REFUSED:
        raise WireError(payload.decode(errors="replace"))
    if header.kind is not expected:
        raise WireError(f"expected a {expected.name} frame, got {header.kind.name}")
    return payload


def shut(peer: Connection) -> None:
    """End a connection, or a wait for one, from whatever thread: whoever is blocked on it wakes."""
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)
