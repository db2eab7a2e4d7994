"""When a target gets nothing, for how long, and who finds out that it is well again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.aimd import Aimd
from policies.breaker import Breaker, BreakerRule

RULE = BreakerRule(failures=3, rate=0.5, window_ms=10_000, open_ms=1000, most_ms=8000)


def test_failures_in_a_row_open_it_and_one_request_finds_out() -> None:
    breaker = Breaker(RULE)
    for now in (0.0, 0.1, 0.2):
        assert breaker.wait_s(now) == 0
        breaker.failed(now, breaker.begin(now), 503, "no")
    assert breaker.opened and 0.8 < breaker.wait_s(0.3) <= 1.0 and "3 in a row" in breaker.why
    assert breaker.wait_s(1.3) == 0 and breaker.begin(1.3), "half-open: the probe"
    assert breaker.wait_s(1.3) > 0, "and nobody beside it"
    breaker.failed(1.4, True, 503, "no")
    assert 1.9 < breaker.wait_s(1.4) <= 2.0, "twice as long"
    assert breaker.begin(3.5)
    breaker.answered(3.6, True)
    assert not breaker.opened and breaker.wait_s(3.6) == 0


def test_a_success_between_failures_keeps_it_closed_until_their_share_is_too_large() -> None:
    breaker = Breaker(RULE)
    for step in range(9):
        breaker.failed(step / 10, False, 500, "no")
        breaker.answered(step / 10, False)
    assert not breaker.opened, "18 requests say nothing of a share"
    breaker.failed(1.0, False, 500, "no")
    breaker.failed(1.0, False, 500, "no")
    assert breaker.opened


def test_what_began_before_the_last_success_is_in_no_row() -> None:
    breaker = Breaker(RULE)
    breaker.answered(1.0, False)
    for _ in range(10):
        breaker.failed(2.0, False, 504, "silent", began_s=0.0)
    assert not breaker.opened
    for _ in range(3):
        breaker.failed(4.0, False, 504, "silent", began_s=2.0)
    assert breaker.opened and "3 in a row" in breaker.why


def test_what_failed_long_ago_does_not_count() -> None:
    breaker = Breaker(RULE)
    for step in range(30):
        breaker.answered(step * 10.0, False)
        breaker.failed(step * 10.0, False, 500, "no")
    assert not breaker.opened


def test_the_latest_of_all_reasons_counts_and_none_shortens_another() -> None:
    """litellm#20722"""
    quota = Breaker(RULE)
    quota.refused(0.0, False, 429, "many", 20.0)
    quota.refused(1.0, False, 429, "many", 5.0)
    assert quota.wait_s(1.0) == 19.0 and quota.status == 429
    quota.answered(2.0, False)
    assert quota.wait_s(2.0) == 18.0, "one that began before does not close it"


def test_a_probe_that_is_given_up_leaves_the_next_one_to_find_out() -> None:
    breaker = Breaker(RULE)
    breaker.refused(0.0, False, 429, "many", 1.0)
    assert breaker.begin(1.5)
    breaker.abandoned(True)
    assert breaker.wait_s(1.5) == 0 and breaker.begin(1.5)


def test_it_can_be_turned_off() -> None:
    breaker = Breaker(BreakerRule(failures=0))
    for step in range(100):
        breaker.failed(step / 100, False, 500, "no")
    assert not breaker.opened


_steps = st.lists(
    st.tuples(
        st.sampled_from(["answered", "failed", "refused", "given up"]), st.floats(0, 5), st.none() | st.floats(0, 30)
    ),
    max_size=60,
)


@given(steps=_steps, at_once=st.integers(1, 4))
def test_never_two_probes_and_never_shut_for_good(steps: list[tuple[str, float, float | None]], at_once: int) -> None:
    breaker, now = Breaker(RULE), 0.0
    under_way: list[bool] = []
    longest = 0.0
    for outcome, later, said in steps:
        now += later
        while len(under_way) < at_once and breaker.wait_s(now) == 0:
            under_way.append(breaker.begin(now))
            assert sum(under_way) <= 1
        if not under_way:
            continue
        probe = under_way.pop(0)
        if outcome == "answered":
            breaker.answered(now, probe)
        elif outcome == "failed":
            breaker.failed(now, probe, 503, "no")
        elif outcome == "refused":
            breaker.refused(now, probe, 429, "many", said)
            longest = max(longest, now + (said or 0.0))
        else:
            breaker.abandoned(probe)
        assert breaker.until_s <= max(longest, now + RULE.most_ms / 1000)
    for probe in under_way:
        breaker.abandoned(probe)
    assert breaker.wait_s(max(now, breaker.until_s)) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 200), st.floats(0, 2)), max_size=200))
def test_a_limit_that_is_found_out_lets_somebody_in(steps: list[tuple[bool, int, float]]) -> None:
    limit, now = Aimd(), 0.0
    for well, inflight, later in steps:
        now += later
        before = limit.limit
        if well:
            limit.answered(inflight)
            assert limit.limit >= before
        else:
            limit.overloaded(now)
            assert 1 <= limit.limit <= before
