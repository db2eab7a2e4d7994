"""A stream that is cut in the middle: another target goes on where it stopped, or nothing was shown yet."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router import Router, RouterError
from router.chaos import TEXT, WORDS, FakeProvider
from router.incoming import read

RULE = "{candidates: [t0, t1], choose: in-order}"


def router_of(
    provider: FakeProvider, first: str, after: str, kind: str = "openai", how: str = "continues: vllm"
) -> Router:
    options = f", {how}" if kind == "openai" and how else ""
    return Router.from_text(
        f"""
version: 1
providers: {{fake: {{type: {kind}, base_url: "{provider.url}", api_key: k{options}}}}}
targets:
  t0: {{provider: fake, model: '{first}', price: {{input: 1, output: 2}}}}
  t1: {{provider: fake, model: ok, price: {{input: 1, output: 2}}}}
routes: {{chat: [{RULE}]}}
resilience: {{after_commit: {after}, idle_timeout_ms: 200, retries: 2}}
""",
        filename="p.yaml",
        env={},
    )


async def streamed(router: Router, surface: Any, **more: Any) -> tuple[str, list[dict[str, Any]], Any]:
    body = {"model": "chat", "stream": True, "max_tokens": 50, "stream_options": {"include_usage": True}, **more}
    if surface == "completions":
        body["prompt"] = "hi"
    else:
        body["messages"] = [{"role": "user", "content": "hi"}]
    answer = await router.open(read(surface, body, request_id="r"))
    data = b""
    try:
        async for piece in answer:
            data += piece.data
    finally:
        await answer.aclose()
    events = [json.loads(line[5:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
    text = ""
    for event in events:
        choice = (event.get("choices") or [{}])[0]
        delta = event.get("delta") or choice.get("delta") or {}
        text += choice.get("text") or delta.get("content") or delta.get("text") or ""
    return text, events, answer


@pytest.mark.parametrize("first", ["cut:3", "token-then-silence", "error-event:3", "malformed:3", "ends-tidily:3"])
@pytest.mark.parametrize(
    ("surface", "kind"), [("chat.completions", "openai"), ("completions", "openai"), ("messages", "anthropic")]
)
async def test_another_target_goes_on_where_the_first_stopped(
    provider: FakeProvider, first: str, surface: str, kind: str
) -> None:
    async with router_of(provider, first, "continue", kind) as router:
        text, events, answer = await streamed(router, surface)
        shown = "".join(WORDS[: 1 if first == "token-then-silence" else 3])
        assert text == shown + TEXT, "the fake says all of its words again; a model would go on"
        assert [attempt.kind for attempt in answer.attempts] == ["first", "continue"]
        record = next(iter(router.ledger))
        assert (record.status, record.target) == (200, "t1")
    asked = provider.requests[-1].body
    words = len(shown.split())
    assert asked["max_tokens"] == 50 - words
    if surface == "completions":
        assert asked["prompt"] == "hi" + shown
    else:
        assert asked["messages"][-1] == {"role": "assistant", "content": shown}
        assert ("continue_final_message" in asked) == (kind == "openai")
    if kind == "openai":
        assert len({event["id"] for event in events}) == 1
        assert sum("role" in (event.get("choices") or [{}])[0].get("delta", {}) for event in events) <= 1
        assert events[-1]["usage"]["completion_tokens"] == len(WORDS) + words
    else:
        kinds = [event["type"] for event in events]
        assert kinds.count("message_start") == kinds.count("message_stop") == kinds.count("content_block_start") == 1


@pytest.mark.parametrize(
    ("first", "how", "more"),
    [("cut:3", "", {}), ("cut:3", "continues: vllm", {"max_tokens": 3}), ("calls-cut", "continues: vllm", {})],
    ids=["nobody said how", "its limit is reached", "no plain text"],
)
async def test_where_nobody_can_go_on_the_stream_ends_in_an_error(
    provider: FakeProvider, first: str, how: str, more: dict[str, Any]
) -> None:
    """Portkey#1797, litellm#19077"""
    async with router_of(provider, first, "continue", how=how) as router:
        with pytest.raises(RouterError):
            await streamed(router, "chat.completions", **more)
    assert len(provider.requests) == 1


@pytest.mark.parametrize("first", ["cut:3", "token-then-silence", "error-event:3"])
async def test_what_may_start_again_is_shown_whole_or_not_at_all(provider: FakeProvider, first: str) -> None:
    async with router_of(provider, first, "restart") as router:
        text, _, answer = await streamed(router, "chat.completions")
        assert text == TEXT and answer.target == "t1"
        assert [attempt.kind for attempt in answer.attempts] == ["first", "fallback"]
