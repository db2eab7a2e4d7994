"""Who may ask: keys made and revoked by command, shown by the real clients, checked on every request."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
import pytest_asyncio

from router import Router
from router.chaos import TEXT, FakeProvider
from router.keys import Doorkeeper, KeyFileError, create, read_keys, revoke
from tests.cli.serving import COMMAND
from tests.gateway.test_http import serving

POLICY = """
version: 1
providers:
  api: {{type: openai, base_url: {url!r}, api_key: sk-upstream}}
targets:
  one: {{provider: api, model: ok, price: {{input: 1, output: 2}}}}
  two: {{provider: api, model: "status:400", price: {{input: 1, output: 2}}}}
routes:
  chat:
    - {{when: {{key: search-team}}, candidates: [one], choose: in-order}}
    - {{candidates: [two], choose: in-order}}
  other: [{{candidates: [one], choose: in-order}}]
checks:
  - {{request: {{model: chat, prompt_tokens: 9, key: search-team}}, expect: {{target: one}}}}
"""
ASK = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def key(keys: Path) -> str:
    return create(keys, "search-team", ["chat"])[1]


@pytest_asyncio.fixture
async def url(key: str, keys: Path, provider: FakeProvider) -> AsyncIterator[str]:
    router = Router.from_text(POLICY.format(url=provider.url), env={})
    async with serving(router, Doorkeeper(keys)) as served:
        yield served


def chat(url: str, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


async def test_a_key_lets_in_whichever_header_the_client_shows_it_in(url: str, key: str) -> None:
    answer = await chat(url, key).chat.completions.create(model="chat", messages=ASK)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == TEXT, "its label chose the rule"
    messages = anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)
    said = await messages.messages.create(model="chat", max_tokens=9, messages=ASK)  # type: ignore[arg-type]
    assert said.content[0].text == TEXT  # type: ignore[union-attr]


async def test_without_a_valid_key_each_client_gets_its_own_error(url: str, key: str) -> None:
    wrong = key[:-1] + ("A" if key[-1] != "A" else "B")
    for shown in (wrong, "sk-1", "sr-00000000-" + "x" * 43):
        with pytest.raises(openai.AuthenticationError) as refused:
            await chat(url, shown).chat.completions.create(model="chat", messages=ASK)  # type: ignore[arg-type]
        assert refused.value.code == "invalid_api_key"
        assert shown not in str(refused.value), "a wrong key may be nearly right"
    async with httpx.AsyncClient(base_url=url) as client:
        for odd in (b"Bearer \xc3\xa9", b"Basic abc", b"Bearer", b""):
            assert (await client.get("/v1/models", headers=[(b"authorization", odd)])).status_code == 401, odd
    with pytest.raises(anthropic.AuthenticationError) as told:
        await anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0).messages.create(
            model="chat",
            max_tokens=9,
            messages=ASK,  # type: ignore[arg-type]
        )
    assert told.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


async def test_nothing_but_probes_is_answered_without_a_key(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as client:
        for path in ("/v1/models", "/v1/models/chat", "/nope"):
            refused = await client.get(path)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer"), path
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings"):
            assert (await client.post(path, json={"model": "other"})).status_code == 401, path
        for path in ("/health", "/metrics", "/cluster"):
            assert (await client.get(path)).status_code == 200, path


async def test_a_key_for_some_routes_sees_and_asks_no_others(url: str, key: str) -> None:
    client = chat(url, key)
    assert [model.id async for model in client.models.list()] == ["chat"]
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")
    with pytest.raises(openai.PermissionDeniedError, match="may not ask for model 'other'; it may for chat"):
        await client.chat.completions.create(model="other", messages=ASK)  # type: ignore[arg-type]
    messages = anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)
    with pytest.raises(anthropic.PermissionDeniedError):
        await messages.messages.count_tokens(model="other", messages=ASK)  # type: ignore[arg-type]


async def test_the_clients_key_stays_here(url: str, key: str, provider: FakeProvider) -> None:
    async with httpx.AsyncClient(base_url=url, headers={"x-api-key": key, "cookie": "session=1"}) as client:
        for path, more in (("/v1/chat/completions", {}), ("/v1/messages", {"max_tokens": 5})):
            answer = await client.post(path, json={"model": "chat", "messages": ASK, **more})
            assert answer.status_code == 200, answer.text
            sent = json.dumps(provider.requests[-1].headers)
            assert "sk-upstream" in sent and key not in sent and "session=1" not in sent


async def test_a_revoked_key_is_refused_by_a_gateway_that_serves(url: str, key: str, keys: Path) -> None:
    kept = create(keys, "kept")[1]
    revoke(keys, "search-team")
    async with httpx.AsyncClient(base_url=url) as client:

        async def status(shown: str) -> int:
            return (await client.get("/v1/models", headers={"authorization": f"Bearer {shown}"})).status_code

        for _ in range(200):
            if await status(key) == 401:
                break
            await asyncio.sleep(0.02)
        else:
            pytest.fail("still let in")
        assert await status(kept) == 200, "made while it served"
        keys.write_text("{")
        await asyncio.sleep(1.1)
        assert (await status(kept), await status(key)) == (200, 401), "a broken file changes nothing"


def test_the_file_has_hashes_and_is_its_owners(key: str, keys: Path) -> None:
    text = keys.read_text()
    assert key.rpartition("-")[2] not in text and key.split("-", 2)[2] not in text
    assert keys.stat().st_mode & 0o077 == 0


def test_keys_made_at_once_are_all_kept(keys: Path) -> None:
    threads = [threading.Thread(target=create, args=(keys, f"label-{n}")) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_keys(keys)) == 16
    assert [path.name for path in keys.parent.iterdir()] == ["keys.json"]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"keys": [{}]}', '{"keys": [1]}', '{"keys": [{"id": "x", "more": 1}]}', "\xff"]
)
def test_a_file_that_is_none_is_refused(keys: Path, text: str) -> None:
    keys.write_bytes(text.encode("latin-1"))
    with pytest.raises(KeyFileError, match=r"keys\.json"):
        Doorkeeper(keys)


def splitroute(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *map(str, words)], capture_output=True, text=True, timeout=60, check=False)


def test_the_command_makes_lists_and_revokes(keys: Path) -> None:
    made = splitroute("key", "create", "--keys", keys, "--label", "me", "--route", "chat")
    assert re.fullmatch(r"sr-[0-9a-f]{8}-\S{43}\n", made.stdout), "the key alone, for a script to take"
    shown = made.stdout.strip()
    assert Doorkeeper(keys).check({b"x-api-key": shown.encode()}).routes == ("chat",)
    listed = splitroute("key", "list", "--keys", keys).stdout
    assert "me" in listed and "chat" in listed and shown[12:] not in listed
    assert "has no key 'you'" in splitroute("key", "revoke", "--keys", keys, "you").stderr
    assert "revoked" in splitroute("key", "revoke", "--keys", keys, "me").stdout
    assert read_keys(keys) == {}


def test_other_machines_are_served_by_key_or_when_said_so(tmp_path: Path) -> None:
    bare = splitroute("up", "--host", "0.0.0.0")
    assert bare.returncode != 0 and "--keys FILE" in bare.stderr and "--open" in bare.stderr
    missing = splitroute("up", "--keys", tmp_path / "nope.json")
    assert missing.returncode != 0 and "splitroute key create" in missing.stderr
    assert "Traceback" not in bare.stderr + missing.stderr
