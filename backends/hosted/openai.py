"""Any API that speaks OpenAI's wire format over HTTP."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from backends.base import BackendError, Call, Reply, Surface, Usage, read_usage
from backends.hosted.http import Response
from backends.hosted.provider import Provider
from backends.hosted.refusals import in_band
from backends.hosted.reply import HostedReply, parsed
from backends.hosted.sse import Event
from backends.options import OpenAIOptions

_PATHS: dict[Surface, str] = {
    "chat.completions": "/chat/completions",
    "completions": "/completions",
    "embeddings": "/embeddings",
}
_USAGE = re.compile(rb'"usage"\s*:\s*\{')


class OpenAIBackend(Provider):
    """One provider: a base URL and a key."""

    surfaces: ClassVar[frozenset[Surface]] = frozenset(_PATHS)

    def __init__(self, name: str, options: OpenAIOptions) -> None:
        headers = {}
        if options.api_key is not None and (key := options.api_key.get_secret_value()):
            headers["authorization"] = f"Bearer {key}"
        if options.organization is not None:
            headers["openai-organization"] = options.organization
        super().__init__(name, options, headers)
        self._refuses_stream_options = False

    async def _open(self, call: Call) -> Reply:
        path = _PATHS[call.surface]
        asked = call.body.get("stream_options") or {}
        wants_usage = bool(isinstance(asked, Mapping) and asked.get("include_usage"))
        # Asked for always: it is how tokens and cost are known.
        options = {} if not call.stream or wants_usage else {"stream_options": {**asked, "include_usage": True}}
        if self._refuses_stream_options:
            return self._reply(call, await self.send(self._without(call), path, {}), wants_usage)
        try:
            response = await self.send(call, path, options)
        except BackendError as error:
            if not call.stream or not _is_about_stream_options(error):
                raise
            # Known for the rest of this process; nobody is refused twice (litellm#9657, #23847).
            self._refuses_stream_options = True
            response = await self.send(self._without(call), path, {})
        return self._reply(call, response, wants_usage)

    @staticmethod
    def _without(call: Call) -> Call:
        return call.without("stream_options")

    def _reply(self, call: Call, response: Response, wants_usage: bool) -> OpenAIReply:
        return OpenAIReply(self, response, stream=call.stream, strip_usage=call.stream and not wants_usage)


class OpenAIReply(HostedReply):
    hint = "does base_url end where /chat/completions begins, mostly in /v1?"

    def __init__(self, provider: Provider, response: Response, *, stream: bool, strip_usage: bool) -> None:
        super().__init__(provider, response, stream=stream)
        self._strip_usage = strip_usage
        self._seen_content = False

    def is_end(self, event: Event) -> bool:
        return event.data == b"[DONE]"

    def usage_of(self, body: Mapping[str, Any]) -> Usage | None:
        return read_usage(body)

    def read(self, event: Event) -> tuple[bytes, bool, BackendError | None]:
        payload = event.data
        if payload is None:
            return event.raw, False, None  # a comment: no sign of an answer (livekit/agents#6171)
        # Once content flows, only events that look like more than text are parsed, or like less than an object.
        if (
            self._seen_content
            and payload.endswith(b"}")
            and b'"error"' not in payload
            and _USAGE.search(payload) is None
        ):
            return event.raw, True, None
        body = parsed(payload)
        if body is None:
            return b"", False, self.not_json()
        if body.get("error"):
            return b"", False, in_band(self.provider.name, body["error"])
        usage = read_usage(body)
        if usage is not None:
            self.usage = usage
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
