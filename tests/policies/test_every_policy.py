"""Whatever can be loaded decides every request, and what explaining says is what happens next."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies import NEEDS, Forecast, Goals, Overrides, Profile
from policies.choose import BY_GOALS, BY_WEIGHTS, CHOOSERS, EXPLORING
from policies.conditions import NUMBERS
from router.errors import RouterError
from router.execution import Executor
from tests.policies.test_loading import load

NAMES = ("a", "b", "c", "d")
_number = st.integers(0, 5000)
_test = st.one_of(
    st.builds(
        lambda name, op, value: {name: {op: value}}, st.sampled_from(NUMBERS), st.sampled_from(["lt", "gte"]), _number
    ),
    st.builds(lambda flag: {"stream": flag}, st.booleans()),
    st.builds(lambda need: {"needs": need}, st.sampled_from(NEEDS)),
    st.builds(lambda key: {"key": key}, st.sampled_from(["team-a", "team-b"])),
)
_when = st.recursive(
    _test,
    lambda inner: st.one_of(
        st.builds(lambda parts: {"any": parts}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda one: {"not": one}, inner),
    ),
    max_leaves=5,
)


@st.composite
def rules(draw: st.DrawFn, *, last: bool) -> dict[str, Any]:
    names = draw(st.permutations(NAMES))
    count = draw(st.integers(1, 3))
    choose = draw(st.sampled_from(sorted(CHOOSERS)))
    rule: dict[str, Any] = {"candidates": names[:count], "choose": choose}
    if not last:
        rule["when"] = draw(_when)
    if choose in BY_GOALS and draw(st.booleans()):
        rule["slo"] = {"ttft_ms": draw(st.integers(1, 2000)), "at": draw(st.sampled_from(["p50", "p99"]))}
    if choose in BY_WEIGHTS and draw(st.booleans()):
        rule["weights"] = {names[0]: draw(st.integers(1, 9))}
    if choose in EXPLORING and draw(st.booleans()):
        rule["explore"] = draw(st.sampled_from([0, 1, 100]))
    if draw(st.booleans()):
        rule["canary"] = {"target": names[3], "percent": draw(st.sampled_from([5, 100]))}
    return rule


@st.composite
def targets(draw: st.DrawFn) -> dict[str, Any]:
    target: dict[str, Any] = {"provider": draw(st.sampled_from(["own", "hosted"])), "model": "m"}
    if draw(st.booleans()):
        target["context"] = draw(st.integers(10, 4000))
    if draw(st.booleans()):
        target["price"] = {"input": draw(st.integers(0, 9)), "output": draw(st.integers(0, 9))}
    if draw(st.booleans()):
        target["capabilities"] = draw(st.lists(st.sampled_from(sorted(set(NEEDS) - {"embeddings"})), unique=True))
    if draw(st.booleans()):
        target["limits"] = {"concurrency": draw(st.integers(1, 3))}
    return target


_policies = st.builds(
    lambda first, last, made: {
        "version": 1,
        "providers": {name: {"type": "openai", "base_url": "http://127.0.0.1:9/v1"} for name in ("own", "hosted")},
        "targets": dict(zip(NAMES, made, strict=True)),
        "routes": {"chat": [*first, last]},
    },
    st.lists(rules(last=False), max_size=3),
    rules(last=True),
    st.lists(targets(), min_size=len(NAMES), max_size=len(NAMES)),
)
_profiles = st.builds(
    Profile,
    model=st.just("chat"),
    prompt_tokens=st.integers(1, 5000),
    max_tokens=st.none() | st.integers(1, 3000),
    goals=st.builds(Goals, st.none() | st.floats(1, 5000), st.none() | st.floats(1, 500)),
    stream=st.booleans(),
    priority=st.none() | st.floats(0, 10),
    needs=st.frozensets(st.sampled_from(sorted(NEEDS)), max_size=2),
    key=st.none() | st.just("team-a"),
    session=st.none() | st.text(max_size=4),
    prefix=st.none() | st.text(max_size=4),
    forecasts=st.dictionaries(
        st.sampled_from(NAMES), st.builds(Forecast, st.integers(0, 9), st.floats(0, 9e3), st.floats(0, 99))
    ),
    overrides=st.builds(
        Overrides,
        order=st.lists(st.sampled_from(NAMES), max_size=2).map(tuple),
        ignore=st.lists(st.sampled_from(NAMES), max_size=2).map(tuple),
        sort=st.sampled_from([None, "price", "latency", "throughput"]),
        allow_fallbacks=st.booleans(),
    ),
)
_observed = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(0, 5000), st.floats(0, 100), st.floats(0, 9)), max_size=20
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(written=_policies, profiles=st.lists(_profiles, min_size=1, max_size=4), observed=_observed)
def test_every_policy_decides_every_request_and_explaining_foresees_it(
    written: dict[str, Any], profiles: list[Profile], observed: list[tuple[str, int, float, float]]
) -> None:
    policy = load(json.dumps(written))
    executor = Executor(policy, {})
    for target, tokens, ttft_s, tpot_s in observed:
        executor.state[target].observe(tokens, ttft_s, tpot_s)
    for profile in profiles:
        try:
            explained = executor.decide(profile)
        except RouterError as refused:
            decision = refused.decision
            assert decision is not None and decision.candidates and not decision.order
            assert all(candidate.reason for candidate in decision.candidates)
            continue
        live = executor.choose(profile)
        assert live == explained and live.order[0] in {one.target for one in live.candidates if one.kept}
        for name in live.order:
            able = policy.targets[name].capabilities
            assert able is None or profile.needs <= able
