"""One provider's connections: open a request, iterate its answer's bytes, close it.

Timers are the executor's: a read here may take as long as the caller lets it.
"""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from urllib.parse import unquote, urlsplit

from backends.base import BackendError
from backends.hosted.connection import Broken, Connection, reason_of

_KEPT_ALIVE = 256
_IDLE_S = 55.0
"""Most servers and load balancers close an idle connection after a minute or more."""


class Response:
    """An answer whose headers are there. Always `aclose()`; doing so early drops the connection, and with it the
    work upstream."""

    def __init__(self, connection: Connection, client: HttpClient) -> None:
        self.status = connection.status
        self.headers: Mapping[str, str] = connection.headers
        """Names in lower case."""
        self._connection: Connection | None = connection
        self._client = client

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises BackendError where the connection breaks."""
        assert self._connection is not None
        try:
            async for chunk in self._connection.chunks():
                yield chunk
        except Broken as broken:
            raise self._client.broken(broken, "the connection broke in the middle of the answer") from None

    async def read(self, limit: int) -> bytes:
        """The whole body. Raises BackendError where it breaks or has more than `limit` bytes."""
        data = bytearray()
        async for chunk in self.chunks():
            data += chunk
            if len(data) > limit:
                raise BackendError(f"{self._client.name}: the answer is larger than {limit >> 20} MiB", status=502)
        return bytes(data)

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._client.take_back(connection)


class HttpClient:
    """`name` is what its errors call the provider. `headers` go with every request."""

    def __init__(self, name: str, base_url: str, headers: Mapping[str, str], connect_timeout_s: float) -> None:
        self.name = name
        url = urlsplit(base_url)
        self._tls = url.scheme == "https"
        self._address = (url.hostname or "", url.port or (443 if self._tls else 80))
        self.host = url.netloc.rpartition("@")[2]
        self._path = url.path.rstrip("/")
        all_headers = {"host": self.host, "user-agent": "splitroute", "accept": "*/*", "accept-encoding": "identity"}
        if url.username:
            pair = f"{unquote(url.username)}:{unquote(url.password or '')}"
            all_headers["authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        all_headers |= {key.lower(): value for key, value in headers.items()}
        self._headers = b"".join([header(key, value) for key, value in all_headers.items()])
        self._connect_timeout_s = connect_timeout_s
        self._ssl: ssl.SSLContext | None = None
        self._idle: list[tuple[float, Connection]] = []
        """The one used last at the end."""
        self._open: set[Connection] = set()
        self._closed = False

    async def post(
        self, path: str, content: bytes, headers: Mapping[str, str], connect_timeout_s: float | None = None
    ) -> Response:
        """Raises BackendError where no answer can be had."""
        more = b"".join([header(key, value) for key, value in headers.items()])
        request = b"POST %b HTTP/1.1\r\n%b%bcontent-length: %d\r\n\r\n%b" % (
            f"{self._path}{path}".encode(),
            self._headers,
            more,
            len(content),
            content,
        )
        connection = self._kept() or await self._connect(connect_timeout_s)
        reused = connection.status != 0
        while True:
            try:
                await connection.send(request)
                return Response(connection, self)
            except Broken as broken:
                if not (reused and broken.untouched):
                    raise self.broken(broken, "the connection broke before an answer") from None
                # The server closed an idle connection while we took it: it has seen nothing of this request.
                reused = False
                connection = await self._connect(connect_timeout_s)
            except BaseException:
                connection.close()
                raise

    def _kept(self) -> Connection | None:
        now = time.monotonic()
        while self._idle:
            since, connection = self._idle.pop()
            if connection.alive and now - since < _IDLE_S:
                return connection
            connection.close()
        return None

    async def _connect(self, timeout_s: float | None) -> Connection:
        if self._closed:
            raise BackendError(f"provider {self.name} is not running", status=503)
        host, port = self._address
        if self._tls and self._ssl is None:
            self._ssl = await asyncio.to_thread(_ssl_context)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s or self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(self._open.discard),
                    host,
                    port,
                    ssl=self._ssl,
                    server_hostname=host if self._tls else None,
                )
        except TimeoutError:
            raise BackendError(
                f"{self.name}: no connection to {self.host} in time", status=504, code="timeout"
            ) from None
        except (OSError, UnicodeError) as error:
            raise BackendError(
                f"{self.name}: cannot connect to {self.host} ({_why(error)})",
                status=503,
                code="connection_failed",
                hint="is base_url right, and does the server run?",
            ) from None
        self._open.add(connection)
        return connection

    def take_back(self, connection: Connection) -> None:
        """An exchange is over; what is incomplete is dropped."""
        if connection.reusable and not self._closed and len(self._idle) < _KEPT_ALIVE:
            self._idle.append((time.monotonic(), connection))
        else:
            connection.close()

    def broken(self, broken: Broken, what: str) -> BackendError:
        """`broken` in our terms."""
        return BackendError(f"{self.name}: {what} ({broken})", status=502, code="connection_broken")

    async def aclose(self) -> None:
        self._closed = True
        self._idle.clear()
        for connection in list(self._open):
            connection.close()
        await asyncio.sleep(0)


def header(name: str, value: str) -> bytes:
    """One line of a head. Raises ValueError for what would begin another line."""
    if not name or any(char in name for char in "\r\n:\0 ") or any(char in value for char in "\r\n\0"):
        raise ValueError(f"header {name!r} cannot be sent: a line break, or a name that is none")
    return f"{name}: {value}\r\n".encode("latin-1", "replace")


def _ssl_context() -> ssl.SSLContext:
    """The authorities of certifi, where SSL_CERT_FILE names no others."""
    import certifi

    context = ssl.create_default_context(cafile=os.environ.get("SSL_CERT_FILE") or certifi.where())
    context.set_alpn_protocols(["http/1.1"])
    return context


def _why(error: OSError | UnicodeError) -> str:
    if isinstance(error, socket.gaierror):
        return (error.strerror or "the name is unknown").lower()
    return reason_of(error)
