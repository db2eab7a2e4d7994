"""Who gets a request, and why: order, cost, goals, context, and the same answer every time."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import policies
from policies import Decision, Goals, NoCandidate, NoRoute, Profile, RouterState, decide
from tests.policies.test_loading import POLICY, load


def ask(text: str = POLICY, state: RouterState | None = None, **facts: Any) -> Decision:
    goals = Goals(facts.pop("ttft_ms", None), facts.pop("tpot_ms", None))
    profile = Profile(**{"model": "chat", "prompt_tokens": 50, "goals": goals, **facts})
    return decide(load(text), profile, RouterState() if state is None else state, random.Random(0))


def seen(state: RouterState, target: str, ttft_s: float, tpot_s: float = 0.02, times: int = 10) -> RouterState:
    for _ in range(times):
        state[target].observe(50, ttft_s, tpot_s)
    return state


def test_class_and_rule_decide_the_candidates() -> None:
    assert ask().order == ("mini", "tiny")
    assert ask().class_name == "default"
    assert ask(ttft_ms=400).class_name == "interactive"
    assert ask(ttft_ms=600).class_name == "default"


def test_a_goal_that_was_not_given_matches_no_comparison() -> None:
    assert ask(ttft_ms=None).class_name == "default"


def test_an_unknown_model_is_no_route() -> None:
    with pytest.raises(NoRoute, match="did you mean 'chat'"):
        ask(model="chatt")


def test_a_target_that_cannot_hold_the_prompt_is_skipped() -> None:
    """litellm#31557"""
    decision = ask(prompt_tokens=990, max_tokens=20)
    assert decision.order == ("tiny",)
    mini = decision.candidates[0]
    assert not mini.kept
    assert mini.reason == "prompt of 990 tokens and answer of 20 exceed its context of 1000"


def test_the_smaller_of_both_known_limits_holds() -> None:
    state = RouterState()
    state["tiny"].context = 100
    with pytest.raises(NoCandidate) as refused:
        ask(state=state, prompt_tokens=2000)
    assert [candidate.kept for candidate in refused.value.decision.candidates] == [False, False]
    assert "context of 100" in str(refused.value) and "context of 1000" in str(refused.value)


def test_each_target_is_measured_by_its_own_tokens() -> None:
    decision = ask(prompt_tokens=50, tokens_by_target={"mini": 5000})
    assert decision.order == ("tiny",)


def test_without_history_latency_is_unknown_and_what_is_declared_counts() -> None:
    """litellm#39970: no division by zero, and no guess."""
    decision = ask(ttft_ms=400)
    tiny, mini = decision.candidates
    assert tiny.reason == "declared to meet the goals (`expect`), $0.000000"
    assert mini.reason.startswith("latency unknown: too few answers observed")
    assert mini.p_meet is None and mini.ttft_ms is None
    assert decision.order == ("tiny", "mini")
    assert ask(ttft_ms=200).order == ("mini", "tiny"), "declared to miss is worse than unknown"


def test_the_cheapest_that_meets_the_goals_is_first() -> None:
    state = seen(seen(RouterState(), "mini", 0.2), "tiny", 0.2)
    assert ask(state=state, ttft_ms=400).order == ("tiny", "mini")
    state = seen(seen(RouterState(), "mini", 0.2), "tiny", 2.0)
    decision = ask(state=state, ttft_ms=400)
    assert decision.order == ("mini", "tiny")
    assert "misses the goals with p=0.00" in decision.candidates[0].reason
    assert "mini meets the goals at least cost" in decision.reason


def test_a_request_that_nobody_serves_in_time_is_still_served() -> None:
    state = seen(seen(RouterState(), "mini", 1.0), "tiny", 2.0)
    decision = ask(state=state, ttft_ms=400)
    assert set(decision.order) == {"mini", "tiny"}
    assert "no target is expected to meet the goals" in decision.reason


def test_the_stricter_of_rule_and_request_holds() -> None:
    state = seen(seen(RouterState(), "tiny", 0.45), "mini", 0.2)
    assert ask(state=state, ttft_ms=500).order[0] == "tiny"
    assert ask(state=state, ttft_ms=300).order[0] == "mini"


def test_a_share_of_answers_must_meet_not_their_mean() -> None:
    state = seen(RouterState(), "mini", 0.2)
    for index in range(40):
        state["tiny"].observe(50, 3.0 if index % 4 == 0 else 0.1, 0.02)
    decision = ask(state=state, ttft_ms=500)
    assert decision.order[0] == "mini", decision.reason


def test_ttft_and_not_the_length_of_the_answer_ranks() -> None:
    """litellm#40202"""
    state = seen(seen(RouterState(), "tiny", 0.1, tpot_s=0.001), "mini", 0.4, tpot_s=0.0001)
    ttft = {candidate.target: candidate.ttft_ms for candidate in ask(state=state, ttft_ms=450).candidates}
    assert ttft["tiny"] == pytest.approx(100) and ttft["mini"] == pytest.approx(400)


def test_prediction_grows_with_the_prompt() -> None:
    state = RouterState()
    for tokens in (100, 500, 1000, 2000, 4000):
        state["tiny"].observe(tokens, 0.05 + tokens / 1000, 0.02)
    predicted = state["tiny"].predict(3000)
    assert predicted is not None and predicted.ttft_ms == pytest.approx(3050, rel=0.05)


def test_nothing_observed_is_none_and_nonsense_is_refused() -> None:
    state = RouterState()
    assert state["x"].predict(10) is None
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="ttft_s"):
            state["x"].observe(10, bad)
    with pytest.raises(ValueError, match="without begin"):
        state["x"].end()


@settings(deadline=None)
@given(
    prompt_tokens=st.integers(1, 3000),
    max_tokens=st.none() | st.integers(1, 3000),
    ttft_ms=st.none() | st.floats(1, 5000),
    tpot_ms=st.none() | st.floats(1, 500),
    observed=st.lists(
        st.tuples(
            st.sampled_from(["mini", "tiny"]), st.integers(0, 5000), st.floats(0, 100), st.none() | st.floats(0, 9)
        )
    ),
)
def test_the_same_inputs_give_the_same_decision(
    prompt_tokens: int,
    max_tokens: int | None,
    ttft_ms: float | None,
    tpot_ms: float | None,
    observed: list[tuple[str, int, float, float | None]],
) -> None:
    policy = load(POLICY)
    profile = Profile("chat", prompt_tokens, False, max_tokens, Goals(ttft_ms, tpot_ms))

    def once() -> Decision | None:
        state = RouterState()
        for target, tokens, ttft_s, tpot_s in observed:
            state[target].observe(tokens, ttft_s, tpot_s)
        try:
            return decide(policy, profile, state, random.Random(1))
        except NoCandidate:
            return None

    decision = once()
    assert decision == once()
    if decision is None:
        return
    assert set(decision.order) == {candidate.target for candidate in decision.candidates if candidate.kept}
    header = decision.header()
    assert len(header) <= 256 and header.isascii() and header.isprintable()
    json.dumps(decision.to_dict(), allow_nan=False)
    for candidate in decision.candidates:
        assert candidate.p_meet is None or 0 <= candidate.p_meet <= 1
        assert candidate.reason


def test_a_header_is_short_and_ascii_whatever_the_names() -> None:
    text = POLICY.replace("tiny", "größe-" + "x" * 300)
    header = ask(text).header()
    assert len(header) == 256 and header.isascii()


def test_a_failing_check_says_what_was_expected_and_what_came() -> None:
    (failure,) = policies.check(load(POLICY.replace("expect: {target: mini", "expect: {target: tiny")))
    assert str(failure).startswith("p.yaml:17: expected target 'tiny', class 'default', got target 'mini'")
    text = POLICY.replace("prompt_tokens: 60", "prompt_tokens: 60, max_tokens: 99999")
    (failure,) = policies.check(load(text.replace("tiny: {provider: own", "tiny: {provider: own, context: 5")))
    assert "got no target" in str(failure)


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("word " * 100, 90, 160),
        ("深度学习模型" * 20, 100, 160),
        ("", 1, 10),
        ("x", 1, 10),
    ],
)
def test_estimates_are_in_the_range(text: str, low: int, high: int) -> None:
    body = {"messages": [{"role": "user", "content": text}]}
    assert low <= policies.estimate_prompt_tokens("chat.completions", body).tokens <= high


def test_token_ids_are_counted() -> None:
    assert policies.estimate_prompt_tokens("completions", {"prompt": [1, 2, 3]}).tokens == 3


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)


@given(messages=_JSON, prompt=_JSON, tools=_JSON)
def test_any_json_has_an_estimate(messages: Any, prompt: Any, tools: Any) -> None:
    body = {"messages": messages, "prompt": prompt, "tools": tools}
    for surface in ("chat.completions", "completions"):
        assert policies.estimate_prompt_tokens(surface, body).tokens >= 1
