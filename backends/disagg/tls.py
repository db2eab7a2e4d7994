"""A TLS connection that one thread may read while another writes.

`ssl.SSLSocket` is not that: a TLS session must not be used by two threads at once, and a thread that waits to read
holds it. Here the session works on memory, under a lock, and the socket is waited for outside of it.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Sequence

_PIECE = 1 << 18


class TLSConnection:
    """The calls of `socket.socket` that `transfer` uses, encrypted. The handshake is part of making one."""

    def __init__(self, raw: socket.socket, context: ssl.SSLContext, *, server_name: str | None = None) -> None:
        """`server_name` is whom to expect, where this side connected. Raises OSError (`ssl.SSLError` is one)."""
        self._raw = raw
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self.family = raw.family
        while True:
            try:
                self._session.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                if not self._fill():
                    raise ConnectionError("the peer closed the connection during the TLS handshake") from None
            except ssl.SSLError:
                self._flush()  # the alert tells the other side why
                raise
        self._flush()

    def _flush(self) -> None:
        """Send what the session itself has to say."""
        with self._lock:
            if not self._outgoing.pending:
                return  # whoever reads must not wait for whoever sends
        with self._sending:
            with self._lock:
                ready = self._outgoing.read()
            if ready:
                self._raw.sendall(ready)

    def _fill(self) -> bool:
        data = self._raw.recv(_PIECE)
        with self._lock:
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()
        return bool(data)

    def recv_into(self, view: memoryview) -> int:
        """0 where the peer has closed. Raises OSError."""
        while True:
            try:
                with self._lock:
                    return self._session.read(len(view), view)  # type: ignore[return-value]
            except ssl.SSLWantReadError:
                self._flush()
                if not self._fill():
                    return 0
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return 0

    def sendmsg(self, parts: Sequence[memoryview]) -> int:
        """Send all of `parts`; how many bytes that are. Raises OSError."""
        with self._sending:
            for part in parts:
                for at in range(0, len(part), _PIECE):
                    with self._lock:
                        self._session.write(part[at : at + _PIECE])
                        ready = self._outgoing.read()
                    self._raw.sendall(ready)
        return sum(len(part) for part in parts)

    def settimeout(self, seconds: float | None) -> None:
        self._raw.settimeout(seconds)

    def shutdown(self, how: int) -> None:
        self._raw.shutdown(how)

    def close(self) -> None:
        self._raw.close()


def server_context(cert: str, key: str) -> ssl.SSLContext:
    """Raises OSError where the files are not what they should be."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(cert, key)
    return context


def client_context(ca: str) -> ssl.SSLContext:
    """Trusts what `ca` signed, for the names in its certificates. Raises OSError."""
    context = ssl.create_default_context(cafile=ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context
