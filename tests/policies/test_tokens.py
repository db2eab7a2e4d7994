"""Prompt lengths, estimated and corrected by what targets report."""

from __future__ import annotations

import base64
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import RouterState, estimate_prompt_tokens
from policies.tokens import Calibration, Estimate
from policies.tokens.text import text_tokens

_ROOT = Path(__file__).parents[2]


def _png(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", width, height) + b"\x08\x02\0\0\0"


def _gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height)


def _jpeg(width: int, height: int) -> bytes:
    thumbnail = b"\xff\xe1" + struct.pack(">H", 40) + b"\xff\xc0" + b"\0" * 36  # its frame header is not the image's
    return b"\xff\xd8" + thumbnail + b"\xff\xc2" + struct.pack(">HBHHB", 17, 8, height, width, 3) + b"\0" * 9


def _webp(width: int, height: int) -> bytes:
    sizes = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + sizes


def _of_image(url: Any, **more: Any) -> int:
    part = {"type": "image_url", "image_url": {"url": url, **more}}
    bare = estimate_prompt_tokens("chat.completions", {"messages": [{"role": "user", "content": []}]})
    with_it = estimate_prompt_tokens("chat.completions", {"messages": [{"role": "user", "content": [part]}]})
    return with_it.tokens - bare.tokens


@pytest.mark.parametrize("made", [_png, _gif, _jpeg, _webp])
def test_an_image_counts_by_its_size(made: Any) -> None:
    url = "data:image/any;base64," + base64.b64encode(made(1024, 512)).decode()
    assert _of_image(url) == 85 + 2 * 170


@pytest.mark.parametrize(
    ("url", "more", "tokens"),
    [
        ("https://example.com/cat.png", {}, 85 + 4 * 170),
        ("https://example.com/cat.png", {"detail": "low"}, 85),
        ("data:image/png;base64,!!!", {}, 85 + 4 * 170),
        ("data:image/png;base64," + base64.b64encode(_png(0, 0)).decode(), {}, 85 + 4 * 170),
        (None, {}, 85 + 4 * 170),
        # 4,096 by 8,192 is made to fit: 768 by 1,536, six tiles (OpenAI's guide has this one as an example).
        ("data:image/png;base64," + base64.b64encode(_png(4096, 8192)).decode(), {}, 85 + 6 * 170),
    ],
)
def test_an_image_of_unknown_size_counts_as_a_usual_one(url: Any, more: dict[str, Any], tokens: int) -> None:
    assert _of_image(url, **more) == tokens


def test_an_image_is_not_counted_as_text() -> None:
    part = {"type": "image", "source": {"type": "base64", "data": base64.b64encode(_png(64, 64) * 5000).decode()}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    assert estimate_prompt_tokens("chat.completions", body).tokens < 400


def test_tools_count() -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city. " * 20}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    without = estimate_prompt_tokens("chat.completions", body).tokens
    assert estimate_prompt_tokens("chat.completions", {**body, "tools": [tool]}).tokens > without + 80


def test_kinds_are_told_apart() -> None:
    assert text_tokens((_ROOT / "README.md").read_text()[:300].replace("`", "")).kind in ("text", "code")
    assert text_tokens("The quick brown fox jumps over the lazy dog, and again. " * 20).kind == "text"
    assert text_tokens((_ROOT / "policies" / "decide.py").read_text()).kind == "code"
    assert text_tokens("请帮我看一下这段代码，为什么没有生效？" * 5).kind == "dense"


def test_a_long_text_is_estimated_from_samples() -> None:
    text = (_ROOT / "docs" / "policies.md").read_text()
    whole = sum(text_tokens(text[at : at + 4000]).tokens for at in range(0, len(text), 4000))
    assert text_tokens(text).tokens == pytest.approx(whole, rel=0.15)


def test_nesting_beyond_all_sense_is_estimated() -> None:
    prompt: Any = "x"
    for _ in range(5000):
        prompt = [prompt]
    assert estimate_prompt_tokens("completions", {"prompt": prompt}).tokens >= 1
    content = {"type": "tool_result", "content": prompt}
    body = {"messages": [{"role": "user", "content": [content]}]}
    assert estimate_prompt_tokens("chat.completions", body).tokens >= 1


# --- corrected --------------------------------------------------------------------------------------------


@given(factor=st.floats(0.5, 2.0), tokens=st.integers(50, 5000))
def test_estimates_come_to_count_as_the_target_does(factor: float, tokens: int) -> None:
    calibration, estimate = Calibration(), Estimate(tokens, "dense")
    for _ in range(100):
        calibration.learn(estimate, round(tokens * factor))
    assert calibration.corrected(estimate) == pytest.approx(tokens * factor, rel=0.1, abs=2)


def test_kinds_are_corrected_apart_and_an_unseen_one_as_the_others() -> None:
    calibration = Calibration()
    for _ in range(60):
        calibration.learn(Estimate(1000, "text"), 1000)
        calibration.learn(Estimate(1000, "dense"), 2000)
    assert calibration.corrected(Estimate(1000, "text")) == pytest.approx(1000, rel=0.05)
    assert calibration.corrected(Estimate(1000, "dense")) == pytest.approx(2000, rel=0.05)
    assert 1100 < calibration.corrected(Estimate(1000, "code")) < 1900


def test_a_count_that_cannot_be_the_vocabulary_is_no_lesson() -> None:
    calibration = Calibration()
    calibration.learn(Estimate(10), 5000)  # a system prompt of the provider's own
    calibration.learn(Estimate(0), 100)
    assert calibration.corrected(Estimate(1000)) == 1000


@given(counts=st.lists(st.integers(100, 3000), max_size=5))
def test_a_calibration_survives_being_saved(counts: list[int]) -> None:
    first, second = Calibration(), Calibration()
    for count in counts:
        first.learn(Estimate(1000, "code"), count)
    second.restore(first.saved())
    assert second.corrected(Estimate(777)) == first.corrected(Estimate(777))


@pytest.mark.parametrize("saved", [{"text": 3}, {"text": [1]}, {"text": [1, "x"]}, {"text": [-1, 2]}])
def test_a_malformed_calibration_is_refused(saved: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="text"):
        Calibration().restore(saved)


# --- answers ----------------------------------------------------------------------------------------------


def test_answers_are_expected_to_be_as_long_as_those_before() -> None:
    state = RouterState()
    assert state.answer_tokens("chat", "default", None) == 256
    assert state.answer_tokens("chat", "default", 40) == 40
    for _ in range(20):
        state.answered("chat", "default", 30)
    assert state.answer_tokens("chat", "default", None) == 30
    assert state.answer_tokens("chat", "default", 4000) == 30
    assert state.answer_tokens("chat", "default", 10) == 10
    assert state.answer_tokens("chat", "other", None) == 256
