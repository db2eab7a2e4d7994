"""The seam between the hosted data path and its HTTP client: open a request, iterate its bytes, close it.

It is narrow so that a faster client can take httpx's place. Timers are the executor's: a read here may take
as long as the caller lets it.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator, Mapping

import httpx

from backends.base import BackendError

_MAX_CONNECTIONS = 4096
_KEPT_ALIVE = 256


class Response:
    """An answer whose headers are there. Always `aclose()`; doing so early drops the connection, and with it the
    work upstream."""

    def __init__(self, response: httpx.Response, client: HttpClient) -> None:
        self.status = response.status_code
        self.headers: Mapping[str, str] = response.headers
        self._response = response
        self._client = client

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises BackendError where the connection breaks."""
        try:
            async for chunk in self._response.aiter_raw():
                yield chunk
        except httpx.HTTPError as error:
            raise self._client.failure(error, "the connection broke in the middle of the answer") from None

    async def read(self, limit: int) -> bytes:
        """The whole body. Raises BackendError where it breaks or has more than `limit` bytes."""
        data = bytearray()
        async for chunk in self.chunks():
            data += chunk
            if len(data) > limit:
                raise BackendError(f"{self._client.name}: the answer is larger than {limit >> 20} MiB", status=502)
        return bytes(data)

    async def aclose(self) -> None:
        await self._response.aclose()


class HttpClient:
    """One provider's connections. `name` is what its errors call it."""

    def __init__(self, name: str, base_url: str, headers: Mapping[str, str], connect_timeout_s: float) -> None:
        self.name = name
        self.host = httpx.URL(base_url).netloc.decode()
        self._base_url = base_url.rstrip("/")
        self._client = httpx.AsyncClient(
            headers={"accept-encoding": "identity", "user-agent": "splitroute", **headers},
            timeout=httpx.Timeout(None, connect=connect_timeout_s),
            limits=httpx.Limits(max_connections=_MAX_CONNECTIONS, max_keepalive_connections=_KEPT_ALIVE),
            follow_redirects=False,  # a redirect would carry the key to another host
            trust_env=False,
        )

    async def post(self, path: str, content: bytes, headers: Mapping[str, str]) -> Response:
        """Raises BackendError where no answer can be had."""
        request = self._client.build_request("POST", f"{self._base_url}{path}", content=content, headers=headers)
        try:
            return Response(await self._client.send(request, stream=True), self)
        except httpx.HTTPError as error:
            raise self.failure(error, "the connection broke before an answer") from None

    def failure(self, error: httpx.HTTPError, broke: str) -> BackendError:
        """`error` in our terms. httpx's own message may hold a URL, never a header."""
        if isinstance(error, httpx.ConnectTimeout):
            return BackendError(f"{self.name}: no connection to {self.host} in time", status=504, code="timeout")
        if isinstance(error, httpx.ConnectError):
            return BackendError(
                f"{self.name}: cannot connect to {self.host} ({_cause(error)})",
                status=503,
                code="connection_failed",
                hint="is base_url right, and does the server run?",
            )
        return BackendError(f"{self.name}: {broke} ({_cause(error)})", status=502, code="connection_broken")

    async def aclose(self) -> None:
        await self._client.aclose()


def _cause(error: BaseException) -> str:
    """The root of a chain of wrapped errors, in its own words."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    if isinstance(error, ssl.SSLError):
        return error.reason or "TLS failed"
    if isinstance(error, OSError) and error.errno:
        # The event loop's own texts repeat the address and leave the reason out.
        return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__
