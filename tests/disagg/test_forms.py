"""What clients expect beside plain text, of a real model, split and unified: several answers, logprobs, JSON, calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from backends.base import BackendError, Call, Surface
from backends.disagg.backend import DisaggBackend
from backends.models import ModelFiles
from backends.models.export import export_hf
from backends.options import DisaggOptions
from tests.disagg.serving import ask, until

pytestmark = [pytest.mark.model, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

HERMES = """\
{%- if tools %}<|im_start|>system
You may call these functions: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A chat template that knows tools, on a model that was not trained on them: only a grammar makes it call one."""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["split", "unified"])
async def cluster(
    request: pytest.FixtureRequest, smollm2: ModelFiles, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[DisaggBackend]:
    folder = tmp_path_factory.mktemp("model") / "hermes"
    export_hf(smollm2, folder)
    (folder / "chat_template.jinja").write_text(HERMES)
    backend = DisaggBackend("forms", DisaggOptions(model=str(folder), mode=request.param))
    await backend.start()
    yield backend
    await backend.aclose()


async def answer(
    backend: DisaggBackend, surface: Surface = "chat.completions", stream: bool = False, **body: Any
) -> dict[str, Any]:
    """The whole answer; a streamed one put together from its chunks."""
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me about Paris."}]}
    if surface == "completions":
        prompt = {"prompt": "Paris is"}
    call = Call("test", surface, {"model": "m", "max_tokens": 24, "temperature": 0, **prompt, **body}, stream)
    data = b"".join([piece.data async for piece in await backend.open(call)])
    if not stream:
        whole: dict[str, Any] = json.loads(data)
        return whole
    events = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
    choices: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        known = choices.setdefault(
            choice["index"], {"text": "", "logprobs": [], "tool_calls": [], "finish_reason": None}
        )
        delta = choice.get("delta", choice)
        known["text"] += delta.get("content", delta.get("text", "")) or ""
        known["tool_calls"] += delta.get("tool_calls", [])
        known["logprobs"] += (choice["logprobs"] or {}).get("content", [])
        known["finish_reason"] = choice["finish_reason"] or known["finish_reason"]
    return {"choices": [choices[index] for index in sorted(choices)], "usage": events[-1].get("usage")}


async def nothing_left(backend: DisaggBackend) -> None:
    workers = backend._cluster.workers if backend._cluster else []

    def free() -> bool:
        return all(w.started and w.state and w.state.free_blocks == w.started.num_blocks for w in workers)

    await until(free, "every KV block is free")


# --- several answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_n_answers_are_different_draws_from_one_prompt_counted_once(cluster: DisaggBackend, stream: bool) -> None:
    """vllm#43509: their KV is freed after the last of them."""
    asked: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 5, "stream_options": {"include_usage": True}}
    got = await answer(cluster, stream=stream, **asked)
    texts = [choice["text"] if stream else choice["message"]["content"] for choice in got["choices"]]
    assert len(set(texts)) == 3
    alone = await answer(cluster, temperature=1.0, seed=6)
    assert texts[1] == alone["choices"][0]["message"]["content"], "answer i is what seed + i gives alone"
    assert got["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert 3 <= got["usage"]["completion_tokens"] <= 72
    await nothing_left(cluster)


async def test_one_of_n_that_stops_early_leaves_the_others_alone(cluster: DisaggBackend) -> None:
    asked: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 5}
    whole = [choice["message"]["content"] for choice in (await answer(cluster, **asked))["choices"]]
    word = next(word for word in whole[0].split() if sum(word in text for text in whole) == 1 and len(word) > 4)
    for stream in (False, True):
        cut = await answer(cluster, stream=stream, stop=[word], **asked)
        texts = [choice["text"] if stream else choice["message"]["content"] for choice in cut["choices"]]
        assert texts == [whole[0].partition(word)[0], *whole[1:]]
        assert cut["choices"][0]["finish_reason"] == "stop"
    await nothing_left(cluster)


async def test_a_client_that_leaves_frees_all_n(cluster: DisaggBackend) -> None:
    body = {"messages": [{"role": "user", "content": "Count."}], "n": 4, "max_tokens": 500, "ignore_eos": True}
    reply = await cluster.open(Call("test", "chat.completions", body, True))
    async for piece in reply:
        if piece.content:
            break
    await reply.aclose()
    await nothing_left(cluster)


# --- log-probabilities ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_logprobs_are_there_for_each_token_once_and_the_greedy_one_is_the_likeliest(
    cluster: DisaggBackend, stream: bool
) -> None:
    """vllm#27449, TRT-LLM#11727: the first token comes from the prefill side, with its own."""
    got = await answer(cluster, stream=stream, logprobs=True, top_logprobs=3, max_tokens=8, ignore_eos=True)
    (choice,) = got["choices"]
    entries = choice["logprobs"] if stream else choice["logprobs"]["content"]
    text = choice["text"] if stream else choice["message"]["content"]
    assert len(entries) == 8
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == text
    for entry in entries:
        assert entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]


async def test_logprobs_are_the_models_own_whatever_steers_the_draw(cluster: DisaggBackend) -> None:
    plain = await answer(cluster, logprobs=True, max_tokens=1)
    first = plain["choices"][0]["logprobs"]["content"][0]
    steered = await answer(cluster, logprobs=True, max_tokens=1, temperature=0.1, top_k=1, presence_penalty=1)
    assert steered["choices"][0]["logprobs"]["content"][0]["logprob"] == pytest.approx(first["logprob"], abs=1e-6)


async def test_completions_have_their_own_form_of_logprobs(cluster: DisaggBackend) -> None:
    got = await answer(cluster, surface="completions", logprobs=2, max_tokens=6)
    (choice,) = got["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"][0] == 0 and logprobs["text_offset"][-1] < len(choice["text"])
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])
    assert len(logprobs["token_logprobs"]) == len(logprobs["tokens"]) == len(logprobs["text_offset"])


# --- forms ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("temperature", [0, 1.5])
async def test_a_json_schema_is_followed_however_wild_the_draw(
    cluster: DisaggBackend, stream: bool, temperature: float
) -> None:
    """sglang#21964: the decode side's grammar has advanced by exactly the first token."""
    asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}}
    got = await answer(cluster, stream=stream, temperature=temperature, seed=3, max_tokens=60, **asked)
    (choice,) = got["choices"]
    person = json.loads(choice["text"] if stream else choice["message"]["content"])
    assert set(person) == {"name", "age"}
    assert isinstance(person["name"], str) and 0 <= person["age"] <= 99
    assert choice["finish_reason"] == "stop"
    await nothing_left(cluster)


async def test_json_object_gives_an_object(cluster: DisaggBackend) -> None:
    got = await answer(cluster, response_format={"type": "json_object"}, max_tokens=300, temperature=0.7, seed=1)
    (choice,) = got["choices"]
    text = choice["message"]["content"]
    assert text.startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)


async def test_forms_of_many_at_once_do_not_get_mixed_up(cluster: DisaggBackend) -> None:
    def colour(value: str) -> dict[str, Any]:
        schema = {"type": "object", "properties": {"colour": {"const": value}}, "required": ["colour"]}
        return {"type": "json_schema", "json_schema": {"schema": {**schema, "additionalProperties": False}}}

    names = ["red", "green", "blue", "black", "white", "yellow"]
    got = await asyncio.gather(*(answer(cluster, response_format=colour(name)) for name in names))
    assert [json.loads(one["choices"][0]["message"]["content"])["colour"] for one in got] == names
    await nothing_left(cluster)


@pytest.mark.parametrize(
    "schema", [{"type": "objct"}, {"type": "string", "pattern": "(?=look)ahead"}, {"$ref": "#/no"}]
)
async def test_a_schema_that_cannot_be_enforced_is_refused_with_the_reason(
    cluster: DisaggBackend, schema: dict[str, Any]
) -> None:
    with pytest.raises(BackendError) as caught:
        await answer(cluster, response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    assert (caught.value.status, caught.value.param) == (400, "response_format")


async def test_a_form_that_only_allows_the_end_wins_over_min_tokens(cluster: DisaggBackend) -> None:
    schema = {"const": "yes"}
    got = await answer(
        cluster, response_format={"type": "json_schema", "json_schema": {"schema": schema}}, min_tokens=20
    )
    assert json.loads(got["choices"][0]["message"]["content"]) == "yes"


# --- tools ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_call_that_is_asked_for_is_made_with_arguments_that_fit(
    cluster: DisaggBackend, stream: bool, choice: Any
) -> None:
    got = await answer(cluster, stream=stream, tools=[WEATHER], tool_choice=choice, max_tokens=60)
    (made,) = got["choices"]
    calls = made["tool_calls"] if stream else made["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["weather"]
    assert json.loads(calls[0]["function"]["arguments"])["city"] in ("Paris", "Rome")
    assert calls[0]["id"].startswith("call_") and calls[0]["type"] == "function"
    assert made["finish_reason"] == "tool_calls"
    assert (made["text"] == "") if stream else (made["message"]["content"] is None)


async def test_tools_are_in_the_prompt_and_left_out_where_none_may_be_called(cluster: DisaggBackend) -> None:
    def prompt_of(**body: Any) -> int:
        counted = cluster.count_prompt("chat.completions", {"messages": [{"role": "user", "content": "x"}], **body})
        assert counted is not None
        return counted.tokens

    assert prompt_of(tools=[WEATHER]) > prompt_of() + 30
    assert prompt_of(tools=[WEATHER], tool_choice="none") == prompt_of()


async def test_a_free_model_answers_in_text_beside_tools(cluster: DisaggBackend) -> None:
    got = await answer(
        cluster, tools=[WEATHER], messages=[{"role": "user", "content": "What is the capital of France?"}]
    )
    assert got["choices"][0]["message"]["content"]
    assert got["choices"][0]["finish_reason"] in ("stop", "length")


async def test_the_result_of_a_call_goes_into_the_conversation(cluster: DisaggBackend) -> None:
    made = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "How is the weather in Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny, 31 degrees"},
    ]
    got = await answer(cluster, tools=[WEATHER], messages=messages, max_tokens=12)
    assert got["choices"][0]["message"]["content"]


async def test_plain_requests_are_still_plain(cluster: DisaggBackend) -> None:
    spoken = await ask(cluster, "What is the capital of France?")
    assert "Paris" in spoken.text
