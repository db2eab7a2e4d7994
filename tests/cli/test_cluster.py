"""`splitroute cluster`: a running gateway's workers, seen and changed while it serves."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from collections.abc import Iterator

import httpx
import pytest
from starlette.types import ASGIApp

from backends.models import ModelFiles
from router.gateway.app import create_app
from router.sdk import Router
from tests.cli.serving import COMMAND, Running, up

POLICY = """\
version: 1
providers:
  own: {type: openai, base_url: "http://127.0.0.1:9/v1"}
targets:
  one: {provider: own, model: m}
routes:
  chat: [{candidates: [one], choose: in-order}]
"""


@pytest.fixture(scope="module")
def gateway(smollm2: ModelFiles) -> Iterator[Running]:
    with up() as running:
        yield running


def cluster(gateway: Running, *words: str) -> subprocess.CompletedProcess[str]:
    command = [COMMAND, "cluster", *words, "--url", gateway.url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def roles(gateway: Running) -> dict[str, str]:
    found = json.loads(cluster(gateway, "status", "--json").stdout)
    (own,) = found.values()
    return {worker["name"]: f"{worker['role']}, {worker['state']}" for worker in own["workers"]}


def say(gateway: Running, before: str = "") -> None:
    question = f"{before}What is the capital of France?"
    body = {"model": "chat", "messages": [{"role": "user", "content": question}]}
    answer = httpx.post(
        f"{gateway.url}/v1/chat/completions", json={**body, "max_tokens": 20, "temperature": 0}, timeout=60
    )
    assert "Paris" in answer.text


@pytest.mark.model
@pytest.mark.slow
def test_workers_are_added_drained_flipped_and_removed_while_the_gateway_serves(gateway: Running) -> None:
    assert roles(gateway) == {"prefill-0": "prefill, up", "decode-0": "decode, up"}
    shown = cluster(gateway, "status").stdout
    assert "prefill-0" in shown and "free blocks" in shown

    for words in (("drain", "decode-0"), ("flip", "decode-0"), ("remove", "prefill-0")):
        refused = cluster(gateway, *words)
        assert refused.returncode == 1
        assert re.search(r"would leave no (decode|prefill) worker.*splitroute cluster add --role", refused.stderr, re.S)
    assert cluster(gateway, "add", "--role", "decode").stdout == "decode-1 serves\n"
    assert cluster(gateway, "drain", "decode-0").returncode == 0
    assert roles(gateway)["decode-0"] == "decode, draining"
    say(gateway)
    assert cluster(gateway, "drain", "decode-0", "--undo").returncode == 0
    flipped = cluster(gateway, "flip", "decode-0")
    assert flipped.stdout == "decode-0 is a prefill worker from the next request on\n"
    say(gateway)
    assert cluster(gateway, "remove", "prefill-0").returncode == 0
    assert roles(gateway) == {"decode-0": "prefill, up", "decode-1": "decode, up"}
    say(gateway, before="The old mill stands by the river. " * 40)  # new, and too long to be computed beside answers
    assert len(gateway.workers()) == 2

    for _ in range(50):  # workers tell a few times a second
        metrics = httpx.get(f"{gateway.url}/metrics").text
        if found := re.search(r'splitroute_prefill_tokens_total\{provider="\w+",worker="decode-0"\} [1-9]', metrics):
            break
        time.sleep(0.1)
    assert found
    assert "splitroute_kv_transfer_seconds_bucket" in metrics


@pytest.mark.model
@pytest.mark.slow
def test_a_worker_removed_at_once_leaves_its_answers_to_others(gateway: Running) -> None:
    names = set(roles(gateway))
    assert cluster(gateway, "add", "--role", "decode").returncode == 0
    (added,) = set(roles(gateway)) - names
    body = {"model": "chat", "messages": [{"role": "user", "content": "Write a story."}], "temperature": 0}

    async def ask(client: httpx.AsyncClient) -> str:
        answer = await client.post("/v1/chat/completions", json={**body, "max_tokens": 150})
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text

    async def removed_meanwhile() -> tuple[str, list[str]]:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=100) as client:
            undisturbed = await ask(client)
            asking = [asyncio.create_task(ask(client)) for _ in range(4)]
            await asyncio.sleep(0.7)
            done = await asyncio.to_thread(cluster, gateway, "remove", added, "--now")
            assert done.returncode == 0, done.stderr
            return undisturbed, await asyncio.gather(*asking)

    undisturbed, texts = asyncio.run(removed_meanwhile())
    assert texts == [undisturbed] * 4
    assert added not in roles(gateway)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("drain", "decode-9"), "no worker 'decode-9' in this cluster; there are"),
        (("add", "--role", "unified"), "role 'unified' is none of this cluster's: decode, prefill"),
        (("flip", "decode-1", "--provider", "x"), "no provider 'x' with workers of its own; there are:"),
    ],
)
def test_a_wrong_change_says_what_there_is(gateway: Running, words: tuple[str, ...], said: str) -> None:
    done = cluster(gateway, *words)
    assert done.returncode == 1
    assert said in done.stderr


def test_where_no_gateway_answers_the_next_command_is_named() -> None:
    command = [COMMAND, "cluster", "status", "--url", "http://127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "no gateway answers at http://127.0.0.1:9" in done.stderr and "splitroute up" in done.stderr


def ask_as(app: ASGIApp, address: str, method: str, path: str, **body: object) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.request(method, path, **body)  # type: ignore[arg-type]

    return asyncio.run(ask())


def test_only_the_gateways_own_machine_may_see_or_change_the_cluster() -> None:
    app = create_app(Router.from_text(POLICY))
    for address in ("10.0.0.7", "2001:db8::1", ""):
        for method, path in (("GET", "/cluster"), ("POST", "/cluster/own")):
            refused = ask_as(app, address, method, path, json={} if method == "POST" else None)
            assert refused.status_code == 403, (address, method)
    assert ask_as(app, "127.0.0.1", "GET", "/cluster").json() == {}
    assert ask_as(app, "::1", "POST", "/cluster/own", json={}).status_code == 404
