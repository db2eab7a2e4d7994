"""Each way to choose, by what its users rely on: shares, turns, loads, prices, latencies, and who stays where."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import Decision, Goals, PolicyError, Profile, RouterState, decide, prefix_of
from policies.choose import CHOOSERS
from tests.policies.test_loading import load

TARGETS = ("a", "b", "c")


def policy(rule: str, prices: dict[str, float] | None = None) -> str:
    prices = prices or {}
    targets = "".join(
        f"  {name}: {{provider: own, model: {name}"
        + (f", price: {{input: {prices[name]}, output: {prices[name]}}}" if name in prices else "")
        + "}\n"
        for name in TARGETS
    )
    return (
        "version: 1\n"
        "providers:\n"
        '  own: {type: openai, base_url: "http://127.0.0.1:9/v1"}\n'
        f"targets:\n{targets}"
        "routes:\n"
        f"  chat: [{{candidates: [a, b, c], {rule}}}]\n"
    )


class Asking:
    """Requests one after another, each decision carried out."""

    def __init__(self, rule: str, **prices: float) -> None:
        self.policy = load(policy(rule, prices))
        self.state = RouterState()
        self.rng = random.Random(0)

    def decide(self, **facts: Any) -> Decision:
        goals = Goals(facts.pop("ttft_ms", None), facts.pop("tpot_ms", None))
        profile = Profile(**{"model": "chat", "prompt_tokens": 50, "goals": goals, **facts})
        decision = decide(self.policy, profile, self.state, self.rng)
        self.state.sent(decision)
        return decision

    def first(self, **facts: Any) -> str:
        return self.decide(**facts).order[0]

    def seen(self, target: str, ttft_s: float, tpot_s: float = 0.02) -> None:
        for _ in range(20):
            self.state[target].observe(50, ttft_s, tpot_s)


def test_round_robin_gives_each_its_turn_and_explaining_takes_none() -> None:
    asking = Asking("choose: round-robin")
    assert [asking.first() for _ in range(4)] == ["a", "b", "c", "a"]
    for _ in range(5):
        assert decide(asking.policy, Profile("chat", 50), asking.state, random.Random(0)).order == ("b", "c", "a")


def test_weights_are_shares_and_zero_is_only_for_need() -> None:
    asking = Asking("choose: weighted, weights: {a: 8, b: 2, c: 0}")
    counted = Counter(asking.first() for _ in range(2000))
    assert 0.77 < counted["a"] / 2000 < 0.83 and counted["c"] == 0
    assert asking.decide().order[2] == "c"


def test_the_least_busy_has_the_fewest_under_way_for_its_weight() -> None:
    asking = Asking("choose: least-busy, weights: {c: 4}")
    for target, count in (("a", 1), ("b", 2), ("c", 3)):
        for _ in range(count):
            asking.state[target].begin()
    assert asking.decide().order == ("c", "a", "b")


def test_the_cheapest_is_the_cheapest_and_no_price_is_not_free() -> None:
    asking = Asking("choose: cheapest", a=3.0, c=1.0)
    assert asking.decide().order == ("c", "a", "b")


def test_the_fastest_is_whoever_gives_the_first_token_or_the_answer_sooner_as_asked() -> None:
    """litellm#40202: a long answer is no slow target."""
    asking = Asking("choose: lowest-latency")
    asking.seen("a", 0.5, 0.010)
    asking.seen("b", 0.2, 0.050)
    assert asking.first(ttft_ms=1000) == "b"
    assert asking.first(max_tokens=200) == "a"
    assert asking.decide().order[2] == "c", "nothing is known of it"


def test_the_likeliest_keeps_the_goal_whatever_it_costs() -> None:
    asking = Asking("choose: most-likely-to-meet-slo, slo: {ttft_ms: 300}", a=1.0, b=9.0, c=1.0)
    asking.seen("a", 0.4)
    asking.seen("b", 0.1)
    decision = asking.decide()
    assert decision.order == ("b", "c", "a"), "one known to keep it, one unknown, one known not to"


def test_a_session_stays_and_only_its_crowd_moves_it() -> None:
    asking = Asking("choose: sticky")
    homes = {session: asking.first(session=session) for session in map(str, range(300))}
    assert set(Counter(homes.values())) == set(TARGETS)
    assert all(60 < count < 140 for count in Counter(homes.values()).values())
    assert {session: asking.first(session=session) for session in homes} == homes
    home = homes["7"]
    for _ in range(5):
        asking.state[home].begin()
    decision = asking.decide(session="7")
    assert decision.order[0] != home and "crowded" in decision.reason
    assert asking.first() != home, "without a session, the least busy"


def test_when_a_target_leaves_only_its_sessions_move() -> None:
    before = Asking("choose: sticky")
    text = policy("choose: sticky").replace("[a, b, c]", "[a, c]")
    after = load(text)
    for session in map(str, range(100)):
        home = before.first(session=session)
        moved = decide(after, Profile("chat", 50, session=session), RouterState(), random.Random(0)).order[0]
        assert home == "b" or moved == home


def test_prompts_that_begin_alike_go_together() -> None:
    asking = Asking("choose: prefix-affinity")
    system = {"role": "system", "content": "You are the assistant of a river museum. " * 40}

    def prefix(question: str, begins: dict[str, str] = system) -> str:
        return prefix_of("chat.completions", {"messages": [begins, {"role": "user", "content": question}]})

    assert prefix("How long is the Nile?") == prefix("And the Rhine?")
    assert prefix("Hi", {"role": "system", "content": "x"}) != prefix("Hi")
    assert len({asking.first(prefix=prefix(str(number))) for number in range(10)}) == 1
    tools = prefix_of("chat.completions", {"tools": [1], "messages": [system]})
    assert tools != prefix_of("chat.completions", {"tools": [2], "messages": [system]})
    assert prefix_of("completions", {"prompt": [1, 2, 3]}) != prefix_of("completions", {"prompt": [1, 2, 4]})


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("choose: weighted, weights: {a: 0, b: 0, c: 0}", "leave nobody: all are 0"),
        ("choose: weighted, weights: {d: 1}", "unknown key 'd' in 'weights'"),
        ("choose: weighted, weights: {a: -1}", "the weight of 'a' must be a number of at least 0, not -1"),
        ("choose: weighted, weights: 3", "'weights' of a rule of route 'chat' must be a mapping, not 3"),
        ("choose: cheapest, weights: {a: 1}", "'weights' have no effect with choose: cheapest"),
        ("choose: round-robin, slo: {ttft_ms: 5}", "'slo' has no effect with choose: round-robin"),
        ("choose: least-bsy", "did you mean 'least-busy'?"),
    ],
)
def test_what_a_rule_cannot_mean_is_refused(rule: str, said: str) -> None:
    with pytest.raises(PolicyError) as refused:
        load(policy(rule))
    assert said in str(refused.value)


@given(
    choose=st.sampled_from(sorted(CHOOSERS)),
    loads=st.lists(st.integers(0, 30), min_size=3, max_size=3),
    known=st.lists(st.sampled_from([None, 0.05, 0.5, 5.0]), min_size=3, max_size=3),
    session=st.sampled_from([None, "s1", "s2"]),
    seed=st.integers(0, 1000),
)
def test_every_choice_orders_everybody_and_does_so_again_when_asked_the_same(
    choose: str, loads: list[int], known: list[float | None], session: str | None, seed: int
) -> None:
    """Whatever is known; a decision changes nothing, and explaining it gives the one that will be carried out."""
    loaded, state = load(policy(f"choose: {choose}")), RouterState()
    for target, load_, ttft_s in zip(TARGETS, loads, known, strict=True):
        for _ in range(load_):
            state[target].begin()
        for _ in range(10):
            if ttft_s is not None:
                state[target].observe(50, ttft_s, 0.02)
    profile = Profile("chat", 50, goals=Goals(300), session=session, prefix=session)
    explained = decide(loaded, profile, state, random.Random(seed))
    carried_out = decide(loaded, profile, state, random.Random(seed))
    assert explained == carried_out
    assert sorted(explained.order) == list(TARGETS)
    assert explained.reason and all(candidate.reason for candidate in explained.candidates)


@pytest.mark.parametrize(("percent", "tries"), [(0, 0), (2, 20), (10, 100)])
def test_exploring_costs_no_more_than_the_rule_says(percent: float, tries: int) -> None:
    asking = Asking(f"choose: cheapest-meeting-slo, slo: {{ttft_ms: 300}}, explore: {percent}", a=1.0, b=9.0, c=99.0)
    asking.seen("a", 0.9)
    asking.seen("b", 0.1)
    asking.seen("c", 0.1)
    firsts = []
    for _ in range(1000):
        firsts.append(asking.first())
        asking.state[firsts[-1]].observe(50, 0.9 if firsts[-1] == "a" else 0.1, 0.02)
    assert tries * 0.8 <= firsts.count("a") <= tries
