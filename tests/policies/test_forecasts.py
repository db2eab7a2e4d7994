"""A P/D cluster's own forecasts: believed as far as they have come true."""

from __future__ import annotations

import random
from typing import Any

import pytest

from policies import Decision, Forecast, Profile, RouterState, decide
from tests.policies.test_loading import load

POLICY = """\
version: 1
providers:
  api: {type: openai, base_url: "http://127.0.0.1:9/v1"}
  own: {type: disagg, model: tiny}
targets:
  own: {provider: own}
  mini: {provider: api, model: m, price: {input: 1, output: 2}}
routes:
  chat:
    - {when: {uncached_tokens: {gte: 1000}}, candidates: [mini], choose: in-order}
    - {candidates: [own, mini], choose: cheapest-meeting-slo, slo: {ttft_ms: 500, at: p90}}
"""


def _decide(state: RouterState, ttft_ms: float, **more: Any) -> Decision:
    forecasts = {"own": Forecast(50, ttft_ms, 20.0)}
    profile = Profile("chat", more.pop("prompt_tokens", 50), forecasts=forecasts, **more)
    return decide(load(POLICY), profile, state, random.Random(0))


def test_a_queue_that_the_cluster_knows_of_is_heeded_at_once() -> None:
    state = RouterState()
    for _ in range(20):
        state["own"].observe(50, 0.2, 0.02, forecast=Forecast(50, 200.0, 20.0))
        state["mini"].observe(50, 0.4, 0.02)
    assert _decide(state, ttft_ms=200.0).order[0] == "own"
    queued = _decide(state, ttft_ms=2000.0)
    assert queued.order[0] == "mini", "it was always fast, and will not be now"
    assert queued.candidates[0].ttft_ms == pytest.approx(2000.0)
    assert queued.candidates[0].p_meet == 0.0


def test_forecasts_that_were_always_half_of_what_came_are_doubled() -> None:
    state = RouterState()
    for _ in range(20):
        state["own"].observe(50, 0.4, 0.02, forecast=Forecast(50, 200.0, 20.0))
    (own, _) = _decide(state, ttft_ms=300.0).candidates
    assert own.ttft_ms == pytest.approx(600.0) and own.p_meet == 0.0
    assert _decide(state, ttft_ms=240.0).candidates[0].p_meet == pytest.approx(1.0)


def test_a_forecast_alone_is_shown_and_claims_no_chance() -> None:
    (own, _) = _decide(RouterState(), ttft_ms=123.0).candidates
    assert own.ttft_ms == 123.0 and own.p_meet is None


def test_what_is_cached_counts_for_conditions() -> None:
    state = RouterState()
    assert _decide(state, 100.0, prompt_tokens=5000).order == ("mini",)
    assert "own" in _decide(state, 100.0, prompt_tokens=5000, uncached_tokens=200).order


def test_how_far_forecasts_were_off_survives_a_restart() -> None:
    policy, state, later = load(POLICY), RouterState(), RouterState()
    for _ in range(20):
        state["own"].observe(50, 0.4, 0.02, forecast=Forecast(50, 200.0, 20.0))
    assert later.restore(state.saved(policy), policy) == ["own"]
    assert _decide(later, 240.0).to_dict() == _decide(state, 240.0).to_dict()
    broken = state.saved(policy)
    broken["own"]["learned"]["foreseen"] = 5
    with pytest.raises(ValueError, match="forecasts"):
        RouterState().restore(broken, policy)
