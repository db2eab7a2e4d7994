"""Workers on other hosts: who may have one, what it does when its gateway is gone, and what strangers can do to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import trustme
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.base import BackendError
from backends.disagg import proof
from backends.disagg.backend import DisaggBackend
from backends.disagg.control import PREAMBLE, parse_address
from backends.disagg.handle import WorkerHandle
from backends.disagg.lives import RemoteLife
from backends.disagg.messages import TLSFiles
from backends.disagg.node import Node, NodeOptions
from backends.models import ModelFiles
from tests.cli.serving import up, worker
from tests.disagg.serving import LONG, all_blocks_free, ask, cluster_of, pid_of, started, until

SECRET = "a secret for this test's hosts"
QUESTION = "What is the capital of France?"


def real(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """A test that runs the model."""
    return pytest.mark.model(pytest.mark.slow(test))


@contextlib.asynccontextmanager
async def node(**options: Any) -> AsyncIterator[tuple[str, list[str]]]:
    """(its address, what it said)"""
    said: list[str] = []
    listener = socket.create_server(("127.0.0.1", 0))
    serving = Node(NodeOptions(**{"secret": SECRET, **options}), say=said.append)
    await serving.start(listener)
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}", said
    finally:
        await serving.aclose()


async def joined(address: str, **options: Any) -> DisaggBackend:
    """A gateway's cluster: prefill here, decode there."""
    remote = {"role": "decode", "address": address}
    return await started(**{"decode": 0, "workers": [remote], "secret": SECRET, "disaggregate": "always", **options})


@real
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_worker_elsewhere_decodes_what_is_prefilled_here(smollm2: ModelFiles, transport: str) -> None:
    async with node() as (address, _):
        backend = await joined(address, transport=transport)
        try:
            spoken = await ask(backend, LONG + QUESTION)
            assert spoken.transfer is not None
            assert (spoken.transfer.transport, spoken.transfer.decode) == ("tcp", "decode-0")
            (elsewhere,) = cluster_of(backend).decode
            assert psutil.Process(pid_of(elsewhere)).ppid() == os.getpid(), "this test is the node's process"
            alone = await started(mode="unified")
            try:
                assert (await ask(alone, LONG + QUESTION)).text == spoken.text
            finally:
                await alone.aclose()
            await all_blocks_free(backend)
        finally:
            await backend.aclose()


@real
async def test_prefill_elsewhere_and_workers_that_join_while_the_cluster_serves(smollm2: ModelFiles) -> None:
    async with node() as (first, _), node() as (second, _):
        remote = {"role": "prefill", "address": first}
        backend = await started(prefill=0, workers=[remote], secret=SECRET, disaggregate="always")
        try:
            spoken = await ask(backend, QUESTION)
            assert "Paris" in spoken.text and spoken.transfer is not None and spoken.transfer.prefill == "prefill-0"
            assert await backend.manage("add", role="decode", address=second) == {"added": "decode-1"}
            await backend.manage("drain", worker="decode-0")
            spoken = await ask(backend, QUESTION)
            assert "Paris" in spoken.text and spoken.transfer is not None and spoken.transfer.decode == "decode-1"
            with pytest.raises(BackendError, match="write HOST:PORT"):
                await backend.manage("add", role="decode", address="nowhere:at:all")
            await backend.manage("undrain", worker="decode-0")
            await backend.manage("remove", worker="decode-1")
            assert "Paris" in (await ask(backend, QUESTION)).text
            await all_blocks_free(backend)
        finally:
            await backend.aclose()


# --- whose worker it is -------------------------------------------------------------------------------


def policy(folder: Path, *addresses: str) -> str:
    """A gateway whose decode workers are at `addresses`, its prefill worker its own."""
    workers = "".join(f"      - {{role: decode, address: '{address}'}}\n" for address in addresses)
    path = folder / "policy.yaml"
    path.write_text(
        "version: 1\n"
        "providers:\n"
        "  own:\n"
        "    type: disagg\n"
        "    model: smollm2-135m\n"
        "    kv_tokens: 8192\n"
        "    disaggregate: always\n"
        "    prefill: 1\n"
        "    decode: 0\n"
        "    secret: ${SPLITROUTE_CLUSTER_SECRET}\n"
        f"    workers:\n{workers}"
        "targets:\n"
        "  one: {provider: own, model: smollm2-135m}\n"
        "routes:\n"
        "  chat: [{candidates: [one], choose: in-order}]\n"
    )
    return str(path)


def workers_of(url: str) -> dict[str, dict[str, Any]]:
    (own,) = httpx.get(f"{url}/cluster", timeout=30).json().values()
    return {one["name"]: one for one in own["workers"]}


def chat(url: str, content: str = QUESTION, max_tokens: int = 20) -> str:
    body = {"model": "chat", "messages": [{"role": "user", "content": content}], "max_tokens": max_tokens}
    answer = httpx.post(f"{url}/v1/chat/completions", json={**body, "temperature": 0}, timeout=120)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def wait_for(holds: Callable[[], bool], what: str) -> None:
    for _ in range(1200):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError(f"not within a minute: {what}")


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("when_alone", ["keep", "stop"])
def test_a_killed_gateways_worker_is_freed_and_adopted_by_the_next_or_stops(
    smollm2: ModelFiles, tmp_path: Path, when_alone: str
) -> None:
    """As configured; either way nothing of the dead gateway's requests goes on."""
    env = {**os.environ, "SPLITROUTE_CLUSTER_SECRET": SECRET}
    with worker("--port", "0", "--when-alone", when_alone, env=env) as away:
        with up("--policy", policy(tmp_path, away.url), env=env) as first:
            assert "Paris" in chat(first.url)
            (process,) = away.workers()
            body = {"model": "chat", "messages": [{"role": "user", "content": "Tell a story."}], "ignore_eos": True}
            with httpx.stream(
                "POST", f"{first.url}/v1/chat/completions", json={**body, "max_tokens": 900, "stream": True}
            ) as stream:
                lines = stream.iter_lines()  # which, once let go, would close the stream
                next(lines)
                assert workers_of(first.url)["decode-0"]["active"] == 1
                first.process.kill()
        wait_for(lambda: any("is gone" in line for line in away.output), "the node has noticed")
        if when_alone == "stop":
            wait_for(lambda: not away.workers(), "its worker has stopped")
        with up("--policy", policy(tmp_path, away.url), env=env) as second:
            assert ([one.pid for one in away.workers()] == [process.pid]) is (when_alone == "keep")
            adopted = workers_of(second.url)["decode-0"]
            assert adopted["active"] == 0 and adopted["free_blocks"] in (None, 8192 // 16), "nothing is left of it"
            assert (adopted["cached_blocks"] > 0) is (when_alone == "keep"), "its prefixes are known"
            assert "Paris" in chat(second.url)
        away.process.terminate()
        assert away.process.wait(20) == 0
    assert not psutil.pid_exists(process.pid)
    assert SECRET not in "".join(away.output)


@pytest.mark.model
@pytest.mark.slow
def test_a_killed_nodes_answers_go_on_elsewhere_and_it_is_taken_back_when_it_returns(
    smollm2: ModelFiles, tmp_path: Path
) -> None:
    env = {**os.environ, "SPLITROUTE_CLUSTER_SECRET": SECRET}
    with (
        worker("--port", "0", env=env) as away,
        worker("--port", "0", env=env) as other,
        up("--policy", policy(tmp_path, away.url, other.url), env=env) as gateway,
    ):
        undisturbed = chat(gateway.url, "Tell a story.", 200)
        body = {"model": "chat", "messages": [{"role": "user", "content": "Tell a story."}], "max_tokens": 200}
        text = ""
        with httpx.stream(
            "POST",
            f"{gateway.url}/v1/chat/completions",
            json={**body, "stream": True, "temperature": 0},
            timeout=120,
        ) as stream:
            killed = ""
            for line in stream.iter_lines():
                if not line.startswith("data: {"):
                    continue
                text += msgspec.json.decode(line[6:])["choices"][0]["delta"].get("content", "")
                if not killed and len(text) > 20:
                    states = workers_of(gateway.url)
                    killed = "decode-0" if states["decode-0"]["decoding"] else "decode-1"
                    (away if killed == "decode-0" else other).process.kill()
        assert text == undisturbed
        assert workers_of(gateway.url)[killed]["state"] == "down"
        assert "Paris" in chat(gateway.url), "the other one serves"
        address = away.url if killed == "decode-0" else other.url
        with worker("--port", address.rpartition(":")[2], env=env):
            wait_for(lambda: workers_of(gateway.url)[killed]["state"] == "up", "it serves again")
            assert "Paris" in chat(gateway.url)


@real
async def test_one_gateway_at_a_time(smollm2: ModelFiles) -> None:
    async with node() as (address, said):
        first = await joined(address)
        try:
            with pytest.raises(BackendError, match="another gateway's"):
                await joined(address)
            assert "Paris" in (await ask(first, QUESTION)).text
        finally:
            await first.aclose()
        await until(lambda: any("keeps its model" in line for line in said), "it is free")
        second = await joined(address)
        try:
            assert "Paris" in (await ask(second, QUESTION)).text
        finally:
            await second.aclose()


@real
async def test_a_hung_worker_is_replaced_when_the_next_gateway_asks(
    smollm2: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.disagg.node._RESET_S", 1.0)
    async with node() as (address, said):
        first = await joined(address)
        hung = pid_of(cluster_of(first).decode[0])
        os.kill(hung, signal.SIGSTOP)
        await first.aclose()
        await until(lambda: any("keeps its model" in line for line in said), "it is free")
        second = await joined(address)
        try:
            assert "Paris" in (await ask(second, QUESTION)).text
            assert pid_of(cluster_of(second).decode[0]) != hung
            assert not psutil.pid_exists(hung)
        finally:
            await second.aclose()


# --- what is refused ----------------------------------------------------------------------------------


@real
async def test_who_may_not_join_is_told_why(smollm2: ModelFiles, caplog: pytest.LogCaptureFixture) -> None:
    async with node() as (address, _):
        with pytest.raises(BackendError, match="does not know this cluster's secret"):
            await joined(address, secret="another secret than that")
        backend = await joined(address)
        try:
            (elsewhere,) = cluster_of(backend).decode
            config = msgspec.structs.replace(elsewhere.config, fingerprint="0123456789abcdef")
        finally:
            await backend.aclose()
        stranger = WorkerHandle(config, RemoteLife(address, SECRET), address)
        with pytest.raises(BackendError, match=r"is another model on this host: fingerprint .* 0123456789abcdef there"):
            await until_free(stranger)
    nobody = f"127.0.0.1:{unused_port()}"
    with pytest.raises(BackendError, match=r"cannot be had: .*refused") as refused:
        await joined(nobody)
    assert refused.value.hint is not None and "splitroute worker" in refused.value.hint
    assert SECRET not in caplog.text


async def until_free(handle: Any) -> None:
    """Spawn once the node has let its last gateway go."""
    for _ in range(100):
        try:
            await handle.spawn()
            return
        except BackendError as error:
            if "another gateway's" not in error.message:
                raise
            await asyncio.sleep(0.05)


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": [{"role": "decode", "address": "h:1"}]}, "set secret"),
        ({"workers": [{"role": "unified", "address": "h:1"}], "secret": SECRET}, "mode split has no unified workers"),
        ({"decode": 0}, "there would be no decode worker"),
        ({"prefill": 0}, "there would be no prefill worker"),
        ({"mode": "unified", "decode": 0}, "there would be no unified worker: set decode to 1"),
        ({"secret": "too short"}, "at least 16"),
        ({"workers": [{"role": "decode", "address": "a b"}], "secret": SECRET}, "address"),
        ({"transport": "nixl", "tls": {"ca": "a", "cert": "b", "key": "c"}}, "tls does not cover NIXL"),
    ],
)
async def test_a_cluster_that_cannot_be_is_refused_before_anything_starts(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        await started(**options)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("gpu-2", ("gpu-2", 7101)),
        ("gpu-2:80", ("gpu-2", 80)),
        ("[::1]:80", ("::1", 80)),
        ("[::1]", ("::1", 7101)),
        ("::1", ("::1", 7101)),
    ],
)
def test_addresses(text: str, parsed: tuple[str, int]) -> None:
    assert parse_address(text) == parsed


@pytest.mark.parametrize("text", ["", ":80", "h:", "h:0", "h:65536", "h:x", "[::1", "[::1]80", "a:b:c"])
def test_no_addresses(text: str) -> None:
    with pytest.raises(ValueError, match="is not an address"):
        parse_address(text)


# --- strangers ----------------------------------------------------------------------------------------


class Recorded:
    """What a coordinator that knows the secret said."""

    def __init__(self, address: str) -> None:
        self.address = address

    def talk(self, *, config: bytes) -> bytes:
        """Say all that a coordinator says, then `config`; what the node said after the proof."""
        with self.connection() as peer:
            mine = proof.nonce()
            self.said = PREAMBLE + mine
            peer.sendall(self.said)
            answered = b""
            while len(answered) < proof.ANSWER_BYTES:
                answered += peer.recv(proof.ANSWER_BYTES - len(answered))
            last = proof.connectors_proof(SECRET, "control", mine, answered) + config
            self.said += last
            peer.sendall(last)
            peer.shutdown(socket.SHUT_WR)
            return self.rest(peer)

    def connection(self) -> socket.socket:
        host, port = parse_address(self.address)
        return socket.create_connection((host, port), timeout=10)

    @staticmethod
    def rest(peer: socket.socket) -> bytes:
        heard = b""
        with contextlib.suppress(ConnectionError):
            while data := peer.recv(65536):
                heard += data
        return heard


async def test_a_stranger_gets_a_nonce_and_a_mac_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with node() as (address, said):
        recorded = Recorded(address)
        await asyncio.to_thread(recorded.talk, config=b"")

        def replay() -> bytes:
            with recorded.connection() as peer:
                peer.sendall(recorded.said)
                peer.shutdown(socket.SHUT_WR)
                return recorded.rest(peer)

        heard = await asyncio.to_thread(replay)
        assert len(heard) <= proof.ANSWER_BYTES, "a recorded conversation opens nothing"
        assert "does not know this cluster's secret" in caplog.text
        assert not said


def test_a_nodes_proof_is_no_proof_to_a_kv_listener_and_none_can_be_sent_back() -> None:
    theirs, mine = proof.nonce(), proof.nonce()
    answered = proof.answer(SECRET, "kv", theirs, mine)
    with pytest.raises(proof.NotProved):
        proof.connectors_proof(SECRET, "control", theirs, answered)
    with pytest.raises(proof.NotProved):
        proof.check_connector(SECRET, "kv", theirs, mine, answered[proof.NONCE_BYTES :])


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.one_of(
        st.binary(max_size=300),
        st.binary(max_size=200).map(lambda data: PREAMBLE + data),
        st.integers(0, len(PREAMBLE)).map(lambda cut: PREAMBLE[:cut]),
    ),
    st.one_of(st.binary(max_size=300), st.integers(0, 2**32 - 1).map(lambda n: n.to_bytes(4, "little"))),
)
async def test_whatever_is_sent_to_a_node_it_goes_on_and_lets_nobody_in(noise: bytes, config: bytes) -> None:
    """Strangers' bytes, and a proved coordinator's malformed configuration."""
    async with node() as (address, said):
        recorded = Recorded(address)

        def shout() -> bytes:
            with recorded.connection() as peer:
                with contextlib.suppress(ConnectionError):
                    peer.sendall(noise)
                    peer.shutdown(socket.SHUT_WR)
                return recorded.rest(peer)

        assert len(await asyncio.to_thread(shout)) <= proof.ANSWER_BYTES
        await asyncio.to_thread(lambda: recorded.talk(config=config))
        await asyncio.to_thread(lambda: recorded.talk(config=b""))  # it still answers who knows the secret
        assert not said, "no worker was started"


async def test_more_strangers_than_it_has_room_for_are_closed_and_leave_when_they_say_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("backends.disagg.control.HANDSHAKE_TIMEOUT_S", 0.5)
    async with node() as (address, _):
        recorded = Recorded(address)
        silent = [await asyncio.to_thread(recorded.connection) for _ in range(40)]
        await asyncio.sleep(1.5)
        await asyncio.to_thread(lambda: recorded.talk(config=b""))
        for peer in silent:
            assert await asyncio.to_thread(recorded.rest, peer) == b""
            peer.close()


# --- TLS ----------------------------------------------------------------------------------------------


def certificates(folder: Path, authority: trustme.CA) -> dict[str, str]:
    issued = authority.issue_cert("127.0.0.1")
    files = {name: str(folder / f"{secrets.token_hex(4)}-{name}.pem") for name in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(files["ca"])
    issued.cert_chain_pems[0].write_to_path(files["cert"])
    issued.private_key_pem.write_to_path(files["key"])
    return files


@real
async def test_tls_covers_control_and_kv_and_refuses_whom_it_does_not_trust(
    smollm2: ModelFiles, tmp_path: Path
) -> None:
    files = certificates(tmp_path, trustme.CA())
    others = certificates(tmp_path, trustme.CA())
    async with node(tls=TLSFiles(**files)) as (address, _):
        with pytest.raises(BackendError, match=r"certificate verify failed"):
            await joined(address, tls=others)
        with pytest.raises(BackendError, match=r"expects TLS"):
            await joined(address)
        backend = await joined(address, tls=files)
        try:
            spoken = await ask(backend, LONG + QUESTION)
            assert spoken.transfer is not None and spoken.transfer.transport == "tcp"
            (source,) = cluster_of(backend).prefill
            assert source.started is not None
            _, _, port = source.started.addresses[-1].rpartition(":")
            with socket.create_connection(("127.0.0.1", int(port)), timeout=10) as plain:
                plain.sendall(b"SRKV" + bytes(300))
                assert b"SRKV" not in Recorded.rest(plain), "nothing is said in clear"
            await all_blocks_free(backend)
        finally:
            await backend.aclose()
    async with node() as (address, _):
        with pytest.raises(BackendError, match="cannot be had"):
            await joined(address, tls=files)
