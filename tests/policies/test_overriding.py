"""What a request needs and what it may change: needs are met or refused, overrides mean what OpenRouter's do."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import (
    NEEDS,
    OVERRIDES,
    Decision,
    Goals,
    NoCandidate,
    Overrides,
    Policy,
    PolicyError,
    Price,
    Profile,
    RouterState,
    decide,
    needs_of,
)
from router.errors import RouterError
from router.overrides import check_allowed, read_overrides
from tests.policies.test_loading import load

POLICY = """\
version: 1
providers:
  big:   {type: openai, base_url: "http://127.0.0.1:9/v1"}
  small: {type: openai, base_url: "http://127.0.0.1:9/v1"}
  own:   {type: disagg, model: tiny-llm}
targets:
  gpt:  {provider: big, model: gpt, price: {input: 5, output: 15}, capabilities: [tools, vision, json-schema]}
  mini: {provider: small, model: mini, price: {input: 1, output: 2}, data_collection: deny, expect: {tpot_ms: 50}}
  tiny: {provider: own, expect: {ttft_ms: 2000, tpot_ms: 20}}
routes:
  chat: [{candidates: [mini, gpt, tiny], choose: in-order}]
"""


def ask(text: str = POLICY, state: RouterState | None = None, **facts: Any) -> Decision:
    profile = Profile(**{"model": "chat", "prompt_tokens": 50, **facts})
    return decide(load(text), profile, state or RouterState(), random.Random(0))


def over(**overrides: Any) -> Decision:
    return ask(overrides=Overrides(**overrides))


@pytest.mark.parametrize(
    ("body", "needs"),
    [
        ({}, set()),
        ({"tools": [{"type": "function"}]}, {"tools"}),
        ({"tools": [{}], "tool_choice": "none"}, set()),
        ({"response_format": {"type": "json_schema"}}, {"json-schema"}),
        ({"response_format": {"type": "json_object"}}, {"json"}),
        ({"messages": [{"content": [{"type": "image_url"}, {"type": "text"}]}]}, {"vision"}),
        ({"messages": [{"content": [{"type": "input_audio"}, {"type": "file"}]}]}, {"audio", "files"}),
        ({"logprobs": True}, {"logprobs"}),
        ({"messages": [None, {"content": [3, {"type": []}]}], "response_format": 3, "tools": 0}, set()),
    ],
)
def test_needs_are_read_from_the_body(body: dict[str, Any], needs: set[str]) -> None:
    assert needs_of(body) == needs


def test_a_target_without_what_is_needed_is_dropped_and_one_that_says_nothing_may_have_it() -> None:
    decision = ask(needs=frozenset({"vision"}))
    assert decision.order == ("mini", "gpt")
    assert decision.candidates[2].reason == "it has no vision"
    strict = ask(needs=frozenset({"vision"}), overrides=Overrides(require_parameters=True))
    assert strict.order == ("gpt",)
    assert "requires that to be declared" in strict.candidates[0].reason


def test_only_and_ignore_name_targets_or_providers() -> None:
    assert over(only=("own", "gpt")).order == ("gpt", "tiny")
    assert over(ignore=("small",)).order == ("gpt", "tiny")
    with pytest.raises(NoCandidate, match="asks for only gpt") as refused:
        over(only=("gpt",), ignore=("gpt",))
    assert refused.value.kinds == {"overrides"}


def test_order_puts_first_and_fallbacks_can_be_declined() -> None:
    assert over(order=("own", "mini")).order == ("tiny", "mini", "gpt")
    decision = over(order=("gpt",), allow_fallbacks=False)
    assert decision.order == ("gpt",)
    assert decision.reason == "gpt is what the request asks for first"
    missing = ask(needs=frozenset({"vision"}), overrides=Overrides(order=("tiny",)))
    assert missing.order == ("mini", "gpt")
    assert "what the request asks for first is no candidate that can take it" in missing.reason


def test_sort_replaces_the_rules_choice() -> None:
    assert over(sort="price").order == ("tiny", "mini", "gpt")
    assert over(sort="throughput").order == ("tiny", "mini", "gpt")
    decision = over(sort="latency")
    assert decision.order[0] == "tiny" and decision.choose == "lowest-latency"


def test_who_costs_more_than_max_price_or_has_none_is_dropped() -> None:
    assert over(max_price=Price(2, 10)).order == ("mini", "tiny")
    assert over(max_price=Price(float("inf"), 3)).order == ("mini", "tiny")
    unpriced = POLICY.replace("price: {input: 1, output: 2}, ", "")
    decision = ask(unpriced, overrides=Overrides(max_price=Price(9, 99)))
    assert decision.order == ("gpt", "tiny") and "its price is unknown" in decision.candidates[0].reason


def test_the_slow_come_last_not_out() -> None:
    assert over(preferred_max_latency_ms=1000, order=()).order == ("mini", "gpt", "tiny")
    assert over(preferred_min_throughput=30).order == ("gpt", "tiny", "mini")


def test_data_that_may_not_be_collected_goes_only_where_none_is() -> None:
    assert over(deny_data_collection=True).order == ("mini", "tiny"), "own hardware keeps nothing"


@given(
    needs=st.frozensets(st.sampled_from(NEEDS)),
    only=st.lists(st.sampled_from(["gpt", "mini", "tiny", "own"]), max_size=2),
    ignore=st.lists(st.sampled_from(["gpt", "mini", "big"]), max_size=2),
    order=st.lists(st.sampled_from(["gpt", "mini", "tiny", "small"]), max_size=3),
    sort=st.sampled_from([None, "price", "latency", "throughput"]),
    fallbacks=st.booleans(),
    strict=st.booleans(),
    price=st.sampled_from([None, Price(1, 2), Price(0, 0)]),
)
def test_who_was_dropped_is_never_chosen_and_needs_are_met(
    needs: frozenset[str],
    only: list[str],
    ignore: list[str],
    order: list[str],
    sort: Any,
    fallbacks: bool,
    strict: bool,
    price: Price | None,
) -> None:
    overrides = Overrides(
        order=tuple(order),
        only=tuple(only),
        ignore=tuple(ignore),
        sort=sort,
        max_price=price,
        allow_fallbacks=fallbacks,
        require_parameters=strict,
    )
    policy: Policy = load(POLICY)
    try:
        decision = decide(
            policy, Profile("chat", 50, needs=needs, overrides=overrides), RouterState(), random.Random(0)
        )
    except NoCandidate as error:
        decision = error.decision
        assert not any(candidate.kept for candidate in decision.candidates)
    kept = {candidate.target for candidate in decision.candidates if candidate.kept}
    assert set(decision.order) <= kept
    assert len(decision.order) == (len(kept) if fallbacks else min(1, len(kept)))
    for name in decision.order:
        target = policy.targets[name]
        assert target.capabilities is None or needs <= target.capabilities
        assert not only or {name, target.provider} & set(only)
        assert not {name, target.provider} & set(ignore)


# --- conditions ---------------------------------------------------------------------------------------


def matched(when: str, **facts: Any) -> bool:
    """Whether a rule with that condition takes the request."""
    rules = f"  chat:\n    - {{when: {when}, candidates: [gpt], choose: in-order}}\n"
    text = POLICY[: POLICY.index("  chat:")] + rules + "    - {candidates: [mini], choose: in-order}\n"
    return ask(text, **facts).order == ("gpt",)


@pytest.mark.parametrize(
    ("when", "facts", "holds"),
    [
        ("{any: [{prompt_tokens: {gte: 100}}, {stream: true}]}", {"stream": True}, True),
        ("{any: [{prompt_tokens: {gte: 100}}, {stream: true}]}", {}, False),
        ("{all: [{prompt_tokens: 50}, {stream: false}]}", {}, True),
        ("{not: {stream: true}}", {}, True),
        ("{not: [{stream: true}, {prompt_tokens: 50}]}", {}, False),
        ("{not: {any: [{stream: true}, {prompt_tokens: 51}]}, prompt_tokens: 50}", {}, True),
        ("{needs: tools}", {"needs": frozenset({"tools", "vision"})}, True),
        ("{needs: [audio, json]}", {"needs": frozenset({"tools"})}, False),
        ("{metadata: {team: search}}", {"metadata": {"team": "search"}}, True),
        ("{metadata: {team: [search, ads]}}", {"metadata": {"team": "ads"}}, True),
        ("{metadata: {team: search}}", {"metadata": {"team": 3}}, False),
        ("{metadata: {team: search}}", {}, False),
        ("{headers: {X-Team: search}}", {"headers": {"x-team": "search"}}, True),
        ("{hour: {gte: 9, lt: 17}, weekday: [mon, tue]}", {"hour": 16.9, "weekday": "tue"}, True),
        ("{hour: {gte: 9, lt: 17}}", {}, False),
        ("{priority: {gte: 5}}", {"priority": 7.0}, True),
        ("{session: vip}", {"session": "vip"}, True),
    ],
)
def test_conditions(when: str, facts: dict[str, Any], holds: bool) -> None:
    assert matched(when, **facts) is holds


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("routes:", "overrides: [order, onyl]\nroutes:"), "unknown override 'onyl' (did you mean 'only'?)"),
        (("routes:", "overrides: 3\nroutes:"), "'overrides' must be a list, not 3"),
        (
            ("routes:", "overrides: {kyes: {a: all}}\nroutes:"),
            "unknown key 'kyes' in 'overrides' (did you mean 'keys'?)",
        ),
        (("routes:", "overrides: {keys: {a: [onyl]}}\nroutes:"), "unknown override 'onyl' (did you mean 'only'?)"),
        (("routes:", "timezone: Europe/Pariss\nroutes:"), "unknown timezone 'Europe/Pariss'"),
        (("capabilities: [tools, vision", "capabilities: [tool, vision"), "unknown capability 'tool'"),
        (("data_collection: deny", "data_collection: never"), "unknown 'data_collection' 'never'"),
        (("[{candidates", "[{when: {any: []}, candidates"), "'any' in 'when' of a rule of route 'chat' is empty"),
        (("[{candidates", "[{when: {any: 3}, candidates"), "'any' in 'when' of a rule of route 'chat' must be a list"),
        (("[{candidates", "[{when: {needs: tool}, candidates"), "unknown need 'tool'"),
        (("[{candidates", "[{when: {weekday: friday}, candidates"), "unknown weekday 'friday'"),
        (("[{candidates", "[{when: {metadata: {}}, candidates"), "the condition on 'metadata' is empty"),
        (("[{candidates", "[{when: {metadata: 3}, candidates"), "'metadata' must be a mapping, not 3"),
        (("[{candidates", "[{when: {not: {hour: {gt: 5, lt: 3}}}, candidates"), "can never hold"),
        (("[{candidates", "[{when: {headers: {x-a: {gt: 5}}}, candidates"), "unknown key 'gt' in the condition on"),
    ],
)
def test_mistakes_are_named(change: tuple[str, str], said: str) -> None:
    assert change[0] in POLICY
    with pytest.raises(PolicyError) as refused:
        load(POLICY.replace(*change))
    assert said in str(refused.value)


def test_the_headers_a_policy_looks_at_are_known_so_that_no_others_are_carried_along() -> None:
    text = POLICY.replace(
        "[{candidates", "[{when: {not: {headers: {X-Team: a}}}, candidates: [gpt], choose: in-order}, {candidates"
    )
    assert load(text).headers_asked_for == {"x-team"}
    assert load(POLICY).headers_asked_for == frozenset()


def test_every_override_has_a_place_in_the_policy() -> None:
    assert load(POLICY).overrides == set(OVERRIDES)
    assert load(POLICY.replace("routes:", "overrides: none\nroutes:")).overrides == set()
    assert load(POLICY.replace("routes:", "overrides: [only]\nroutes:")).overrides == {"only"}
    assert Goals() == Profile("chat", 1).goals


def test_what_a_key_may_change_is_in_the_policy() -> None:
    policy = load(POLICY.replace("routes:", "overrides: {default: none, keys: {team-a: all, b: [only]}}\nroutes:"))
    assert policy.overrides_of(None) == policy.overrides_of("another") == set()
    assert policy.overrides_of("team-a") == set(OVERRIDES)
    asked = {"sort": "price"}
    check_allowed(asked, read_overrides(asked), policy, "team-a")
    with pytest.raises(
        RouterError, match=r"provider\.sort is not for requests by the key 'b' to say .* allowed: only"
    ) as error:
        check_allowed(asked, read_overrides(asked), policy, "b")
    assert error.value.status == 403
