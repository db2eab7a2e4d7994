"""The HTTP client of the data path against servers that do what servers do: on real sockets, byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import trustme
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import BackendError
from backends.hosted.http import HttpClient, header

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"


@contextlib.asynccontextmanager
async def serving(handle: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[HttpClient]:
    async def watched(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await handle(reader, writer)
        writer.close()

    server = await asyncio.start_server(watched, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    host = "localhost" if tls else "127.0.0.1"
    client = HttpClient("api", f"http{'s' if tls else ''}://{host}:{port}/v1", {"x-key": "k"}, 2.0)
    try:
        yield client
    finally:
        await client.aclose()
        server.close()


async def request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    return head, await reader.readexactly(length)


def answering(*writes: bytes, end: bool = False) -> Handler:
    """Each request of a connection gets `writes`, each in a segment of its own."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await request(reader)
            for data in writes:
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(0)
            if end:
                return

    return handle


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


async def ask(client: HttpClient) -> tuple[int, bytes]:
    response = await client.post("/chat", b"{}", {"x-request-id": "r"})
    try:
        return response.status, await response.read(1 << 20)
    finally:
        await response.aclose()


async def test_a_request_is_sent_whole_and_its_connection_used_again() -> None:
    heads: list[bytes] = []
    connections = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            head, body = await request(reader)
            heads.append(head)
            assert body == b"{}"
            writer.write(OK)

    async with serving(handle) as client:
        for _ in range(5):
            assert await ask(client) == (200, b"hello")
    assert connections == 1
    assert heads[0].startswith(b"POST /v1/chat HTTP/1.1\r\nhost: 127.0.0.1:")
    assert b"\r\nx-key: k\r\n" in heads[0] and b"\r\nx-request-id: r\r\n" in heads[0]


@pytest.mark.parametrize(
    ("writes", "end", "body"),
    [
        ((CHUNKED, b"2\r\nhe\r\n3\r\nllo\r\n", b"0\r\n\r\n"), False, b"hello"),
        ((b"HTTP/1.0 200 OK\r\n\r\nhel", b"lo"), True, b"hello"),
        ((b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", OK), False, b"hello"),
        ((b"HTTP/1.1 204 No Content\r\n\r\n",), False, b""),
        ((b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 5\r\n\r\nhello",), True, b"hello"),
    ],
)  # fmt: skip
async def test_every_framing_is_read(writes: tuple[bytes, ...], end: bool, body: bytes) -> None:
    async with serving(answering(*writes, end=end)) as client:
        for _ in range(2):
            assert (await ask(client))[1] == body


@pytest.mark.parametrize(
    ("writes", "said"),
    [
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhello",), "in the middle of the answer"),
        ((CHUNKED + b"5\r\nhel",), "in the middle of the answer"),
        ((CHUNKED + b"5\r\nhello\r\nxyz\r\n",), "not HTTP"),
        ((b"HTTP/1.1 200 OK\r\ncont",), "before an answer"),
        ((b"SSH-2.0-OpenSSH_9.6\r\n",), "not HTTP"),
        ((b"HTTP/1.1 200 OK\r\n" + b"".join(b"x-%d: %s\r\n" % (n, b"y" * 900) for n in range(99)),), "not HTTP"),
        ((), "before an answer"),
    ],
)
async def test_what_is_cut_or_no_http_is_an_error_and_never_an_answer(writes: tuple[bytes, ...], said: str) -> None:
    async with serving(answering(*writes, end=True)) as client:
        with pytest.raises(BackendError, match=said) as refused:
            await ask(client)
        assert (refused.value.status, refused.value.code) == (502, "connection_broken")


async def test_a_kept_connection_that_the_server_closes_meanwhile_is_replaced() -> None:
    async with serving(answering(OK, end=True)) as client:
        for _ in range(5):
            assert await ask(client) == (200, b"hello")


async def test_a_request_that_was_begun_to_be_answered_is_not_sent_again() -> None:
    seen = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        await request(reader)
        seen += 1
        writer.write(OK)
        await request(reader)
        seen += 1
        writer.write(b"HTTP/1.1 2")

    async with serving(handle) as client:
        assert await ask(client) == (200, b"hello")
        with pytest.raises(BackendError):
            await ask(client)
    assert seen == 2


async def test_a_slow_reader_does_not_fill_memory() -> None:
    sent = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (64 << 20))
        for _ in range(64):
            writer.write(b"x" * (1 << 20))
            await writer.drain()
            sent += 1

    async with serving(handle) as client:
        response = await client.post("/chat", b"{}", {})
        await asyncio.sleep(0.5)
        assert sent < 20, "what the system's own buffers take"
        size = 0
        async for chunk in response.chunks():
            size += len(chunk)
        assert size == 64 << 20 and sent == 64
        await response.aclose()


async def test_leaving_early_drops_the_connection() -> None:
    left = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(CHUNKED + b"5\r\nhello\r\n")
        with contextlib.suppress(ConnectionError):
            assert await reader.read(1) == b""
        left.set()

    async with serving(handle) as client:
        response = await client.post("/chat", b"{}", {})
        async for _ in response.chunks():
            break
        await response.aclose()
        await asyncio.wait_for(left.wait(), 2)


async def test_cancelling_while_waiting_for_the_head_drops_the_connection() -> None:
    left = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        with contextlib.suppress(ConnectionError):
            assert await reader.read(1) == b""
        left.set()

    async with serving(handle) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.post("/chat", b"{}", {})
        await asyncio.wait_for(left.wait(), 2)


async def test_tls_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    async with serving(answering(OK), context) as client:
        with pytest.raises(BackendError, match=r"cannot connect to localhost:\d+ \(.*certificate verify failed"):
            await ask(client)
    with authority.cert_pem.tempfile() as file:
        monkeypatch.setenv("SSL_CERT_FILE", file)
        async with serving(answering(OK), context) as client:
            assert await ask(client) == (200, b"hello")


async def test_an_unknown_host_is_said() -> None:
    client = HttpClient("api", "http://no-such-host.invalid/v1", {}, 2.0)
    with pytest.raises(BackendError, match=r"api: cannot connect to no-such-host\.invalid \(.*name"):
        await ask(client)


@pytest.mark.parametrize(("name", "value"), [("a\r\nb", "x"), ("a", "x\ny"), ("", "x"), ("a b", "x"), ("a", "x\0")])
def test_a_header_cannot_begin_another(name: str, value: str) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        header(name, value)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@settings(max_examples=40, deadline=None)
@given(body=st.binary(max_size=300), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8), data=st.data())
def test_an_answer_is_the_same_however_it_is_cut(
    loop: Callable[[], asyncio.AbstractEventLoop], body: bytes, sizes: list[int], data: st.DataObject
) -> None:
    chunks, at = [], 0
    while at < len(body):
        size = sizes[len(chunks) % len(sizes)]
        part = body[at : at + size]
        chunks.append(b"%x\r\n%b\r\n" % (len(part), part))
        at += size
    wire = CHUNKED + b"".join(chunks) + b"0\r\n\r\n"
    cuts = sorted(data.draw(st.lists(st.integers(1, len(wire) - 1), max_size=6)))
    segments = [wire[low:high] for low, high in zip([0, *cuts], [*cuts, len(wire)], strict=True) if low < high]

    async def run() -> None:
        async with serving(answering(*segments)) as client:
            assert await ask(client) == (200, body)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())
