"""What may happen to a request, each under the name that a model, or the header `x-chaos`, has: `cut:3`, `once:503`."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from router.chaos.provider import FakeProvider

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


class Script:
    """What happens for one request. Every method returns whether the connection may be used again."""

    def __init__(self, provider: FakeProvider, seen: Seen, writer: asyncio.StreamWriter) -> None:
        self.provider = provider
        self.seen = seen
        self.writer = writer
        self.framed = True
        self.chat = seen.path.endswith("/chat/completions")
        options = seen.body.get("stream_options") or {}
        self.with_usage = bool(options.get("include_usage"))

    async def run(self) -> bool:
        model = self.seen.headers.get("x-chaos") or self.provider.alias or str(self.seen.body.get("model"))
        name, _, rest = model.partition(":")
        if self.seen.path.endswith("/models"):
            listed = {"object": "list", "data": [{"id": script, "object": "model"} for script in SCRIPTS]}
            return await self.plain(200, json.dumps(listed).encode(), "application/json")
        method = getattr(self, "do_" + name.replace("-", "_"), None)
        if method is None:
            known = ", ".join(SCRIPTS)
            error = {"message": f"no script {name!r}; known: {known}", "type": "invalid_request_error", "code": None}
            return await self.plain(404, json.dumps({"error": error}).encode(), "application/json")
        if not self.seen.body.get("stream") and name in ("ok", "refuses-stream-options"):
            return await self.whole()
        try:
            result: bool = await (method(rest) if rest else method())
        except (TypeError, ValueError):
            error = {
                "message": f"{model!r}: what follows the colon is nothing for this script",
                "type": "invalid_request_error",
            }
            return await self.plain(400, json.dumps({"error": error}).encode(), "application/json")
        return result

    async def healthy(self) -> bool:
        return await (self.do_ok() if self.seen.body.get("stream") else self.whole())

    # --- scripts -------------------------------------------------------------------------------------

    async def do_ok(self) -> bool:
        """A whole answer."""
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

    async def do_calls_cut(self) -> bool:
        """The connection closes in the middle of a tool call."""
        await self.begin_stream()
        await self.send(self.role(), *self.call(0, *CALLS[0])[:2])
        return False

    async def do_bytes(self) -> bool:
        """Every byte in a packet of its own, with comments and CRLF between."""
        await self.begin_stream()
        events = [b": hello\r\n\r\n", self.role(), *map(self.word, WORDS)]
        for byte in b"".join(events).replace(b"\n\n", b"\r\n\r\n"):
            await self.send(bytes([byte]))
        return await self.end()

    async def do_paced(self, milliseconds: str = "20") -> bool:
        """A whole answer, so many milliseconds between its words."""
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
        """The request is read, and nothing comes."""
        await asyncio.sleep(3600)
        return False

    async def do_role_then_silence(self) -> bool:
        """The role, then nothing."""
        await self.begin_stream()
        await self.send(self.role())
        return await self.do_never_answers()

    async def do_comments_forever(self) -> bool:
        """Comments and no event, without end."""
        await self.begin_stream()
        return await self.comment()

    async def do_token_then_silence(self) -> bool:
        """One word, then nothing."""
        await self.begin_stream()
        await self.send(self.role(), self.word(WORDS[0]))
        return await self.do_never_answers()

    async def do_token_then_comments(self) -> bool:
        """One word, then comments without end."""
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
        """An error in the stream after so many words."""
        await self.begin_stream()
        await self.send(self.role(), *map(self.word, WORDS[: int(words)]))
        error = {"error": {"message": "the model fell over", "type": "server_error", "code": 503}}
        begin = b"event: error\n" if self.seen.path.endswith("/messages") else b""
        await self.send(begin + b"data: " + json.dumps({"type": "error", **error}).encode() + b"\n\n")
        return await self.end_chunks()

    async def do_status(self, status: str) -> bool:
        """That status with an error of the API."""
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
        """An error that has the API key in it."""
        message = f"Incorrect API key provided: {self.seen.headers.get('authorization', '').removeprefix('Bearer ')}"
        return await self.plain(401, json.dumps({"error": {"message": message}}).encode(), "application/json")

    async def do_refuses_stream_options(self) -> bool:
        """400 where `stream_options` is asked for."""
        if "stream_options" in self.seen.body:
            return await self.do_says("400:Unrecognized request argument supplied: stream_options")
        return await self.do_ok()

    async def do_html(self) -> bool:
        """200 with a page of a web server's."""
        return await self.plain(200, b"<html>welcome</html>", "text/html")

    async def do_half_a_body(self) -> bool:
        """Less than its content-length says."""
        self.writer.write(
            b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{"choices": ['
        )
        await self.writer.drain()
        return False

    async def do_redirects(self) -> bool:
        """307 to elsewhere."""
        return await self.plain(307, b"", "text/plain", {"location": "http://127.0.0.1:9/"})

    # --- faults that a whole answer may have too -----------------------------------------------------

    async def do_once(self, status: str) -> bool:
        """That status for the first request, and none after it."""
        if self.provider.count(f"once:{status}") == 1:
            return await self.do_status(status)
        return await self.healthy()

    async def do_bare(self, status: str) -> bool:
        """A status without a word on when to come back."""
        error = {"error": {"message": f"scripted {status}", "type": "server_error", "code": None}}
        return await self.plain(int(status), json.dumps(error).encode(), "application/json")

    async def do_flapping(self, seconds: str) -> bool:
        """503 for so long after the first request, and well after that."""
        if time.monotonic() - self.provider.since(f"flapping:{seconds}") < float(seconds):
            return await self.do_bare("503")
        return await self.healthy()

    async def do_percent(self, percent: str) -> bool:
        """Fails so often, in turn by reset, 500, a cut and silence without end."""
        number = self.provider.count("percent")
        if number * int(percent) // 100 == (number - 1) * int(percent) // 100:
            return await self.healthy()
        turn = (number * int(percent) // 100) % 4
        if turn == 0:
            return await self.do_reset()
        if turn == 1:
            return await self.do_bare("500")
        if turn == 2:
            return await (self.do_cut("0") if self.seen.body.get("stream") else self.do_half_a_body())
        return await self.do_never_answers()

    async def do_tail(self, percent: str) -> bool:
        """So many answers begin 20 times later than the others, which take 20 ms."""
        number = self.provider.count("tail")
        slow = number * int(percent) // 100 != (number - 1) * int(percent) // 100
        await asyncio.sleep(0.4 if slow else 0.02)
        return await self.healthy()

    async def do_busy(self, milliseconds: str) -> bool:
        """Takes that long for the whole answer."""
        await asyncio.sleep(float(milliseconds) / 1000)
        return await self.healthy()

    async def do_reset(self) -> bool:
        """The connection is reset before any header."""
        self.writer.transport.abort()
        return False

    async def do_empty(self) -> bool:
        """200, and nothing in it."""
        if self.seen.body.get("stream"):
            await self.begin_stream()
            return await self.end_chunks()
        return await self.plain(200, b"", "application/json")

    async def do_error_body(self) -> bool:
        """200 with an error in it."""
        error = {"error": {"message": "the model fell over", "type": "server_error", "code": 503}}
        return await self.plain(200, json.dumps(error).encode(), "application/json")

    async def do_malformed(self, words: str = "0") -> bool:
        """An event, or a body, that is no JSON."""
        if not self.seen.body.get("stream"):
            return await self.plain(200, b'{"choices": [{', "application/json")
        await self.begin_stream()
        await self.send(self.role(), *map(self.word, WORDS[: int(words)]), b'data: {"choices": [{"del\n\n')
        return await self.end()

    async def do_filtered(self) -> bool:
        """The answer is cut short by the provider's content filter, and says so."""
        await self.begin_stream()
        await self.send(self.role(), self.word(WORDS[0]))
        return await self.end("content_filter")

    async def do_huge(self, kilobytes: str = "256") -> bool:
        """One event of that size."""
        await self.begin_stream()
        await self.send(self.role(), self.word("x" * (int(kilobytes) << 10)))
        return await self.end()

    async def do_doubled(self) -> bool:
        """Every event twice."""
        await self.begin_stream()
        await self.send(self.role(), *[event for word in WORDS for event in [self.word(word)] * 2])
        return await self.end()

    async def do_old(self) -> bool:
        """HTTP/1.0: the end of the connection is the end of the answer."""
        self.framed = False
        self.writer.write(b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        await self.send(self.role(), *map(self.word, WORDS))
        await self.end()
        return False

    async def do_bad_gzip(self) -> bool:
        """Says that it is compressed, and is not."""
        kind = "text/event-stream" if self.seen.body.get("stream") else "application/json"
        return await self.plain(200, b"\x1f\x8bnot gzip at all", kind, {"content-encoding": "gzip"})

    # --- parts of an answer --------------------------------------------------------------------------

    async def whole(self, calls: Sequence[tuple[str, str]] = ()) -> bool:
        if self.seen.path.endswith("/embeddings"):
            row = {"object": "embedding", "index": 0, "embedding": [0.5, -0.25]}
            usage = {"prompt_tokens": 7, "total_tokens": 7}
            body: dict[str, Any] = {"object": "list", "data": [row], "model": self.seen.body["model"], "usage": usage}
            return await self.plain(200, json.dumps(body).encode(), "application/json")
        content: dict[str, Any] = {"message": {"role": "assistant", "content": TEXT}} if self.chat else {"text": TEXT}
        if calls:
            called: list[Any] = [
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
            if not self.framed:
                self.writer.write(event)
                await self.writer.drain()
                continue
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
        if self.framed:
            self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()
        return True


def model_for_words(message: str, status: int = 400) -> str:
    """The model name that makes the provider refuse in these words."""
    assert re.match(r"[^:]", message)
    return f"says:{status}:{message}"


SCRIPTS = tuple(name.removeprefix("do_").replace("_", "-") for name in vars(Script) if name.startswith("do_"))
"""Their names."""
