"""Many clients at once that cost next to nothing, so that what is measured is not them.

Each request has a connection of its own and is read to that's end; what came is looked at when all are through. (A
thousand of httpx's take seconds of the processor that the gateway answers with.)
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from benchmarks.faults.asking import HUNG_S, Outcome, streamed_kind, whole_kind


async def crowd(url: str, count: int, at_once: int, *, stream: bool, expected: str) -> list[Outcome]:
    """`count` requests for the route `chat`, so many of them under way at any time."""
    parts = urlsplit(url)
    body = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "hi"}], "stream": stream}).encode()
    request = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    ).encode() + body
    answers: list[tuple[float, bytes | None]] = []
    left = iter(range(count))

    async def client() -> None:
        for _ in left:
            begun = time.monotonic()
            try:
                async with asyncio.timeout(HUNG_S):
                    answer = await _exchange(parts.hostname or "", parts.port or 80, request)
            except TimeoutError:
                answer = None
            answers.append((time.monotonic() - begun, answer))

    await asyncio.gather(*(client() for _ in range(at_once)))
    return [_outcome(seconds, answer, stream, expected) for seconds, answer in answers]


async def _exchange(host: str, port: int, request: bytes) -> bytes:
    try:
        reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    except OSError:
        return b""
    try:
        writer.write(request)
        return await reader.read()
    except OSError:
        return b""
    finally:
        writer.close()


def _outcome(seconds: float, answer: bytes | None, stream: bool, expected: str) -> Outcome:
    if answer is None:
        return Outcome("hung", seconds)
    head, _, rest = answer.partition(b"\r\n\r\n")
    words = head.split(None, 2)
    if len(words) < 2:
        return Outcome("error", seconds)  # no answer: every client raises
    status = int(words[1])
    if status >= 400:
        return Outcome("error", seconds, status=status)
    chunked = b"transfer-encoding: chunked" in head.lower()
    parts = list(_chunks(rest)) if chunked else [rest]
    if chunked and (not parts or parts.pop() != b""):
        return Outcome("error", seconds, status=status)  # cut, as every client notices
    data = b"".join(parts)
    kind = streamed_kind(data.decode().splitlines(), expected) if stream else whole_kind(data, expected)
    return Outcome(kind, seconds, status=status)


def _chunks(data: bytes) -> Iterator[bytes]:
    """RFC 9112, section 7.1: the last one of a body that is whole is empty."""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        if len(data) < length + 2:
            return
        yield data[:length]
        data = data[length + 2 :]
