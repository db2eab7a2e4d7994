"""KV from one worker's cache to another's, over real sockets and shared memory."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest
import torch

from backends.disagg.engine.kv_cache import KVCache, KVGeometry
from backends.disagg.transfer import sockets
from backends.disagg.transfer.puller import Landed, Puller
from backends.disagg.transfer.server import KVServer
from backends.disagg.transfer.wire import Header, Hello, Kind, WireError

GEOMETRY = KVGeometry(layers=3, kv_heads=2, head_dim=8, block_size=16, dtype="bfloat16")
CPU = torch.device("cpu")


def hello(transport: str, pid: int, **changes: object) -> Hello:
    base = Hello("secret", pid, "ab", 3, 2, 8, 16, "bfloat16", 32, transport)
    return msgspec.structs.replace(base, **changes)


@dataclass
class Pair:
    """A prefill side and a decode side, and what each told its engine."""

    server: KVServer
    puller: Puller
    released: queue.SimpleQueue[int]
    events: queue.SimpleQueue[Landed | tuple[int, str]]

    @property
    def source(self) -> torch.Tensor:
        return self.server.cache.data

    @property
    def target(self) -> torch.Tensor:
        return self.puller.cache.data


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    transport = request.param
    released: queue.SimpleQueue[int] = queue.SimpleQueue()
    events: queue.SimpleQueue[Landed | tuple[int, str]] = queue.SimpleQueue()
    cache = KVCache(GEOMETRY, 32, CPU)
    cache.data.copy_(torch.randn(cache.data.shape))
    server = KVServer(cache, hello(transport, 1), transport, released.put)
    puller = Puller(
        KVCache(GEOMETRY, 32, CPU),
        hello(transport, 2),
        server.address,
        events.put,
        lambda request, reason: events.put((request, reason)),
    )
    yield Pair(server, puller, released, events)
    puller.close()
    server.close()


def test_blocks_cross_in_any_order_of_pool_indices_while_the_prompt_is_still_computed(pair: Pair) -> None:
    pair.server.offer(7, [5, 30, 2], 40)
    pair.puller.pull(7, [9, 1, 20])
    pair.server.progress(7, 1)
    pair.server.progress(7, 3)
    pair.server.done(7, first_token=123)
    landed = pair.events.get(timeout=5)
    assert isinstance(landed, Landed)
    assert (landed.request, landed.first_token, landed.prefill_pid) == (7, 123, 1)
    assert landed.bytes == 3 * GEOMETRY.block_bytes
    assert torch.equal(pair.target[[9, 1, 20]], pair.source[[5, 30, 2]])
    assert pair.released.get(timeout=5) == 7


def test_a_pull_may_come_before_the_prompt_is_known_to_the_prefill_side(pair: Pair) -> None:
    pair.puller.pull(8, [3])
    pair.server.offer(8, [4], 16)
    pair.server.progress(8, 1)
    pair.server.done(8, 1)
    assert isinstance(pair.events.get(timeout=5), Landed)


def test_a_request_whose_lease_ended_is_refused_never_garbage(pair: Pair) -> None:
    """vllm#21570: the decode side reads blocks whose lease ran out."""
    pair.server.offer(9, [1, 2], 32)
    pair.server.progress(9, 2)
    pair.server.done(9, 1)
    pair.server.withdraw(9)
    pair.puller.pull(9, [1, 2])
    request, reason = pair.events.get(timeout=5)  # type: ignore[misc]
    assert request == 9 and "no longer holds" in reason


def test_a_pull_cut_off_half_way_ends_once_and_the_connection_goes_on(pair: Pair) -> None:
    pair.server.offer(10, [1, 2], 32)
    pair.puller.pull(10, [1, 2])
    pair.server.progress(10, 1)
    assert pair.puller.cancel(10) is False, "its blocks may be written this moment"
    assert pair.released.get(timeout=5) == 10
    pair.server.withdraw(10)
    assert pair.events.get(timeout=5)[0] == 10  # type: ignore[index]
    assert pair.puller.cancel(10) is True
    test_a_pull_may_come_before_the_prompt_is_known_to_the_prefill_side(pair)


def test_cancelling_a_pull_that_was_never_offered_is_acknowledged(pair: Pair) -> None:
    pair.puller.pull(11, [1])
    time.sleep(0.05)
    assert pair.puller.cancel(11) is False
    assert pair.events.get(timeout=5)[0] == 11  # type: ignore[index]


def test_pulls_fail_when_the_prefill_side_goes(pair: Pair) -> None:
    pair.puller.pull(12, [1])
    pair.puller.close()
    assert pair.events.get(timeout=5)[0] == 12  # type: ignore[index]
    pair.puller.pull(13, [1])
    request, reason = pair.events.get(timeout=5)  # type: ignore[misc]
    assert request == 13 and "closed" in reason


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_another_models_worker_is_refused_at_the_handshake(transport: str) -> None:
    server = KVServer(KVCache(GEOMETRY, 32, CPU), hello(transport, 1), transport, print)
    other = hello(transport, 2, fingerprint="cd", dtype="float32")
    with pytest.raises(WireError, match="fingerprint 'ab' here, 'cd' there; dtype"):
        Puller(KVCache(GEOMETRY, 32, CPU), other, server.address, print, print)
    server.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_peer_without_the_clusters_token_gets_nothing(transport: str) -> None:
    server = KVServer(KVCache(GEOMETRY, 32, CPU), hello(transport, 1), transport, print)
    with pytest.raises(EOFError):
        Puller(KVCache(GEOMETRY, 32, CPU), hello(transport, 2, token="x"), server.address, print, print)
    server.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + b"x" * 64,
        Header(Kind.PULL, request=1).encode(),
        Header(Kind.HELLO, payload_bytes=1 << 40).encode(),
        Header(Kind.HELLO, payload_bytes=9).encode() + b"malformed",
        b"\0" * 200,
    ],
)
def test_a_stranger_is_dropped_and_harms_nobody(pair: Pair, garbage: bytes) -> None:
    stranger = sockets.connect(pair.server.address)
    stranger.sendall(garbage)
    stranger.settimeout(5)
    with contextlib.suppress(ConnectionResetError):
        assert stranger.recv(1) == b""
    stranger.close()
    test_blocks_cross_in_any_order_of_pool_indices_while_the_prompt_is_still_computed(pair)


def test_kv_damaged_on_the_wire_is_not_accepted() -> None:
    """One bit flips between the two sides: the checksum says so and the request fails."""
    server = KVServer(KVCache(GEOMETRY, 32, CPU), hello("tcp", 1), "tcp", print)
    front = socket.create_server(("127.0.0.1", 0))

    def relay() -> None:
        down, _ = front.accept()
        up = sockets.connect(server.address)
        up.settimeout(None)

        def back() -> None:
            while data := down.recv(65536):
                up.sendall(data)

        threading.Thread(target=back, daemon=True).start()
        passed = 0
        while data := bytearray(up.recv(65536)):
            if passed < 1000 <= passed + len(data):
                data[1000 - passed] ^= 1
            passed += len(data)
            down.sendall(data)

    threading.Thread(target=relay, daemon=True).start()
    events: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    puller = Puller(
        KVCache(GEOMETRY, 32, CPU),
        hello("tcp", 2),
        f"tcp:127.0.0.1:{front.getsockname()[1]}",
        print,
        lambda request, reason: events.put((request, reason)),
    )
    server.offer(1, [1, 2], 32)
    server.progress(1, 2)
    server.done(1, 1)
    puller.pull(1, [1, 2])
    request, reason = events.get(timeout=5)
    assert request == 1 and "checksum mismatch" in reason
    server.close()
    front.close()
