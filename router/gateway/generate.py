"""The data path: a body in, the router's pieces out, and upstream work cancelled when the client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from backends.base import Surface
from router.answer import Answer
from router.errors import RouterError
from router.gateway.events import EventStream
from router.incoming import Incoming, read
from router.keys import Key
from router.sdk import Router, new_request_id

log = logging.getLogger("splitroute.gateway")

MAX_BODY_BYTES = 64 << 20
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_Headers = list[tuple[bytes, bytes]]


KEY = "splitroute.key"
"""Where an ASGI scope has the key that its request was let in by."""


def check_route(key: Key, route: str) -> None:
    """Raises RouterError (403) where the key is not for that route."""
    if not key.may_ask(route):
        allowed = ", ".join(key.routes)
        raise RouterError(
            f"this key may not ask for model {route!r}; it may for {allowed}",
            status=403,
            kind="permission_error",
            code="route_not_allowed",
            param="model",
        )


class ClientGone(Exception):
    """Nobody is there to be answered."""


class Generate:
    """ASGI endpoint of one surface."""

    def __init__(self, router: Router, surface: Surface) -> None:
        self._router = router
        self._surface: Surface = surface

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given.decode() if _REQUEST_ID.fullmatch(given) else new_request_id()
        try:
            incoming = self._read(await _body(receive), headers, request_id, scope.get(KEY))
        except ClientGone:
            return
        except RouterError as error:
            await error_response(error, request_id, self._surface)(scope, receive, send)
            return
        # The client's leaving must be noticed while nothing is being written, too (litellm#31499).
        answering = asyncio.current_task()
        assert answering is not None
        left = False

        async def watch() -> None:
            nonlocal left
            await _disconnect(receive)
            left = True
            answering.cancel()

        leaving = asyncio.create_task(watch())
        try:
            await (self._stream if incoming.stream else self._whole)(incoming, scope, receive, send)
        except asyncio.CancelledError:
            if not left or answering.uncancel():
                raise
        except ClientGone:
            pass
        except Exception:  # a bug: the log has where, the client nothing of it
            log.exception("%s failed", incoming.request_id)
            await error_response(internal_error(), incoming.request_id, self._surface)(scope, receive, send)
        finally:
            leaving.cancel()

    def _read(self, body: bytes, headers: dict[bytes, bytes], request_id: str, key: Key | None) -> Incoming:
        incoming = read(
            self._surface,
            parsed(body),
            raw=body,
            request_id=request_id,
            ttft_ms=_text(headers.get(b"x-slo-ttft-ms")),
            tpot_ms=_text(headers.get(b"x-slo-tpot-ms")),
            session=_text(headers.get(b"x-session-id")),
            headers={
                name: _text(headers[name.encode()]) or ""
                for name in self._router.policy.headers_asked_for
                if name.encode() in headers
            },
            key=None if key is None else key.label,
        )
        if key is not None:
            check_route(key, incoming.model)
        return incoming

    async def _whole(self, incoming: Incoming, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._router.open(incoming)
        except RouterError as error:
            await error_response(error, incoming.request_id, self._surface)(scope, receive, send)
            return
        try:
            data = b"".join([piece.data async for piece in answer])
            headers = _answer_headers(answer)
            headers.append((b"content-type", b"application/json"))
            headers.append((b"content-length", str(len(data)).encode()))
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": data})
        finally:
            await answer.aclose()

    async def _stream(self, incoming: Incoming, scope: Scope, receive: Receive, send: Send) -> None:
        quiet_s = self._router.policy.resilience_of(incoming.model).keepalive_ms / 1000
        events = EventStream(send, _id_headers(incoming), quiet_s)
        try:
            answer = await self._router.open(incoming)
            try:
                await events.begin(_answer_headers(answer))
                async for piece in answer:
                    await events.send(piece.data)
            finally:
                await answer.aclose()
        except RouterError as error:
            if not events.begun:
                events.close()
                await error_response(error, incoming.request_id, self._surface)(scope, receive, send)
                return
            # An error event and no [DONE], so that no client takes it for complete (Portkey#1797).
            log.warning("%s: %s in the stream: %s", incoming.request_id, error.status, error.message)
            await events.send(error.event(self._surface))
        except Exception:  # a bug: the log has where, the client nothing of it
            if not events.begun:
                raise
            log.exception("%s failed in the stream", incoming.request_id)
            await events.send(internal_error().event(self._surface))
        finally:
            events.close()
        await events.end()


class CountTokens:
    """ASGI endpoint of Anthropic's count_tokens: as the first target of the route counts, or is expected to."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = new_request_id()
        response: JSONResponse
        try:
            body = parsed(await _body(receive))
            if isinstance(body, dict):
                body.setdefault("max_tokens", 1)  # which a count need not have
            incoming = read("messages", body, request_id=request_id)
            if (key := scope.get(KEY)) is not None:
                check_route(key, incoming.model)
            tokens = await self._router.count(incoming)
            response = JSONResponse({"input_tokens": tokens}, headers={"request-id": request_id})
        except ClientGone:
            return
        except RouterError as error:
            response = error_response(error, request_id, "messages")
        await response(scope, receive, send)


def _id_headers(incoming: Incoming) -> _Headers:
    request_id = incoming.request_id.encode()
    headers = [(b"x-request-id", request_id)]
    if incoming.surface == "messages":
        headers.append((b"request-id", request_id))  # where Anthropic's clients look
    return headers


def _answer_headers(answer: Answer) -> _Headers:
    decision = answer.decision
    named = {
        "x-splitroute-target": answer.target,
        "x-splitroute-route": decision.route,
        "x-splitroute-class": decision.class_name,
        "x-splitroute-decision": decision.header(),
        "x-splitroute-attempts": str(len(answer.attempts)),
    }
    return _id_headers(answer.incoming) + [(name.encode(), _printable(value)) for name, value in named.items()]


def _printable(value: str) -> bytes:
    """Names in a policy may be any text; a header may not."""
    if value.isascii() and value.isprintable():
        return value.encode()
    return re.sub(r"[^\x20-\x7e]", "?", value).encode()


def error_response(
    error: RouterError, request_id: str | None = None, surface: Surface = "chat.completions"
) -> JSONResponse:
    """`error` with its status, in the shape of the API that `surface` belongs to."""
    headers: dict[str, str] = {}
    if request_id is not None:
        headers["x-request-id"] = request_id
        if surface == "messages":
            headers["request-id"] = request_id  # where Anthropic's clients look
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    return JSONResponse(error.body(surface), status_code=error.status, headers=headers)


def internal_error() -> RouterError:
    return RouterError("the gateway failed on this request; its log says where", status=500, code="internal_error")


def parsed(body: bytes | bytearray) -> Any:
    """The JSON in `body`. Raises RouterError (400)."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RouterError(
            f"the body is not valid JSON ({error}); send a JSON object", status=400, code="invalid_json"
        ) from None


async def _body(receive: Receive) -> bytes:
    """The request's whole body. Raises ClientGone, or RouterError (413)."""
    parts: list[bytes] = []
    size = 0
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise RouterError(f"the body is larger than {MAX_BODY_BYTES >> 20} MiB; shorten the prompt", status=413)
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _text(value: bytes | None) -> Any:
    return None if value is None else value.decode("latin-1")
