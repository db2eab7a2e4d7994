"""The official clients on a router of the same process: OpenAI's and Anthropic's, whole, without a socket.

Their transport is the gateway's application, so an answer, an error or a stream is what the same client would get over
the network. That is how code moves over by one line: `client = router.openai`, or `router.chat.completions`.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message

if TYPE_CHECKING:
    from router.sdk import Router

BASE_URL = "http://splitroute.in-process"
IN_PROCESS = "in-process"
"""The key that clients insist on."""
_AHEAD = 16
"""Messages that an answer may be ahead of whoever reads it."""

Wait = Callable[[Coroutine[Any, Any, Any]], Any]


def official(name: str) -> ModuleType:
    """The module of a client. Raises ImportError that says how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"router.{name} is the official client: pip install 'splitroute[clients]'") from error


def http_client(router: Router, sdk: ModuleType) -> Any:
    """For the `http_client` of `sdk`'s asynchronous client."""
    client: Any = sdk.DefaultAsyncHttpxClient
    return client(base_url=BASE_URL, transport=Transport(_app_of(router), _httpx_of(client)))


def sync_http_client(router: Router, sdk: ModuleType, wait: Wait) -> Any:
    """The same for threads: `wait` runs a coroutine in the router's loop."""
    client: Any = sdk.DefaultHttpxClient
    return client(base_url=BASE_URL, transport=SyncTransport(_app_of(router), _httpx_of(client), wait))


def _app_of(router: Router) -> ASGIApp:
    from router.gateway.app import create_app  # on first use: the server's side of things takes a while to import

    return create_app(router)


def _httpx_of(client: type) -> Any:
    """The official clients stand on httpx, and newer ones on its successor of the same interface."""
    return sys.modules[client.__mro__[1].__module__.partition(".")[0]]


class Transport:
    """Requests go to `app` in tasks of their own. httpx's read timeout holds, and an answer that is not read to its end
    is cancelled when it is closed. `httpx` is the module whose types are meant."""

    def __init__(self, app: ASGIApp, httpx: Any) -> None:
        self._app = app
        self._httpx = httpx

    async def __aenter__(self) -> Transport:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """As httpx wants it: there is nothing to close."""

    async def handle_async_request(self, request: Any) -> Any:
        class Stream(self._httpx.AsyncByteStream):  # type: ignore[misc, name-defined]
            async def __aiter__(self) -> AsyncIterator[bytes]:
                while (data := await exchange.data()) is not None:
                    yield data

            async def aclose(self) -> None:
                await exchange.aclose()

        exchange = Exchange(self._app, self._httpx, request, await request.aread())
        status, headers = await exchange.started()
        return self._httpx.Response(status, headers=headers, stream=Stream(), request=request)


class SyncTransport:
    """`Transport` for a client without a loop."""

    def __init__(self, app: ASGIApp, httpx: Any, wait: Wait) -> None:
        self._app = app
        self._httpx = httpx
        self._wait = wait

    def __enter__(self) -> SyncTransport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """As httpx wants it: there is nothing to close."""

    def handle_request(self, request: Any) -> Any:
        wait = self._wait

        class Stream(self._httpx.SyncByteStream):  # type: ignore[misc, name-defined]
            def __iter__(self) -> Iterator[bytes]:
                while (data := wait(exchange.data())) is not None:
                    yield data

            def close(self) -> None:
                wait(exchange.aclose())

        body = request.read()

        async def start() -> tuple[Exchange, int, list[tuple[bytes, bytes]]]:
            exchange = Exchange(self._app, self._httpx, request, body)
            return exchange, *await exchange.started()

        exchange, status, headers = wait(start())
        return self._httpx.Response(status, headers=headers, stream=Stream(), request=request)


class Exchange:
    """One request and its answer. Starts at once; `aclose()` cancels what is left."""

    def __init__(self, app: ASGIApp, httpx: Any, request: Any, body: bytes) -> None:
        self._httpx = httpx
        self._request = request
        timeouts: Mapping[str, float | None] = request.extensions.get("timeout") or {}
        self._read_s = timeouts.get("read")
        self._asked: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self._said: asyncio.Queue[Message | None] = asyncio.Queue(_AHEAD)
        self._left = asyncio.Event()
        self._task = asyncio.create_task(self._run(app, _scope(request)))

    async def started(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Status and headers. Raises httpx.TransportError."""
        try:
            message = await self._next()
        except BaseException:
            await self.aclose()
            raise
        if message is None:
            raise self._httpx.RemoteProtocolError("there was no answer", request=self._request)
        return message["status"], list(message["headers"])

    async def data(self) -> bytes | None:
        """The next part of the body; None after the last. Raises httpx.TransportError."""
        while True:
            message = await self._next()
            if message is None:
                return None
            if message.get("body"):
                return bytes(message["body"])
            if not message.get("more_body"):
                return None

    async def aclose(self) -> None:
        self._left.set()
        while not self._said.empty():
            self._said.get_nowait()  # it may be waiting for room
        await asyncio.gather(self._task, return_exceptions=True)

    async def _next(self) -> Message | None:
        try:
            async with asyncio.timeout(self._read_s):
                return await self._said.get()
        except TimeoutError:
            raise self._httpx.ReadTimeout(f"nothing came for {self._read_s} s", request=self._request) from None

    async def _run(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._send)
        finally:
            if not self._left.is_set():
                await self._said.put(None)

    async def _send(self, message: Message) -> None:
        if not self._left.is_set():
            await self._said.put(message)

    async def _receive(self) -> Message:
        if self._asked:
            return self._asked.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}


def _scope(request: Any) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.url.path,
        "raw_path": request.url.raw_path,
        "root_path": "",
        "query_string": request.url.query,
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "client": None,
        "server": None,
    }
