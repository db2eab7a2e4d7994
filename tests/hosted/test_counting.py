"""A hosted model's prompts are counted exactly where its vocabulary is on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.base import BackendError
from backends.hosted.counting import TokenizerMissing, count_body, text_counter
from backends.hosted.openai import OpenAIBackend
from backends.options import OpenAIOptions
from router import Router
from router.chaos import FakeProvider


@pytest.mark.parametrize(
    ("encoding", "text", "tokens"),
    [
        # Counted in OpenAI's cookbook.
        ("cl100k_base", "tiktoken is great!", 6),
        ("o200k_base", "tiktoken is great!", 6),
    ],
)
def test_openai_encodings_count(encoding: str, text: str, tokens: int) -> None:
    assert text_counter(encoding)(text) == tokens


def test_an_unknown_table_is_not_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(TokenizerMissing, match="pip install litellm"):
        text_counter("o200k_base")


@pytest.mark.parametrize("name", ["/nowhere/tokenizer.json", "gpt-4o"])
def test_a_missing_tokenizer_says_what_there_is(name: str) -> None:
    with pytest.raises(TokenizerMissing, match="o200k_base or cl100k_base"):
        text_counter(name)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerMissing, match="is no tokenizer"):
        text_counter(str(tmp_path))


async def test_a_provider_whose_tokenizer_is_missing_does_not_start() -> None:
    backend = OpenAIBackend("api", OpenAIOptions(tokenizer="/nowhere.json"))
    with pytest.raises(BackendError, match=r"provider api: tokenizer '/nowhere\.json' is no file"):
        await backend.start()


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_object"}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]},
    ],
)
def test_what_only_the_provider_can_count_is_estimated(more: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], **more}
    assert count_body(len, "chat.completions", body) is None


async def test_the_decision_has_the_exact_count(provider: FakeProvider) -> None:
    text = f"""
version: 1
providers:
  api: {{type: openai, base_url: "{provider.url}", tokenizer: cl100k_base}}
targets:
  mini: {{provider: api, model: words, context: 20}}
routes:
  chat: [{{candidates: [mini], choose: in-order}}]
"""
    async with Router.from_text(text) as router:
        decision = await router.explain(model="chat", messages=[{"role": "user", "content": "tiktoken is great!"}])
        assert decision.order == ("mini",)
        # 3 for the reply, 3 for the message, 1 for its role, 6 for its text, and the answer: 20 hold, 21 do not.
        await router.explain(model="chat", messages=[{"role": "user", "content": "tiktoken is great!"}], max_tokens=7)
        with pytest.raises(Exception, match="prompt of 13 tokens and answer of 8 exceed its context of 20"):
            await router.explain(
                model="chat", messages=[{"role": "user", "content": "tiktoken is great!"}], max_tokens=8
            )
