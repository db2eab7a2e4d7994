"""A scripted hosted API on a real loopback socket. What it does is chosen by the model that is asked for.

Written on plain sockets, because half of what it does is what no HTTP server would do: cut a stream, never
answer, send an event in pieces.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

WORDS = ["One", " two", " three", " four", " five", " six"]
TEXT = "".join(WORDS)
CALLS = [("get_weather", '{"city": "Köln"}'), ("get_time", '{"zone": "CET"}')]


@dataclass
class Seen:
    """One request as it arrived, and whether its client left before the answer was complete."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    left_early: bool = False
    raw: bytes = b""
    """The body as it came."""


@dataclass
class FakeProvider:
    """Runs in a thread with a loop of its own, so that tests of any kind may use it. A context manager."""

    requests: list[Seen] = field(default_factory=list)
    url: str = ""
    retry_after: list[str] = field(default_factory=lambda: ["1"])
    """For the model `status:429`: each answer takes the next, the last one repeats."""
    alias: str | None = None
    """The script for every model, where a test cannot choose the model's name."""

    def __enter__(self) -> FakeProvider:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop)
        self._server = server.result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        async def stop() -> None:
            self._server.close()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def asked(self, model: str) -> list[Seen]:
        return [seen for seen in self.requests if seen.body.get("model") == model]

    # --- connections ---------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {
                    name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)
                }
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                seen = Seen(head[0].split()[1], headers, json.loads(body or b"{}"), raw=body)
                self.requests.append(seen)
                if not await self._answer_watched(seen, reader, writer):
                    break
        writer.close()

    async def _answer_watched(self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        script = MessagesScript if seen.path.endswith("/messages") else Script
        answering = asyncio.create_task(script(self, seen, writer).run())
        # A client that waits for its answer sends nothing: whatever can be read is its leaving.
        leaving = asyncio.create_task(reader.read(1))
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            seen.left_early = True
            answering.cancel()
            return False
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        return answering.result()


class Script:
    """What happens for one request. Every method returns whether the connection may be used again."""

    def __init__(self, provider: FakeProvider, seen: Seen, writer: asyncio.StreamWriter) -> None:
        self.provider = provider
        self.seen = seen
        self.writer = writer
        self.chat = seen.path.endswith("/chat/completions")
        options = seen.body.get("stream_options") or {}
        self.with_usage = bool(options.get("include_usage"))

    async def run(self) -> bool:
        model = self.provider.alias or str(self.seen.body.get("model"))
        name, _, rest = model.partition(":")
        method = getattr(self, "do_" + name.replace("-", "_"))
        if not self.seen.body.get("stream") and name in ("ok", "refuses-stream-options"):
            return await self.whole()
        result: bool = await (method(rest) if rest else method())
        return result

    # --- scripts -------------------------------------------------------------------------------------

    async def do_ok(self) -> bool:
        await self.begin_stream()
        await self.send(self.role(), *map(self.word, WORDS))
        return await self.end()

    async def do_calls(self) -> bool:
        """Two tool calls at once, their arguments in pieces."""
        if not self.seen.body.get("stream"):
            return await self.whole(CALLS)
        await self.begin_stream()
        await self.send(self.role())
        for index, (name, arguments) in enumerate(CALLS):
            await self.send(*self.call(index, name, arguments))
        return await self.end("tool_calls")

    async def do_bytes(self) -> bool:
        """Every byte in a packet of its own, with comments and CRLF between."""
        await self.begin_stream()
        events = [b": hello\r\n\r\n", self.role(), *map(self.word, WORDS)]
        for byte in b"".join(events).replace(b"\n\n", b"\r\n\r\n"):
            await self.send(bytes([byte]))
        return await self.end()

    async def do_paced(self, milliseconds: str = "20") -> bool:
        await self.begin_stream()
        await self.send(self.role())
        for word in WORDS:
            await asyncio.sleep(int(milliseconds) / 1000)
            await self.send(self.word(word))
        return await self.end()

    async def do_slow_first(self, milliseconds: str) -> bool:
        """Headers at once, the first content late."""
        await self.begin_stream()
        await asyncio.sleep(int(milliseconds) / 1000)
        await self.send(self.role(), *map(self.word, WORDS))
        return await self.end()

    async def do_never_answers(self) -> bool:
        await asyncio.sleep(3600)
        return False

    async def do_role_then_silence(self) -> bool:
        await self.begin_stream()
        await self.send(self.role())
        return await self.do_never_answers()

    async def do_comments_forever(self) -> bool:
        await self.begin_stream()
        return await self.comment()

    async def do_token_then_silence(self) -> bool:
        await self.begin_stream()
        await self.send(self.role(), self.word(WORDS[0]))
        return await self.do_never_answers()

    async def do_token_then_comments(self) -> bool:
        await self.begin_stream()
        await self.send(self.role(), self.word(WORDS[0]))
        return await self.comment()

    async def do_cut(self, words: str = "3") -> bool:
        """The connection closes in the middle of the stream."""
        await self.begin_stream()
        await self.send(self.role(), *map(self.word, WORDS[: int(words)]))
        return False

    async def do_ends_tidily(self, words: str = "3") -> bool:
        """A proper end of the HTTP message in the middle of the answer: only [DONE] is missing."""
        await self.begin_stream()
        await self.send(self.role(), *map(self.word, WORDS[: int(words)]))
        return await self.end_chunks()

    async def do_error_event(self, words: str = "0") -> bool:
        await self.begin_stream()
        await self.send(self.role(), *map(self.word, WORDS[: int(words)]))
        error = {"error": {"message": "the model fell over", "type": "server_error", "code": 503}}
        begin = b"event: error\n" if self.seen.path.endswith("/messages") else b""
        await self.send(begin + b"data: " + json.dumps({"type": "error", **error}).encode() + b"\n\n")
        return await self.end_chunks()

    async def do_status(self, status: str) -> bool:
        code = int(status)
        headers = {}
        if code == 429:
            waits = self.provider.retry_after
            headers["retry-after"] = waits.pop(0) if len(waits) > 1 else waits[0]
        kind = "invalid_request_error" if code < 500 else "server_error"
        error = {"message": f"scripted {code}", "type": kind, "param": "p", "code": f"code_{code}"}
        return await self.plain(code, json.dumps({"error": error}).encode(), "application/json", headers)

    async def do_says(self, status_and_message: str) -> bool:
        """An error in given words."""
        status, _, message = status_and_message.partition(":")
        return await self.plain(int(status), json.dumps({"error": {"message": message}}).encode(), "application/json")

    async def do_echoes_key(self) -> bool:
        message = f"Incorrect API key provided: {self.seen.headers.get('authorization', '').removeprefix('Bearer ')}"
        return await self.plain(401, json.dumps({"error": {"message": message}}).encode(), "application/json")

    async def do_refuses_stream_options(self) -> bool:
        if "stream_options" in self.seen.body:
            return await self.do_says("400:Unrecognized request argument supplied: stream_options")
        return await self.do_ok()

    async def do_html(self) -> bool:
        return await self.plain(200, b"<html>welcome</html>", "text/html")

    async def do_half_a_body(self) -> bool:
        self.writer.write(
            b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{"choices": ['
        )
        await self.writer.drain()
        return False

    async def do_redirects(self) -> bool:
        return await self.plain(307, b"", "text/plain", {"location": "http://127.0.0.1:9/"})

    # --- parts of an answer --------------------------------------------------------------------------

    async def whole(self, calls: Sequence[tuple[str, str]] = ()) -> bool:
        if self.seen.path.endswith("/embeddings"):
            row = {"object": "embedding", "index": 0, "embedding": [0.5, -0.25]}
            usage = {"prompt_tokens": 7, "total_tokens": 7}
            body = {"object": "list", "data": [row], "model": self.seen.body["model"], "usage": usage}
            return await self.plain(200, json.dumps(body).encode(), "application/json")
        content = {"message": {"role": "assistant", "content": TEXT}} if self.chat else {"text": TEXT}
        if calls:
            called = [
                {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for name, arguments in calls
            ]
            content = {"message": {"role": "assistant", "content": None, "tool_calls": called}}
        body = {
            "id": "fake-1",
            "object": "chat.completion" if self.chat else "text_completion",
            "created": 1,
            "model": self.seen.body["model"],
            "choices": [{"index": 0, "finish_reason": "tool_calls" if calls else "stop", **content}],
            "usage": self.usage(),
        }
        return await self.plain(200, json.dumps(body).encode(), "application/json")

    async def plain(self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> bool:
        lines = [f"HTTP/1.1 {status} x", f"content-type: {kind}", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        await self.writer.drain()
        return True

    async def begin_stream(self) -> None:
        self.writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nx-fake: yes\r\n\r\n"
        )
        await self.writer.drain()

    async def comment(self) -> bool:
        while True:
            await self.send(b": keep-alive\n\n")
            await asyncio.sleep(0.02)

    async def send(self, *events: bytes) -> None:
        for event in events:
            self.writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
            await self.writer.drain()

    def event(self, choices: list[dict[str, Any]], **extra: Any) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        body = {"id": "fake-1", "object": kind, "created": 1, "model": self.seen.body["model"], "choices": choices}
        return b"data: " + json.dumps({**body, **extra}).encode() + b"\n\n"

    def role(self) -> bytes:
        if not self.chat:
            return b": no role here\n\n"
        delta = {"role": "assistant", "content": ""}
        return self.event([{"index": 0, "delta": delta, "finish_reason": None}])

    def word(self, word: str) -> bytes:
        content = {"delta": {"content": word}} if self.chat else {"text": word}
        return self.event([{"index": 0, "finish_reason": None, **content}])

    def call(self, index: int, name: str, arguments: str) -> list[bytes]:
        pieces: list[dict[str, Any]] = [{"id": f"call_{name}", "type": "function"}, {}, {}]
        said = [{"name": name, "arguments": ""}, {"arguments": arguments[:4]}, {"arguments": arguments[4:]}]
        return [
            self.event(
                [
                    {
                        "index": 0,
                        "finish_reason": None,
                        "delta": {"tool_calls": [{"index": index, **piece, "function": function}]},
                    }
                ]
            )
            for piece, function in zip(pieces, said, strict=True)
        ]

    def usage(self) -> dict[str, Any]:
        return {"prompt_tokens": 7, "completion_tokens": len(WORDS), "total_tokens": 7 + len(WORDS)}

    async def end(self, reason: str = "stop") -> bool:
        last: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        await self.send(self.event([{"index": 0, "finish_reason": reason, **last}]))
        if self.with_usage:
            await self.send(self.event([], usage=self.usage()))
        await self.send(b"data: [DONE]\n\n")
        return await self.end_chunks()

    async def end_chunks(self) -> bool:
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()
        return True


def model_for_words(message: str, status: int = 400) -> str:
    """The model name that makes the provider refuse in these words."""
    assert re.match(r"[^:]", message)
    return f"says:{status}:{message}"


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
        stopped = {"stop": "end_turn", "tool_calls": "tool_use"}[reason]
        delta = {"stop_reason": stopped, "stop_sequence": None}
        await self.send(self.stop() + self.named("message_delta", delta=delta, usage={"output_tokens": len(WORDS)}))
        await self.send(self.named("message_stop"))
        return await self.end_chunks()
