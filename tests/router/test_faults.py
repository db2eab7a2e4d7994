"""Whatever a provider does: the whole answer, or a clear error in time; never a part of one that looks whole.

Every fault of `splitroute chaos` that an answer can have, streamed or not, with a target to fall back to or without,
asked of the SDK or of a gateway, in OpenAI's words or in Anthropic's. What is expected of each stands in one table.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from router import Router, RouterError
from router.chaos import TEXT, WORDS, FakeProvider, model_for_words
from router.incoming import read
from tests.gateway.test_http import serving

DEADLINE_S = 1.5
GRACE_S = 0.5


@dataclass(frozen=True)
class Expect:
    """`status` is what the client gets where nobody stands in; None for an answer. `tries` are those at the target."""

    status: int | None = None
    tries: int = 1
    after_content: bool = False
    """Whether part of the answer was shown before: then nobody can stand in."""
    final: bool = False
    """Whether nobody else is asked, because everybody would say the same."""
    text: str = TEXT


ANSWERED = Expect()
MENDED = Expect(tries=2)
RETRIED = 2
"""One attempt and one retry at the same target."""
STREAMED = {
    "ok": ANSWERED,
    "once:429": MENDED,
    "once:500": MENDED,
    "status:429": Expect(429),  # said to come back long after the deadline
    "bare:429": Expect(429, RETRIED),
    "bare:500": Expect(500, RETRIED),
    "bare:503": Expect(503, RETRIED),
    "bare:400": Expect(400, final=True),
    "bare:401": Expect(502),
    "bare:404": Expect(404),
    model_for_words("prompt is too long: 10 tokens > 5 maximum"): Expect(400),
    "reset": Expect(502, RETRIED),
    "never-answers": Expect(504, RETRIED),
    "slow-first:60000": Expect(504, RETRIED),
    "role-then-silence": Expect(504, RETRIED),
    "comments-forever": Expect(504, RETRIED),
    "cut:0": Expect(502, RETRIED),
    "cut:3": Expect(502, after_content=True),
    "ends-tidily:0": Expect(502, RETRIED),
    "ends-tidily:3": Expect(502, after_content=True),
    "token-then-silence": Expect(504, after_content=True),
    "token-then-comments": Expect(504, after_content=True),
    "malformed:0": Expect(502, RETRIED),
    "malformed:3": Expect(502, after_content=True),
    "error-event:0": Expect(503, RETRIED),
    "error-event:3": Expect(503, after_content=True),
    "error-body": Expect(503, RETRIED),
    "html": Expect(502, RETRIED),
    "redirects": Expect(502, RETRIED),
    "empty": Expect(502, RETRIED),
    "bad-gzip": Expect(502, RETRIED),
    "flapping:0.05": MENDED,
    "paced:10": ANSWERED,
    "bytes": ANSWERED,
    "old": ANSWERED,
    "filtered": Expect(text=WORDS[0]),
    "huge:200": Expect(text="x" * (200 << 10)),
    "doubled": Expect(text="".join(word * 2 for word in WORDS)),
}
WHOLE = {
    name: expected
    for name, expected in STREAMED.items()
    if name.partition(":")[0]
    in (
        "ok",
        "once",
        "status",
        "bare",
        "says",
        "reset",
        "error-body",
        "html",
        "redirects",
        "empty",
        "bad-gzip",
        "flapping",
    )
} | {
    "never-answers": Expect(504, RETRIED),
    "malformed": Expect(502, RETRIED),
    "half-a-body": Expect(502, RETRIED),
}
ROWS = [(name, True, one) for name, one in STREAMED.items()] + [(name, False, one) for name, one in WHOLE.items()]


def policy(provider: FakeProvider, dialect: str, *models: str) -> str:
    targets = "\n".join(
        f"  t{index}: {{provider: fake, model: {json.dumps(model)}}}" for index, model in enumerate(models)
    )
    return f"""
version: 1
providers: {{fake: {{type: {dialect}, base_url: "{provider.url}", api_key: k}}}}
targets:
{targets}
routes: {{chat: [{{candidates: [{", ".join(f"t{index}" for index in range(len(models)))}], choose: in-order}}]}}
resilience:
  {{retries: {2 if len(models) > 1 else 1}, ttft_timeout_ms: 200, attempt_timeout_ms: 400,
    idle_timeout_ms: 200, deadline_ms: {DEADLINE_S * 1000:.0f}, breaker: {{open_ms: 50}}}}
"""


def body(dialect: str, stream: bool) -> dict[str, Any]:
    return {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "stream": stream, "max_tokens": 50}


def surface(dialect: str) -> Any:
    return "messages" if dialect == "anthropic" else "chat.completions"


@dataclass
class Got:
    text: str
    status: int | None = None
    complete: bool = True
    retry_after: bool = False


def text_of(dialect: str, data: bytes, stream: bool) -> tuple[str, bool, int | None]:
    """The text, whether the answer claims to be whole, and the status of an error in it."""
    if not stream:
        said = json.loads(data)
        if dialect == "anthropic":
            return "".join(block["text"] for block in said["content"]), True, None
        return said["choices"][0]["message"]["content"], True, None
    text, whole, failed = "", False, None
    for line in data.replace(b"\r\n", b"\n").split(b"\n"):
        if not line.startswith(b"data:"):
            continue
        if line[5:].strip() == b"[DONE]":
            whole = True
            continue
        event = json.loads(line[5:])
        if event.get("error"):
            failed = 500
        elif dialect == "anthropic":
            text += (event.get("delta") or {}).get("text") or ""
            whole = whole or event["type"] == "message_stop"
        else:
            text += ((event["choices"] or [{}])[0].get("delta") or {}).get("content") or ""
    return text, whole, failed


async def by_sdk(router: Router, dialect: str, stream: bool) -> Got:
    data = b""
    try:
        answer = await router.open(read(surface(dialect), body(dialect, stream), request_id="r"))
        try:
            async for piece in answer:
                data += piece.data
        finally:
            await answer.aclose()
    except RouterError as error:
        seen = text_of(dialect, data, stream)[0] if data else ""
        return Got(seen, error.status, False, error.retry_after_s is not None)
    text, whole, _ = text_of(dialect, data, stream)
    return Got(text, None, whole)


async def by_gateway(router: Router, dialect: str, stream: bool) -> Got:
    path = "/v1/messages" if dialect == "anthropic" else "/v1/chat/completions"
    async with serving(router) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
        response = await client.post(path, json=body(dialect, stream))
        if response.status_code != 200:
            said = response.json()
            assert said["error"]["message"] and ("type" in said) == (dialect == "anthropic"), "the dialect's own shape"
            return Got("", response.status_code, False, "retry-after" in response.headers)
        text, whole, failed = text_of(dialect, response.content, stream)
        return Got(text, failed, whole and failed is None)


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
@pytest.mark.parametrize("ask", [by_sdk, by_gateway], ids=["sdk", "gateway"])
@pytest.mark.parametrize("fallback", [False, True], ids=["alone", "fallback"])
@pytest.mark.parametrize(
    ("model", "stream", "expected"), ROWS, ids=[f"{n}-{'stream' if s else 'whole'}" for n, s, _ in ROWS]
)
async def test_a_fault_has_the_outcome_of_the_table(
    provider: FakeProvider, model: str, stream: bool, expected: Expect, fallback: bool, ask: Any, dialect: str
) -> None:
    provider.retry_after = ["0.02"] if model == "once:429" else ["60"]
    router = Router.from_text(
        policy(provider, dialect, model, *(["ok"] if fallback else [])), filename="p.yaml", env={}
    )
    async with router:
        # The bound on time is the deadline, whatever happens; what is slower hangs.
        async with asyncio.timeout(DEADLINE_S + GRACE_S + 1.0):
            got = await ask(router, dialect, stream)
        record = next(iter(router.ledger))
        state = {name: known.inflight for name, known in router._executor.state.items()}
    tries = len(provider.asked(model))
    assert not any(state.values()), "nothing is left under way"
    assert record.total_s <= DEADLINE_S + GRACE_S
    if expected.after_content:
        assert not got.complete and got.text and got.text == TEXT[: len(got.text)] and got.text != TEXT
        assert got.status == (expected.status if ask is by_sdk else 500) and tries == 1
        assert record.status == expected.status and record.attempts[-1].error
    elif expected.status is None:
        assert (got.text, got.status, got.complete) == (
            TEXT if fallback and expected.tries > 1 else expected.text,
            None,
            True,
        )
        assert tries == (1 if fallback else expected.tries)
    elif fallback and not expected.final:
        assert (got.text, got.status, got.complete) == (TEXT, None, True)
        assert [attempt.target for attempt in record.attempts] == ["t0", "t1"] and record.attempts[0].error
        assert [attempt.kind for attempt in record.attempts] == ["first", "fallback"]
    else:
        assert got.status == expected.status and not got.text and not got.complete
        assert tries == expected.tries and len(record.attempts) == tries
        assert all(attempt.error for attempt in record.attempts)
        if got.status == 429:
            assert got.retry_after
