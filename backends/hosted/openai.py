"""Any API that speaks OpenAI's wire format over HTTP. Answers are relayed byte for byte."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from backends.base import (
    BackendError,
    Call,
    Goals,
    Health,
    KVTransfer,
    Piece,
    PromptCount,
    Sample,
    Surface,
    Usage,
    read_usage,
)
from backends.hosted.counting import TokenizerMissing, count_body, text_counter
from backends.hosted.http import HttpClient, Response
from backends.hosted.refusals import in_band, refusal
from backends.hosted.sse import Event, EventTooLarge, Splitter
from backends.options import OpenAIOptions

_PATHS: dict[Surface, str] = {"chat.completions": "/chat/completions", "completions": "/completions"}
_MAX_ANSWER_BYTES = 64 << 20
_MAX_ERROR_BYTES = 1 << 20
_USAGE = re.compile(rb'"usage"\s*:\s*\{')


class OpenAIBackend:
    """One provider: a base URL and a key."""

    def __init__(self, name: str, options: OpenAIOptions) -> None:
        self.name = name
        headers = {"content-type": "application/json", **options.headers}
        self._key = options.api_key.get_secret_value() if options.api_key is not None else None
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        if options.organization is not None:
            headers["openai-organization"] = options.organization
        self._options = options
        self._headers = headers
        self._client: HttpClient | None = None
        self._refuses_stream_options = False
        self._last_error: str | None = None
        self._count: Callable[[str], int] | None = None

    async def start(self) -> None:
        if self._options.tokenizer is not None and self._count is None:
            try:
                self._count = await asyncio.to_thread(text_counter, self._options.tokenizer)
            except TokenizerMissing as missing:
                raise BackendError(f"provider {self.name}: {missing}", status=500) from None
        if self._client is None:
            self._client = HttpClient(
                self.name, self._options.base_url, self._headers, self._options.connect_timeout_ms / 1000
            )

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def count_prompt(self, surface: Surface, body: Mapping[str, Any]) -> PromptCount | None:
        if self._count is None:
            return None
        tokens = count_body(self._count, surface, body)
        return None if tokens is None else PromptCount(tokens, exact=True)

    def forecast(self, prompt: PromptCount, max_tokens: int | None, goals: Goals) -> None:
        return None

    def samples(self) -> list[Sample]:
        return []

    def context_limit(self) -> int | None:
        return None

    def health(self) -> Health:
        """Always able to take a request, as far as we know without sending one."""
        return Health(True, {"base_url": self._options.base_url, "last_error": self._last_error})

    async def open(self, call: Call) -> Reply:
        try:
            return await self._open(call)
        except BackendError as error:
            raise self._noted(error) from None

    async def _open(self, call: Call) -> Reply:
        asked = call.body.get("stream_options") or {}
        wants_usage = bool(isinstance(asked, Mapping) and asked.get("include_usage"))
        body = dict(call.body)
        if call.stream and not self._refuses_stream_options:
            # Asked for always: it is how tokens and cost are known.
            body["stream_options"] = {**asked, "include_usage": True}
        try:
            response = await self._send(call, body)
        except BackendError as error:
            if not call.stream or self._refuses_stream_options or not _is_about_stream_options(error):
                raise
            # Known for the rest of this process; nobody is refused twice (litellm#9657, #23847).
            self._refuses_stream_options = True
            del body["stream_options"]
            response = await self._send(call, body)
        return Reply(self, response, call, strip_usage=call.stream and not wants_usage)

    async def _send(self, call: Call, body: Mapping[str, Any]) -> Response:
        if self._client is None:
            raise BackendError(f"provider {self.name} is not running", status=503)
        content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        response = await self._client.post(_PATHS[call.surface], content, {"x-request-id": call.request_id})
        if response.status == 200:
            return response
        try:
            said = await response.read(_MAX_ERROR_BYTES)
        finally:
            await response.aclose()
        raise refusal(self.name, response.status, response.headers, said)

    def _noted(self, error: BackendError) -> BackendError:
        """`error` without the key, should the provider have echoed it; remembered for /health."""
        if self._key and self._key in error.message:
            error.message = error.message.replace(self._key, "***")
            error.args = (error.message,)
        self._last_error = error.message
        return error


class Reply:
    """An answer under way."""

    def __init__(self, backend: OpenAIBackend, response: Response, call: Call, *, strip_usage: bool) -> None:
        self.status = response.status
        self.headers = response.headers
        self._backend = backend
        self._response = response
        self._call = call
        self._strip_usage = strip_usage
        self._usage: Usage | None = None
        self._seen_content = False

    @property
    def placement(self) -> None:
        return None

    @property
    def transfer(self) -> KVTransfer | None:
        return None

    async def aclose(self) -> None:
        await self._response.aclose()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        pieces = self._events() if self._call.stream else self._whole()
        try:
            async for piece in pieces:
                yield piece
        except BackendError as error:
            raise self._backend._noted(error) from None

    # --- whole ---------------------------------------------------------------------------------------

    async def _whole(self) -> AsyncIterator[Piece]:
        data = await self._response.read(_MAX_ANSWER_BYTES)
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise self._not_what_was_asked("JSON", data)
        if body.get("error"):
            raise in_band(self._backend.name, body["error"])
        yield Piece(data, content=True, usage=read_usage(body), done=True)

    def _not_what_was_asked(self, wanted: str, data: bytes) -> BackendError:
        kind = self.headers.get("content-type", "of no content type")
        begin = data[:80].decode("utf-8", "replace")
        return BackendError(
            f"{self._backend.name}: {wanted} was expected, the answer is {kind}: {begin!r}",
            status=502,
            code="not_openai",
            hint="does base_url end where /chat/completions begins, mostly in /v1?",
        )

    # --- streamed ------------------------------------------------------------------------------------

    async def _events(self) -> AsyncIterator[Piece]:
        if not self.headers.get("content-type", "").startswith("text/event-stream"):
            data = await self._response.read(_MAX_ANSWER_BYTES)
            try:
                said = json.loads(data)
            except (ValueError, RecursionError):
                said = None
            if isinstance(said, dict) and said.get("error"):
                raise in_band(self._backend.name, said["error"])
            raise self._not_what_was_asked("a stream of events", data)
        splitter = Splitter()
        try:
            async for chunk in self._response.chunks():
                piece, error = self._piece(splitter, chunk)
                if piece is not None:
                    yield piece
                if error is not None:
                    raise error
                if piece is not None and piece.done:
                    return
        except EventTooLarge:
            raise BackendError(f"{self._backend.name}: an event of the stream never ends", status=502) from None
        # Without [DONE] it is a part of an answer, however tidily the connection closed (Portkey#1797).
        raise BackendError(
            f"{self._backend.name}: the stream ended before the answer was complete", status=502, code="stream_cut"
        )

    def _piece(self, splitter: Splitter, chunk: bytes) -> tuple[Piece | None, BackendError | None]:
        """What `chunk` completes: events to relay, and the error that ends them, if one does."""
        data = b""
        content = False
        for event in splitter.feed(chunk):
            if event.data == b"[DONE]":
                return Piece(data + event.raw, content, self._usage, done=True), None
            kept, shows, error = self._read(event)
            if error is not None:
                return (Piece(data, content) if data else None), error
            data += kept
            content = content or shows
        return (Piece(data, content) if data else None), None

    def _read(self, event: Event) -> tuple[bytes, bool, BackendError | None]:
        """(bytes to relay, whether a client sees content in them, the error that the event is)."""
        payload = event.data
        if payload is None:
            return event.raw, False, None  # a comment: no sign of an answer (livekit/agents#6171)
        # Once content flows, only events that look like more than text are parsed.
        if self._seen_content and b'"error"' not in payload and _USAGE.search(payload) is None:
            return event.raw, True, None
        try:
            body = json.loads(payload)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            broken = BackendError(f"{self._backend.name}: an event of the stream is not JSON", status=502)
            return b"", False, broken
        if body.get("error"):
            return b"", False, in_band(self._backend.name, body["error"])
        usage = read_usage(body)
        if usage is not None:
            self._usage = usage
            if self._strip_usage and body.get("choices") == []:
                return b"", False, None
        shows = _shows_content(body)
        self._seen_content = self._seen_content or shows
        return event.raw, shows, None


def _shows_content(body: Mapping[str, Any]) -> bool:
    """Whether a client would see something generated: text, reasoning, a refusal, a tool call."""
    for choice in body.get("choices") or ():
        if choice.get("text"):
            return True
        delta = choice.get("delta")
        if isinstance(delta, Mapping) and any(value for name, value in delta.items() if name != "role"):
            return True
    return False


def _is_about_stream_options(error: BackendError) -> bool:
    return error.status in (400, 422) and (error.param == "stream_options" or "stream_options" in error.message)
