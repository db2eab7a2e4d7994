"""Tool calls are told from text, whatever pieces an answer comes in."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.disagg.tools import CallReader, Style

NAMES = frozenset({"weather", "search"})
WEATHER = '{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}'
SEARCH = '{"name": "search", "arguments": {"query": "a </tool_call"}}'


def read(style: Style, *pieces: str) -> tuple[str, list[tuple[str, object]]]:
    """(the text, (name, arguments) of the calls)."""
    reader = CallReader(style, NAMES)
    results = [reader.push(piece) for piece in pieces] + [reader.finish()]
    calls = [call for _, calls in results for call in calls]
    assert len({call.id for call in calls}) == len(calls)
    return "".join(text for text, _ in results), [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(
    ("style", "answer", "text", "called"),
    [
        ("tagged", f"<tool_call>\n{WEATHER}\n</tool_call>", "", ["weather"]),
        ("tagged", f"Let me look. <tool_call>{WEATHER}</tool_call>", "Let me look.", ["weather"]),
        ("tagged", f"<tool_call>{WEATHER}</tool_call>\n<tool_call>{SEARCH}</tool_call>\n", "", ["weather", "search"]),
        ("tagged", "a < b and <tool> are text", "a < b and <tool> are text", []),
        ("tagged", "<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", []),
        ("tagged", f"<tool_call>{WEATHER}", f"<tool_call>{WEATHER}", []),
        ("tagged", '<tool_call>{"name": "rm"}</tool_call>', '<tool_call>{"name": "rm"}</tool_call>', []),
        ("bare", WEATHER, "", ["weather"]),
        ("bare", f"\n[{WEATHER}, {SEARCH}]", "", ["weather", "search"]),
        ("bare", '{"name": "weather", "parameters": {"city": "Bern"}}', "", ["weather"]),
        ("bare", '{"answer": 42}', '{"answer": 42}', []),
        ("bare", "It is {sunny}.", "It is {sunny}.", []),
    ],
)
def test_what_is_a_call_and_what_is_text(style: Style, answer: str, text: str, called: list[str]) -> None:
    shown, calls = read(style, answer)
    assert shown == text
    assert [name for name, _ in calls] == called


PARTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<tool", "\n", "  ", "Hello", "{", "[", WEATHER, SEARCH, '{"name": "rm"}', "<"]
)


@given(st.lists(PARTS, max_size=8).map("".join), st.lists(st.integers(0, 200), max_size=6), st.booleans())
def test_the_pieces_an_answer_comes_in_change_nothing(answer: str, cuts: list[int], tagged: bool) -> None:
    style: Style = "tagged" if tagged else "bare"
    ends = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    assert read(style, *(answer[a:b] for a, b in pairwise(ends))) == read(style, answer) == read(style, *answer)


def test_plain_text_is_not_held_back() -> None:
    reader = CallReader("tagged", NAMES)
    assert [reader.push(piece)[0] for piece in ("Hel", "lo <", "b> you")] == ["Hel", "lo", " <b> you"]
    assert CallReader("bare", NAMES).push("Hello")[0] == "Hello"
