"""The same scripts in Anthropic's dialect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from router.chaos.scripts import TEXT, WORDS, Script, Seen

if TYPE_CHECKING:
    from router.chaos.provider import FakeProvider


class MessagesScript(Script):
    """The same in Anthropic's dialect (https://docs.anthropic.com/en/docs/build-with-claude/streaming)."""

    def __init__(self, provider: FakeProvider, seen: Seen, writer: asyncio.StreamWriter) -> None:
        super().__init__(provider, seen, writer)
        self.block = 0
        self.opened = False

    def named(self, kind: str, **body: Any) -> bytes:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **body})}\n\n".encode()

    def message(self) -> dict[str, Any]:
        head = {"id": "msg_fake", "type": "message", "role": "assistant", "model": self.seen.body["model"]}
        return {**head, "stop_sequence": None, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        return {"input_tokens": 5, "cache_read_input_tokens": 2, "output_tokens": len(WORDS)}

    async def whole(self, calls: Sequence[tuple[str, str]] = ()) -> bool:
        content: list[dict[str, Any]] = [
            {"type": "tool_use", "id": f"call_{name}", "name": name, "input": json.loads(arguments)}
            for name, arguments in calls
        ]
        reason = "tool_use" if calls else "end_turn"
        body = {**self.message(), "content": content or [{"type": "text", "text": TEXT}], "stop_reason": reason}
        return await self.plain(200, json.dumps(body).encode(), "application/json")

    def role(self) -> bytes:
        begun = {**self.message(), "content": [], "stop_reason": None, "usage": {**self.usage(), "output_tokens": 1}}
        return self.named("message_start", message=begun) + self.named("ping")

    def word(self, word: str) -> bytes:
        begin = b"" if self.opened else self.begin({"type": "text", "text": ""})
        return begin + self.named("content_block_delta", index=self.block, delta={"type": "text_delta", "text": word})

    def begin(self, block: dict[str, Any]) -> bytes:
        ended = self.stop()
        self.opened = True
        return ended + self.named("content_block_start", index=self.block, content_block=block)

    def stop(self) -> bytes:
        if not self.opened:
            return b""
        self.opened, block = False, self.block
        self.block += 1
        return self.named("content_block_stop", index=block)

    def call(self, index: int, name: str, arguments: str) -> list[bytes]:
        begin = self.begin({"type": "tool_use", "id": f"call_{name}", "name": name, "input": {}})
        deltas = [
            self.named(
                "content_block_delta", index=self.block, delta={"type": "input_json_delta", "partial_json": part}
            )
            for part in (arguments[:4], arguments[4:])
        ]
        return [begin, *deltas]

    async def end(self, reason: str = "stop") -> bool:
        stopped = {"stop": "end_turn", "tool_calls": "tool_use", "content_filter": "refusal"}[reason]
        delta = {"stop_reason": stopped, "stop_sequence": None}
        await self.send(self.stop() + self.named("message_delta", delta=delta, usage={"output_tokens": len(WORDS)}))
        await self.send(self.named("message_stop"))
        return await self.end_chunks()
