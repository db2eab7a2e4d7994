"""A simulation decides as the live code does, in time that passes as queues and batches make it pass."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import Goals
from policies.model import Speed
from policies.simulate import Request, TraceError, read_trace, simulate, summarize, world_of
from policies.simulate.engine import Worker
from policies.simulate.placing import place
from tests.policies.test_loading import load

POLICY = """\
version: 1
providers:
  api: {type: openai, base_url: "http://127.0.0.1:9/v1"}
  own: {type: disagg, model: tiny-llm}
targets:
  mini: {provider: api, model: m, price: {input: 1, output: 2}, speed: {ttft_ms: 400, ttft_ms_per_1k: 100, tpot_ms: 10}}
  tiny: {provider: own, context: 4000, speed: {step_ms: 10, step_ms_per_stream: 1, prompt_ms_per_1k: 1000SPREAD}}
classes:
  long: {when: {prompt_tokens: {gte: 2000}}}
  default: {}
routes:
  chat: [{candidates: [tiny, mini], choose: CHOOSE}]
"""
PLAIN = POLICY.replace("SPREAD", "")
MEETING = "cheapest-meeting-slo, slo: {ttft_ms: 1000, at: p90}"


def requests(count: int, every_s: float, prompt: int = 200, answer: int = 20) -> list[Request]:
    return [Request(number * every_s, prompt, answer) for number in range(count)]


def run(trace: list[Request], choose: str = "in-order", spread: float = 0.0, **options: Any) -> tuple[list[Any], Any]:
    policy = load(POLICY.replace("CHOOSE", choose).replace("SPREAD", f", spread: {spread}"))
    world = world_of(policy)
    outcomes = simulate(policy, trace, world, route="chat", **options)
    return outcomes, summarize(outcomes, world)


def test_a_hosted_target_takes_what_it_declares() -> None:
    (one,), report = run([Request(0.0, 5000, 11)])
    assert one.target == "mini", "the own one's context is too small"
    assert one.ttft_s == pytest.approx(0.4 + 0.5) and one.tpot_s == pytest.approx(0.010)
    assert one.cost_usd == pytest.approx((5000 * 1 + 11 * 2) / 1e6)
    assert report.origins == {"mini": "declared", "tiny": "declared"}
    assert set(report.classes) == {"long"} and report.total.targets == {"mini": 1.0}


def test_prompts_wait_for_each_other_and_streams_share_steps() -> None:
    outcomes, _ = run(requests(3, 0.0, prompt=500, answer=101))
    first, second, third = (one.ttft_s for one in outcomes)
    assert (second - first, third - second) == (pytest.approx(first, rel=0.05), pytest.approx(first, rel=0.05))
    assert first == pytest.approx(0.51, rel=0.02), "half a second of computing and a step"
    assert outcomes[0].tpot_s == pytest.approx(0.0115, rel=0.1), "alone at first, then not"
    (alone,), _ = run(requests(1, 0.0, prompt=500, answer=101))
    assert alone.tpot_s == pytest.approx(0.011)


def test_what_is_full_spills_over_and_fills_again_when_it_is_empty() -> None:
    busy = requests(300, 0.05, prompt=400)
    quiet = [Request(60 + number, 400, 20) for number in range(100)]
    outcomes, _ = run([*busy, *quiet], MEETING)
    during, after = outcomes[:300], outcomes[300:]
    assert 0.15 < sum(one.target == "tiny" for one in during) / 300 < 0.6, "two of its prompts a second fit"
    assert sum(one.target == "tiny" for one in after) > 90, "it is not held against it for ever"
    assert sum(one.met for one in outcomes[50:]) / 350 > 0.9, "once it has learned"


def test_the_same_seed_gives_the_same_bytes() -> None:
    noisy = PLAIN.replace("tpot_ms: 10}", "tpot_ms: 10, spread: 0.5}").replace("CHOOSE", MEETING)
    policy = load(noisy)
    world = world_of(policy)

    def once(seed: int) -> str:
        return json.dumps(
            summarize(simulate(policy, requests(400, 0.1), world, route="chat", seed=seed), world).to_dict()
        )

    assert once(1) == once(1)
    assert once(1) != once(2)


def test_goals_prefixes_and_refusals_are_counted() -> None:
    own = [Request(float(i), 2000, 2, prefixes=(1, 2, 3)) for i in range(2)]
    outcomes, _ = run(own, goals=Goals(ttft_ms=1000))
    assert outcomes[0].ttft_s == pytest.approx(2.0, rel=0.05) and not outcomes[0].met
    assert outcomes[1].ttft_s == pytest.approx(0.464 + 1.04, rel=0.05), (
        "1,536 tokens were cached; it waited for the first"
    )
    text = PLAIN.replace("candidates: [tiny, mini]", "candidates: [tiny]").replace("CHOOSE", "in-order")
    policy = load(text)
    world = world_of(policy)
    refused = simulate(policy, [Request(0.0, 5000, 2), Request(1.0, 50, 2, model="nope")], world, route="chat")
    assert [one.target for one in refused] == [None, None]
    assert summarize(refused, world).total.refused == 2


def test_what_a_policy_does_not_declare_is_expected_or_assumed_and_said_to_be() -> None:
    text = PLAIN.replace("speed: {ttft_ms: 400, ttft_ms_per_1k: 100, tpot_ms: 10}", "expect: {ttft_ms: 123}")
    text = text.replace(", speed: {step_ms: 10, step_ms_per_stream: 1, prompt_ms_per_1k: 1000}", "")
    policy = load(text.replace("CHOOSE", "in-order"))
    world = world_of(policy)
    assert world.targets["mini"].origin == "expected" and world.targets["mini"].speed.ttft_ms == 123
    assert world.targets["tiny"].origin == "assumed"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 20), st.integers(1, 3000), st.integers(1, 300)),
        min_size=1,
        max_size=40,
    ),
    st.sampled_from(["in-order", MEETING, "round-robin", "least-busy"]),
    st.sampled_from([0.0, 0.05, 1.5]),
)
def test_everybody_is_served_and_never_before_it_came(
    asked: list[tuple[float, int, int]], choose: str, spread: float
) -> None:
    trace = [Request(at, prompt, answer) for at, prompt, answer in sorted(asked)]
    outcomes, report = run(trace, choose, spread)
    assert len(outcomes) == len(trace)
    for one in outcomes:
        assert one.ttft_s is not None and 0 < one.ttft_s < math.inf
        assert (one.tpot_s is None) == (one.request.output_tokens == 1)
        assert one.tpot_s is None or 0.0099 <= one.tpot_s < 10 or (spread and 0 < one.tpot_s < 1000)
    assert report.total.refused == 0
    assert sum(report.total.targets.values()) == pytest.approx(1.0)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.001, 2), st.integers(1, 2000), st.integers(1, 200)), min_size=1, max_size=20),
    st.integers(1, 8),
)
def test_a_worker_does_all_its_work_however_time_is_cut(work: list[tuple[float, int, int]], batch: int) -> None:
    """Advancing in one go or in many little steps gives the same events at the same times."""
    speed = Speed(step_ms=10, step_ms_per_stream=2, step_ms_per_1k_context=5, prompt_ms_per_1k=900)

    def events(pieces: int) -> list[tuple[float, str, Any]]:
        worker, found, now = Worker(speed, 128, batch), [], 0.0
        for number, (after, prompt, answer) in enumerate(work):
            for piece in range(pieces):
                found += worker.advance(now + after * (piece + 1) / pieces)
            now += after
            worker.give_prompt(prompt, 0, ("p", number))
            worker.give_stream(answer, prompt, ("s", number))
        while worker.next_at() < math.inf:
            found += worker.advance(worker.next_at())
        assert worker.backlog_s == pytest.approx(0.0, abs=1e-6) and worker.streams == 0
        return found

    whole, cut = events(1), events(7)
    assert sorted(whose for _, _, whose in whole) == sorted(
        (kind, number) for number in range(len(work)) for kind in ("p", "s")
    )
    assert {whose: at for at, _, whose in whole} == {
        whose: pytest.approx(at, rel=1e-6, abs=1e-6) for at, _, whose in cut
    }


# --- traces -------------------------------------------------------------------------------------------


@pytest.mark.timeout(30)
def test_time_goes_on_after_days_without_a_pause() -> None:
    """Less than the last bit of the clock may be left of an answer: a million requests once never came to their end."""
    worker = Worker(Speed(step_ms=1, step_ms_per_stream=0.7, prompt_ms_per_1k=100), 512, 64)
    worker.advance(400_000.0)
    worker.give_stream(10**9, 0, "endless")
    now = 420_000.0
    worker.advance(now)
    for number in range(500):
        worker.give_stream(1 + number % 7, 100, number)
        worker.give_prompt(10 + number, 0, "prompt")
        now += 0.37
        worker.advance(now)
    worker.advance(now + 3600)
    assert worker.streams == 1, "the endless one"


def test_azures_mooncakes_and_our_own_traces_are_read() -> None:
    azure = read_trace(
        [
            "TIMESTAMP,ContextTokens,GeneratedTokens\n",
            "2023-11-16 18:17:04.5319600,3180,8\n",
            "2023-11-16 18:17:03.9799600,4808,10\n",
            "\n",
        ]
    )
    assert [(round(one.at_s, 6), one.prompt_tokens, one.output_tokens) for one in azure] == [
        (0.0, 4808, 10),
        (0.552, 3180, 8),
    ]
    (mooncake,) = read_trace(['{"timestamp": 3000, "input_length": 900, "output_length": 5, "hash_ids": [7, 8]}'])
    assert mooncake == Request(0.0, 900, 5, prefixes=(7, 8))
    first, second = read_trace(
        [
            '{"at_s": 5, "prompt_tokens": 10, "output_tokens": 3, "model": "chat", "ttft_ms": 300, "session": "s"}',
            '{"at_s": 7.5, "prompt_tokens": 11, "output_tokens": 4, "max_tokens": 9}',
        ]
    )
    assert first == Request(0.0, 10, 3, model="chat", goals=Goals(300), session="s")
    assert second == Request(2.5, 11, 4, max_tokens=9)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "the trace is empty"),
        (["a,b,c"], "line 1: no column 'TIMESTAMP'"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens"], "the trace has no request"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "yesterday,1,2"], "line 2: not a request"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03,1"], "line 2: not a request"),
        (['{"at_s": 1}'], "line 1: not a request: no 'prompt_tokens'"),
        (['{"at_s": 1, "prompt_tokens": -1, "output_tokens": 1}'], "line 1: not a request: -1 tokens"),
        (['{"at_s": "x", "prompt_tokens": 1, "output_tokens": 1}'], "line 1: not a request"),
        (['{"at_s": 1, "prompt_tokens": 1, "output_tokens": 1}', "[]"], "line 2: not a request: a line must be"),
        (['{"at_s": 1, "prompt_tokens": 1, "output_tokens": 1}', "{"], "line 2: not a request"),
        (['{"timestamp": -4, "input_length": 1, "output_length": 1}'], "line 1: not a request: -4 is no time"),
    ],
)
def test_a_trace_that_cannot_be_read_says_where(lines: list[str], said: str) -> None:
    with pytest.raises(TraceError) as refused:
        read_trace(lines)
    assert said in str(refused.value)


@given(st.lists(st.text(max_size=60), max_size=5))
def test_any_text_is_a_trace_or_is_refused(lines: list[str]) -> None:
    try:
        assert read_trace(lines)
    except TraceError as error:
        assert str(error)


def test_an_adaptive_cluster_splits_what_is_long_and_computes_short_prompts_where_they_are_decoded() -> None:
    speed = Speed(step_ms=10, step_ms_per_stream=1, prompt_ms_per_1k=1000, transfer_ms_per_1k=20)

    def decoding() -> Worker:
        worker = Worker(speed, 512, 64)
        for _ in range(4):
            worker.give_stream(200, 500, lambda at: None)
        return worker

    short, long = Request(0.0, 20, 50), Request(0.0, 2000, 50)
    busy = Worker(speed, 512, 64)
    busy.give_prompt(3000, 0, lambda at: None)
    idle, decode = Worker(speed, 512, 64), decoding()
    assert place(long, 0, [idle], [decode], 0.04) == (idle, False)
    assert place(short, 0, [busy], [decode], 0.0004) == (decode, True), "it need not wait behind a long one"
