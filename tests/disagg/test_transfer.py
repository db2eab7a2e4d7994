"""KV from one worker's cache to another's, over real sockets and shared memory."""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.disagg.engine.kv_cache import KVCache, KVGeometry
from backends.disagg.transfer import auth, sockets
from backends.disagg.transfer.nixl import Nixl
from backends.disagg.transfer.puller import Landed, Puller
from backends.disagg.transfer.server import KVServer
from backends.disagg.transfer.wire import Header, Hello, Kind
from tests.disagg.serving import needs_nixl

GEOMETRY = KVGeometry(layers=3, kv_heads=2, head_dim=8, block_size=16, dtype="bfloat16")
CPU = torch.device("cpu")
SECRET = "the secret of this cluster"

Event = Landed | tuple[int, str]


def hello(**changes: object) -> Hello:
    base = Hello("life-1", sockets.host_name(), 1, "ab", 3, 2, 8, 16, "bfloat16", 32, [0])
    return msgspec.structs.replace(base, **changes)


def serve(transport: str, heard: Callable[[list[int]], None] = print) -> KVServer:
    cache = KVCache(GEOMETRY, 32, CPU)
    cache.data.copy_(torch.randn(cache.data.shape))
    mine, agent = hello(), None
    if transport == "nixl":
        mine, agent = with_nixl(mine, cache)
    return KVServer(cache, mine, SECRET, [sockets.listen(transport)], heard, nixl=agent)


def with_nixl(mine: Hello, cache: KVCache) -> tuple[Hello, Nixl]:
    agent = Nixl(f"{mine.incarnation}-{secrets.token_hex(4)}", cache)
    return msgspec.structs.replace(mine, nixl=agent.metadata, base=agent.base), agent


@dataclass
class Side:
    """A decode side, and what it told its engine."""

    address: str
    mine: Hello = field(default_factory=lambda: hello(pid=2, incarnation="life-2"))
    secret: str = SECRET
    incarnation: str = "life-1"
    events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)
    nixl: bool = False

    def __post_init__(self) -> None:
        cache, mine, agent = KVCache(GEOMETRY, 32, CPU), self.mine, None
        if self.nixl:
            mine, agent = with_nixl(mine, cache)
        self.puller = Puller(
            cache,
            mine,
            self.secret,
            self.address,
            self.incarnation,
            self.events.put,
            lambda pull, reason: self.events.put((pull, reason)),
            agent,
        )

    def event(self) -> Event:
        return self.events.get(timeout=5)

    def landed(self) -> Landed:
        event = self.event()
        assert isinstance(event, Landed), event
        return event

    def failed(self) -> tuple[int, str]:
        event = self.event()
        assert not isinstance(event, Landed)
        return event

    @property
    def data(self) -> torch.Tensor:
        return self.puller.cache.data


@dataclass
class Pair:
    server: KVServer
    side: Side
    heard: queue.SimpleQueue[list[int]]

    @property
    def transport(self) -> str:
        if self.side.nixl:
            return "nixl"
        return "shm" if self.server.addresses[0].startswith("unix:") else "tcp"

    @property
    def puller(self) -> Puller:
        return self.side.puller

    @property
    def source(self) -> torch.Tensor:
        return self.server.cache.data

    def offer_whole(self, request: int, blocks: list[int], first_token: int = 1) -> None:
        self.server.offer(request, blocks, len(blocks) * 16)
        self.server.progress(request, len(blocks))
        self.server.done(request, first_token)


@pytest.fixture(params=["shm", "tcp", pytest.param("nixl", marks=needs_nixl)])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    heard: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    server = serve(request.param, heard.put)
    side = Side(server.addresses[0], nixl=request.param == "nixl")
    yield Pair(server, side, heard)
    side.puller.close()
    server.close()


def test_blocks_cross_in_any_order_of_pool_indices_while_the_prompt_is_still_computed(pair: Pair) -> None:
    pair.server.offer(7, [5, 30, 2], 40)
    pair.puller.pull(70, 7, [9, 1, 20])
    pair.server.progress(7, 1)
    pair.server.progress(7, 3)
    pair.server.done(7, first_token=123)
    landed = pair.side.landed()
    assert (landed.pull, landed.first_token, landed.exact) == (70, 123, True)
    assert landed.bytes == 3 * GEOMETRY.block_bytes
    assert landed.transport == pair.transport
    assert torch.equal(pair.side.data[[9, 1, 20]], pair.source[[5, 30, 2]])
    assert pair.side.data[0].count_nonzero() == 0, "no other block was touched"


def test_a_pull_may_come_before_the_prompt_is_known_to_the_prefill_side(pair: Pair) -> None:
    pair.puller.pull(80, 8, [3])
    time.sleep(0.05)
    pair.offer_whole(8, [4], first_token=5)
    assert pair.side.landed().first_token == 5
    assert torch.equal(pair.side.data[3], pair.source[4])


def test_only_the_blocks_that_are_missing_are_sent(pair: Pair) -> None:
    pair.offer_whole(14, [4, 5, 6])
    pair.puller.pull(140, 14, [1, 2, 3], first_block=2)
    assert pair.side.landed().bytes == GEOMETRY.block_bytes
    assert torch.equal(pair.side.data[3], pair.source[6])
    assert pair.side.data[[1, 2]].count_nonzero() == 0
    pair.puller.pull(141, 14, [1, 2, 3], first_block=3)
    assert pair.side.landed().bytes == 0


def test_what_has_landed_may_be_pulled_again_by_others(pair: Pair) -> None:
    """A decode worker dies: another takes the same KV, which is kept until the request is over."""
    pair.offer_whole(15, [4, 5])
    pair.puller.pull(150, 15, [1, 2])
    pair.side.landed()
    pair.puller.close()
    other = Side(pair.server.addresses[0])
    other.puller.pull(1, 15, [7, 8])
    assert other.landed().first_token == 1
    assert torch.equal(other.data[[7, 8]], pair.source[[4, 5]])
    other.puller.close()


def test_what_was_spilled_to_host_memory_is_served_from_there(pair: Pair) -> None:
    pair.offer_whole(16, [4, 5])
    before = pair.source[[4, 5]].clone()
    assert pair.server.spill(16, [4, 5]) is not None
    pair.source[[4, 5]] = 0.0  # the blocks are somebody else's now
    pair.puller.pull(160, 16, [1, 2])
    pair.side.landed()
    assert torch.equal(pair.side.data[[1, 2]], before)


def test_blocks_that_are_being_read_are_not_spilled() -> None:
    server = serve("shm")
    slow = sockets.connect(server.addresses[0])
    auth.prove_to_listener(slow, SECRET, time.monotonic() + 5)
    sockets.send_control(slow, Kind.HELLO, msgspec.msgpack.encode(hello()))
    sockets.receive_control(slow, Kind.HELLO)
    server.offer(1, [4], 16)
    sockets.send(slow, Header(Kind.PULL, request=9, payload_bytes=8), [(1).to_bytes(8, "little")])
    server.progress(1, 1)
    server.done(1, 1)
    time.sleep(0.1)
    assert server.spill(1, [4]) is None, "its blocks are being read"
    slow.close()
    deadline = time.monotonic() + 5
    while server.spill(1, [4]) is None:
        assert time.monotonic() < deadline, "a reader that has gone reads no more"
        time.sleep(0.01)
    server.close()


def test_kv_whose_lease_ended_is_refused_never_garbage(pair: Pair) -> None:
    """vllm#21570"""
    pair.offer_whole(9, [1, 2])
    pair.server.withdraw(9)
    pair.puller.pull(90, 9, [1, 2])
    pull, reason = pair.side.failed()
    assert pull == 90 and "no longer holds" in reason


def test_one_of_several_fails_and_the_others_land(pair: Pair) -> None:
    """vllm#50754, vllm#56104: no hang, and nothing freed that is still read."""
    for request in (1, 2, 3):
        pair.server.offer(request, [request], 16)
        pair.puller.pull(request * 10, request, [request + 10])
    pair.server.withdraw(2)
    for request in (1, 3):
        pair.server.progress(request, 1)
        pair.server.done(request, request)
    events = [pair.side.event() for _ in range(3)]
    assert {event.pull for event in events if isinstance(event, Landed)} == {10, 30}
    assert [event[0] for event in events if not isinstance(event, Landed)] == [20]
    assert torch.equal(pair.side.data[[11, 13]], pair.source[[1, 3]])


def test_a_cancelled_pull_writes_nothing_more_and_the_connection_goes_on(pair: Pair) -> None:
    pair.server.offer(10, [1, 2], 32)
    pair.puller.pull(100, 10, [1, 2])
    pair.server.progress(10, 1)
    pair.puller.cancel(100)
    before = pair.side.data.clone()
    pair.server.progress(10, 2)
    pair.server.done(10, 1)
    test_a_pull_may_come_before_the_prompt_is_known_to_the_prefill_side(pair)
    before[3] = pair.source[4]
    assert torch.equal(pair.side.data, before)
    assert pair.side.events.empty(), "nothing is told of what was cancelled"


def test_a_decode_side_frees_its_blocks_though_the_prefill_side_says_nothing() -> None:
    """vllm#46283: the peer accepts, and is silent for ever; a pull and its end wait for nobody."""
    silent = socket.create_server(("127.0.0.1", 0))
    side = Side(f"tcp:127.0.0.1:{silent.getsockname()[1]}")
    begun = time.monotonic()
    side.puller.pull(1, 1, [1, 2])
    side.puller.cancel(1)
    side.puller.heartbeat([1])
    assert time.monotonic() - begun < 1
    side.puller.close()
    silent.close()


def test_heartbeats_name_what_must_be_kept(pair: Pair) -> None:
    pair.puller.heartbeat([3, 1 << 63])
    assert pair.heard.get(timeout=5) == [3, 1 << 63]


def test_pulls_fail_when_the_prefill_side_goes(pair: Pair) -> None:
    test_a_pull_may_come_before_the_prompt_is_known_to_the_prefill_side(pair)
    pair.puller.pull(12, 12, [1])
    pair.server.close()
    assert pair.side.failed()[0] == 12
    pair.puller.pull(13, 13, [1])
    pull, reason = pair.side.failed()
    assert pull == 13 and "went away" in reason


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mine": hello(pid=2, fingerprint="cd", dtype="float32")}, "fingerprint .* dtype"),
        ({"mine": hello(pid=2, block_size=32)}, "process . and process . cannot share KV: block_size"),
        ({"secret": "another secret altogether"}, "does not know this cluster's secret"),
        ({"incarnation": "life-0"}, "started again"),
    ],
    ids=["another model", "other blocks", "another cluster", "an earlier life"],
)
def test_who_does_not_belong_is_refused_and_told_why(transport: str, changes: dict[str, object], said: str) -> None:
    server = serve(transport)
    side = Side(server.addresses[0], **changes)  # type: ignore[arg-type]
    side.puller.pull(1, 1, [1])
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(side.failed()[1])
    server.close()


def test_an_address_where_nobody_listens_fails_the_pull() -> None:
    side = Side("unix:@splitroute-nobody")
    side.puller.pull(1, 1, [1])
    assert "failed" in side.failed()[1]


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + b"x" * 64,
        Header(Kind.PULL, request=1).encode(),
        Header(Kind.HELLO, payload_bytes=1 << 40).encode(),
        Header(Kind.CHALLENGE, payload_bytes=9).encode() + b"malformed",
        Header(Kind.CHALLENGE, payload_bytes=1 << 16).encode(),
        b"\0" * 200,
    ],
)
def test_a_stranger_is_dropped_and_harms_nobody(pair: Pair, garbage: bytes) -> None:
    assert talk(pair.server.addresses[0], garbage) == b""
    test_blocks_cross_in_any_order_of_pool_indices_while_the_prompt_is_still_computed(pair)


def talk(address: str, said: bytes) -> bytes:
    """What the listener answers a stranger before it hangs up."""
    stranger = sockets.connect(address)
    stranger.settimeout(5)
    answer = b""
    with stranger:
        try:
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            while data := stranger.recv(4096):
                answer += data
        except TimeoutError:
            pytest.fail("it was left waiting")
        except OSError:
            pass  # it hung up before all was said
    return answer


@given(
    said=st.one_of(
        st.binary(max_size=300),
        st.builds(
            lambda kind, request, payload, announced: (
                Header(kind, request=request, payload_bytes=announced or len(payload)).encode() + payload
            ),
            st.sampled_from(Kind),
            st.integers(0, 9),
            st.binary(max_size=300),
            st.one_of(st.none(), st.integers(0, 1 << 63)),
        ),
    )
)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_stranger_says_it_learns_nothing_of_use(pair: Pair, said: bytes) -> None:
    """No KV, no Hello: at most a nonce and a MAC over both nonces, which open nothing."""
    assert len(talk(pair.server.addresses[0], said)) <= 64 + 64


def test_a_recorded_conversation_opens_nothing() -> None:
    """Replay: what a rightful peer said once is said again, byte for byte."""
    server = serve("tcp")
    said = bytearray()
    front = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=relay, args=(front, server.addresses[0], said.extend, lambda data: data)).start()
    side = Side(f"tcp:127.0.0.1:{front.getsockname()[1]}")
    server.offer(1, [1], 16)
    server.progress(1, 1)
    server.done(1, 1)
    side.puller.pull(1, 1, [1])
    side.landed()
    side.puller.close()
    assert len(said) > 200
    assert len(talk(server.addresses[0], bytes(said))) == 64 + 64
    server.close()
    front.close()


def test_a_listener_without_the_secret_learns_none() -> None:
    """Mutual: the decode side proves nothing to a prefill side that has not proved itself."""
    impostor = socket.create_server(("127.0.0.1", 0))
    Side(f"tcp:127.0.0.1:{impostor.getsockname()[1]}")
    connection, _ = impostor.accept()
    sockets.receive_control(connection, Kind.CHALLENGE)
    sockets.send_control(connection, Kind.PROOF, b"x" * 64)
    connection.settimeout(5)
    assert connection.recv(1) == b""
    impostor.close()


def test_strangers_who_say_nothing_do_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "HANDSHAKE_TIMEOUT_S", 0.3)
    server = serve("tcp")
    strangers = [sockets.connect(server.addresses[0]) for _ in range(40)]
    for _ in range(20):  # one that trickles gets no more time than one that is silent
        with contextlib.suppress(OSError):
            strangers[0].sendall(b"S")
        time.sleep(0.05)
    side = Side(server.addresses[0])
    side.puller.pull(1, 1, [1])
    server.offer(1, [1], 16)
    server.progress(1, 1)
    server.done(1, 1)
    side.landed()
    for stranger in strangers:
        stranger.close()
    server.close()


def relay(
    front: socket.socket, address: str, heard: Callable[[bytes], None], change: Callable[[bytearray], bytes]
) -> None:
    """Stand between one decode side and `address`: listen to it, and change what it is told."""
    down, _ = front.accept()
    up = sockets.connect(address)
    up.settimeout(None)

    def back() -> None:
        with contextlib.suppress(OSError):
            while data := down.recv(65536):
                heard(data)
                up.sendall(data)
        sockets.shut(up)

    threading.Thread(target=back, daemon=True).start()
    with contextlib.suppress(OSError):
        while data := bytearray(up.recv(65536)):
            down.sendall(change(data))


def test_kv_damaged_on_the_wire_is_not_accepted() -> None:
    """One bit flips between the two sides: the checksum says so and the request fails."""
    server = serve("tcp")
    front = socket.create_server(("127.0.0.1", 0))
    passed = 0

    def flip(data: bytearray) -> bytes:
        nonlocal passed
        if passed < 2000 <= passed + len(data):
            data[2000 - passed] ^= 1
        passed += len(data)
        return data

    threading.Thread(target=relay, args=(front, server.addresses[0], len, flip), daemon=True).start()
    side = Side(f"tcp:127.0.0.1:{front.getsockname()[1]}")
    server.offer(1, [1, 2], 32)
    server.progress(1, 2)
    server.done(1, 1)
    side.puller.pull(1, 1, [1, 2])
    pull, reason = side.failed()
    assert pull == 1 and "checksum mismatch" in reason
    server.close()
    front.close()
