"""Anthropic's messages API (https://docs.anthropic.com/en/api/messages), and others that speak it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from backends.base import BackendError, Call, Reply, Surface, Usage
from backends.hosted.provider import Provider
from backends.hosted.refusals import in_band
from backends.hosted.reply import HostedReply, parsed
from backends.hosted.sse import Event
from backends.options import AnthropicOptions


class AnthropicBackend(Provider):
    """One provider: a base URL and a key."""

    surfaces: ClassVar[frozenset[Surface]] = frozenset({"messages"})

    def __init__(self, name: str, options: AnthropicOptions) -> None:
        headers = {"anthropic-version": options.version}
        if options.api_key is not None and (key := options.api_key.get_secret_value()):
            headers["x-api-key"] = key
        if options.beta:
            headers["anthropic-beta"] = ",".join(options.beta)
        super().__init__(name, options, headers)

    async def _open(self, call: Call) -> Reply:
        return AnthropicReply(self, await self.send(call, "/messages", {}), stream=call.stream)


class AnthropicReply(HostedReply):
    hint = "does base_url end where /messages begins, mostly in /v1?"

    def __init__(self, provider: Provider, response: Any, *, stream: bool) -> None:
        super().__init__(provider, response, stream=stream)
        self._counts: dict[str, Any] = {}

    def is_end(self, event: Event) -> bool:
        data = event.data
        return data is not None and b"message_stop" in data and (parsed(data) or {}).get("type") == "message_stop"

    def usage_of(self, body: Mapping[str, Any]) -> Usage | None:
        usage = body.get("usage")
        if not isinstance(usage, Mapping):
            return None
        return _usage(usage)

    def read(self, event: Event) -> tuple[bytes, bool, BackendError | None]:
        payload = event.data
        if payload is None:
            return event.raw, False, None
        # The usual event says what it is in its first bytes, and nothing in it is of use here.
        if payload.startswith((b'{"type":"content_block_delta"', b'{"type": "content_block_delta"')):
            return event.raw, True, None
        body = parsed(payload)
        if body is None:
            return b"", False, self.not_json()
        kind = body.get("type")
        if kind == "error":
            return b"", False, in_band(self.provider.name, body.get("error"))
        message = body.get("message")
        usage = message.get("usage") if isinstance(message, Mapping) else body.get("usage")
        if isinstance(usage, Mapping):
            self._counts.update({name: value for name, value in usage.items() if value is not None})
            self.usage = _usage(self._counts)
        block = body.get("content_block")
        tool = kind == "content_block_start" and isinstance(block, Mapping) and block.get("type") == "tool_use"
        return event.raw, kind == "content_block_delta" or tool, None


def _usage(usage: Mapping[str, Any]) -> Usage:
    """Its `input_tokens` are those that were neither read from a cache nor written to one."""
    cached = int(usage.get("cache_read_input_tokens") or 0)
    prompt = int(usage.get("input_tokens") or 0) + cached + int(usage.get("cache_creation_input_tokens") or 0)
    return Usage(prompt, int(usage.get("output_tokens") or 0), cached)
