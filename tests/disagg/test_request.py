"""Bodies the bundled cluster cannot serve: a 400 that names the field, the value and the remedy."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.base import BackendError, Usage
from backends.disagg.choice import Delta
from backends.disagg.render import Renderer
from backends.disagg.request import chat_messages, completion_prompt, parse_request

TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"temperature": "hot"}, "temperature", "'hot'; use a number from 0 to 2"),
        ({"temperature": 3}, "temperature", "from 0 to 2"),
        ({"temperature": float("nan")}, "temperature", "nan"),
        ({"temperature": True}, "temperature", "True"),
        ({"max_tokens": 0}, "max_tokens", "a whole number of at least 1"),
        ({"max_tokens": 1.5}, "max_tokens", "1.5"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "-1"),
        ({"stop": [1]}, "stop", "[1]"),
        ({"stop": ""}, "stop", "non-empty"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"seed": "s"}, "seed", "'s'"),
        ({"n": 0}, "n", "from 1 to 128"),
        ({"n": 129}, "n", "from 1 to 128"),
        ({"stream_options": 1}, "stream_options", "include_usage"),
        ({"tools": "x"}, "tools", "a list of functions"),
        ({"tools": [{"type": "function"}]}, "tools[0]", '"name": "…"'),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "functions only"),
        ({"tools": [TOOL, TOOL]}, "tools", "a name of its own"),
        ({"tools": [{**TOOL, "function": {"name": "f", "parameters": 3}}]}, "tools[0].function.parameters", "schema"),
        ({"tool_choice": "required"}, "tool_choice", "give `tools`"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice", '"required"'),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "tools: f"),
        ({"response_format": "json"}, "response_format", '"json_object"'),
        ({"response_format": {"type": "json_schema"}}, "response_format", '"schema"'),
        (
            {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "not both",
        ),
        ({"logprobs": 3}, "logprobs", "true or false"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"top_logprobs": 2}, "top_logprobs", "set logprobs"),
        ({"best_of": 2}, "best_of", "route this request to a target that supports it"),
        ({"top_k": -2}, "top_k", "of at least -1"),
        ({"min_p": 1.5}, "min_p", "from 0 to 1"),
        ({"presence_penalty": 3}, "presence_penalty", "from -2 to 2"),
        ({"frequency_penalty": "x"}, "frequency_penalty", "from -2 to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "from 0.01"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "such as"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100"),
        ({"logit_bias": [1]}, "logit_bias", "an object"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens", "at most max_tokens (5)"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids", "a list of token ids"),
        ({"ignore_eos": 1}, "ignore_eos", "true or false"),
        ({"frobnicate": 1}, "frobnicate", "frobnicate=1"),
    ],
)
def test_what_cannot_be_served_is_named_never_ignored(body: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(BackendError) as caught:
        parse_request("chat.completions", body)
    error = caught.value
    assert error.status == 400 and error.param == param and says in error.message
    assert error.kind == "invalid_request_error"


def test_null_and_neutral_values_ask_for_nothing_and_are_accepted() -> None:
    neutral = {"tools": None, "logprobs": False, "presence_penalty": 0, "user": "u", "n": 1, "stop": None}
    assert parse_request("chat.completions", neutral).temperature == 1.0


def test_a_seed_is_kept_and_its_absence_differs_each_time() -> None:
    assert parse_request("completions", {"seed": 7}).seed == 7
    assert parse_request("completions", {}).seed != parse_request("completions", {}).seed


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        ["hi"],
        [{"content": "no role"}],
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "assistant", "tool_calls": "x"}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": 3}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    ],
)
def test_malformed_messages_are_a_400_about_messages(messages: Any) -> None:
    with pytest.raises(BackendError) as caught:
        chat_messages({"messages": messages}, "tagged")
    assert caught.value.status == 400 and (caught.value.param or "").startswith("messages")


def test_past_calls_and_their_results_are_read_where_the_template_knows_tools_and_named_where_not() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_1", "content": "2"}]
    read = chat_messages({"messages": messages}, "tagged")
    assert read[0]["tool_calls"][0]["function"]["arguments"] == {"x": 1}, "templates write objects, not strings"
    assert read[1] == messages[1]
    for message in messages:
        with pytest.raises(BackendError, match="knows no tools") as caught:
            chat_messages({"messages": [message]}, None)
        assert caught.value.code == "unsupported_parameter"


@pytest.mark.parametrize("prompt", [None, "", [], ["a", "b"], [1, -1], [True], {"x": 1}, [[1], [2]]])
def test_malformed_prompts_are_a_400_about_the_prompt(prompt: Any) -> None:
    with pytest.raises(BackendError) as caught:
        completion_prompt({"prompt": prompt})
    assert caught.value.status == 400 and caught.value.param == "prompt"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "messages",
                "prompt",
                "temperature",
                "top_p",
                "stop",
                "n",
                "tools",
                "tool_choice",
                "response_format",
                "logprobs",
                "top_logprobs",
                "max_tokens",
                "logit_bias",
                "min_tokens",
                "top_k",
            ]
        ),
        json_values,
    )
)
def test_any_body_is_understood_or_refused(body: dict[str, Any]) -> None:
    for parse in (lambda: parse_request("chat.completions", body), lambda: chat_messages(body, "bare")):
        try:
            parse()
        except BackendError as error:
            assert error.status == 400 and error.param


def test_a_stream_ends_with_finish_reason_then_usage_then_done() -> None:
    """litellm#9657: one usage chunk with `choices: []`, and only where it was asked for."""
    renderer = Renderer("chat.completions", "abc", "chat")
    data = renderer.delta(0, Delta("!", finish_reason="stop")) + renderer.ending(Usage(5, 2), include_usage=True)
    *events, done = [line[6:] for line in data.decode().split("\n\n") if line]
    assert done == "[DONE]"
    text, finish, usage = map(json.loads, events)
    assert text["choices"][0]["delta"] == {"content": "!"}
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 7
    assert b"usage" not in renderer.ending(Usage(5, 2), include_usage=False)
