"""Where requests go, when workers change sides, how long KV is kept, when slow transfers are told of: no processes, no
clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.disagg.engine.step_time import UNKNOWN
from backends.disagg.leases import Leases
from backends.disagg.placement import Asked, Load, Place, choose
from backends.disagg.planner import Planner, Pressure
from backends.disagg.transfers import ALARM_S, PairSpeed

STEP = (0.014, 0.0005, 0.000002, 0.001, 0.0)
"""14 ms a step, 0.5 ms a stream, 2 µs a token of context, 1 ms a prompt token: about what one core gives SmolLM2."""
TOKEN_BYTES = 23_040
SHARED = PairSpeed(4e9)
SLOW = PairSpeed(1.25e6)
"""10 Mbit/s."""


def load(worker: str, uncached: int, *, backlog: int = 0, decoding: int = 0) -> Load[str]:
    return Load(worker, STEP, 512, backlog, 0.0, decoding, decoding * 300, uncached)


def asked(prompt: int, max_tokens: int = 200, ttft_s: float | None = None, tpot_s: float | None = None) -> Asked:
    return Asked(prompt, max_tokens, TOKEN_BYTES, ttft_s, tpot_s)


def place(
    ask: Asked, prefill: Load[str], decode: Load[str], pair: PairSpeed = SHARED, *, local: bool = True
) -> Place[str]:
    return choose(ask, [prefill], [decode], {}, pair, local=local)


def test_a_long_prompt_is_computed_away_from_streams_that_would_wait_for_it() -> None:
    went = place(asked(1500), load("p", 1500), load("d", 1500, decoding=4))
    assert (went.prefill, went.decode) == ("p", "d")


def test_a_prompt_that_is_nearly_all_cached_where_it_is_decoded_stays_there() -> None:
    """The article's condition: uncached tokens count, not the prompt's length."""
    went = place(asked(1500), load("p", 1500), load("d", 3, decoding=4))
    assert (went.prefill, went.decode) == (None, "d")


def test_a_prefix_draws_a_prompt_to_the_worker_that_has_it() -> None:
    loads = [load("p0", 1500), load("p1", 40), load("p2", 1500)]
    went = choose(asked(1500), loads, [load("d", 1500, decoding=4)], {}, SHARED, local=True)
    assert went.prefill == "p1"


def test_no_prompt_is_left_beside_streams_whose_promise_has_no_time_for_it() -> None:
    """A worker begins none there: eight tokens would wait until a stream is done."""
    streams = load("d", 8, decoding=4)
    assert place(asked(8, tpot_s=0.100), load("p", 8, backlog=400), streams).prefill is None
    assert place(asked(8, tpot_s=0.020), load("p", 8, backlog=400), streams).prefill == "p"


def test_long_prompts_take_longer_than_their_tokens_do_alone() -> None:
    """Attention: each token looks at all before it."""
    step = (0.014, 0.0005, 0.000002, 0.001, 0.0000005)
    places = [
        choose(
            asked(tokens),
            [Load("p", step, 512, 0, 0.0, 0, 0, tokens)],
            [load("d", tokens, decoding=4)],
            {},
            SHARED,
            local=False,
        )
        for tokens in (1000, 2000)
    ]
    assert places[0].ttft_s == pytest.approx(1.25 + 1000 / 512 * 0.014)
    assert places[1].ttft_s == pytest.approx(3.0 + 2000 / 512 * 0.014)


def test_a_short_prompt_is_not_sent_over_a_slow_link() -> None:
    ask = asked(100)
    assert place(ask, load("p", 100), load("d", 100, decoding=1), SHARED).prefill == "p"
    assert place(ask, load("p", 100), load("d", 100, decoding=1), SLOW).prefill is None


def test_splitting_is_measured_against_not_splitting_and_left_where_it_is_slower() -> None:
    """sglang#24488: P/D slower than colocated. The place says what was predicted of it."""
    slow_pair = place(asked(1500), load("p", 1500), load("d", 1500), SLOW)
    assert slow_pair.prefill is None and slow_pair.ttft_s == pytest.approx(1.54, abs=0.05)


def test_a_long_queue_before_the_prefill_workers_lets_an_idle_decode_worker_help() -> None:
    ask = asked(300)
    assert place(ask, load("p", 300, backlog=6000), load("d", 300)).prefill is None
    assert place(ask, load("p", 300, backlog=6000), load("d", 300), local=False).prefill == "p", "where it is told to"


def test_a_promise_of_time_per_token_that_decode_workers_cannot_keep_spreads_streams_to_others() -> None:
    ask = asked(50, tpot_s=0.020)
    went = place(ask, load("p", 50), load("d", 50, decoding=12))
    assert went.decode == "p"


def test_an_alarm_on_one_pair_sends_requests_by_another() -> None:
    slow = PairSpeed(4e9)
    for _ in range(8):
        slow.observe(30_000_000, 0.4, 0.4, 1.0)
    assert slow.alarm
    pairs = {("p0", "d"): slow}
    went = choose(
        asked(800), [load("p0", 800), load("p1", 800)], [load("d", 800, decoding=4)], pairs, SHARED, local=True
    )
    assert went.prefill == "p1"


def test_alike_workers_share_the_streams_though_they_were_measured_a_little_different() -> None:
    fast = Load("d0", (0.0095, 0.0009, 0.00001, 0.001, 0.0), 512, 0, 0.0, 3, 900, 500)
    went = choose(asked(500), [load("p", 500)], [fast, load("d1", 500)], {}, SHARED, local=False)
    assert went.decode == "d1"


@given(
    prompt=st.integers(1, 8000),
    backlogs=st.lists(st.integers(0, 20000), min_size=0, max_size=4),
    decoding=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    tpot_s=st.sampled_from([None, 0.001, 0.02, 1.0]),
    known=st.booleans(),
    local=st.booleans(),
)
def test_every_request_gets_a_place(
    prompt: int, backlogs: list[int], decoding: list[int], tpot_s: float | None, known: bool, local: bool
) -> None:
    """Whatever the loads, and though nothing is known yet of anybody's speed."""
    step = STEP if known else UNKNOWN
    prefill = [Load(f"p{i}", step, 512, backlog, 0.0, 0, 0, prompt) for i, backlog in enumerate(backlogs)]
    decode = [Load(f"d{i}", step, 512, 0, 0.0, count, count * 100, prompt) for i, count in enumerate(decoding)]
    went = choose(asked(prompt, tpot_s=tpot_s), prefill, decode, {}, SHARED, local=local)
    assert went.decode in {one.worker for one in (*decode, *(prefill if local else ()))}
    assert went.prefill in {None, *(one.worker for one in prefill)}
    assert went.prefill is not None or local or not prefill
    assert went.cost >= 0 and went.ttft_s >= 0


# --- transfers ---------------------------------------------------------------------------------------


def test_one_slow_transfer_is_no_alarm_several_are_and_it_ends_only_when_all_are_fast() -> None:
    pair = PairSpeed(1e9)
    changes = []
    for exposed_s in (0.001, 0.2, 0.001, 0.06, 0.07):
        changes.append(pair.observe(10_000_000, 0.01, exposed_s, 0.0))
    assert changes == [False, False, False, False, True] and pair.alarm
    for exposed_s in (0.045, 0.03, 0.03, 0.03, 0.03, 0.03, 0.03, 0.03):
        assert not pair.observe(10_000_000, 0.01, exposed_s, 0.0), "45 ms is below the limit, but not clearly"
    assert pair.observe(10_000_000, 0.01, 0.03, 0.0) and not pair.alarm


@given(st.lists(st.floats(0, 1), max_size=60))
def test_the_alarm_does_not_flutter(exposed: list[float]) -> None:
    pair = PairSpeed(1e9)
    since = 8
    for exposed_s in exposed:
        changed = pair.observe(10_000_000, 0.01, exposed_s, 0.0)
        if changed:
            assert since >= 3, "raised or ended by fewer transfers than it takes"
            assert (exposed_s > ALARM_S) == pair.alarm
            since = 0
        since += 1


def test_a_link_is_as_fast_as_it_was_measured() -> None:
    pair = PairSpeed(4e9)
    for _ in range(20):
        pair.observe(30_000_000, 2.4, 2.4, 0.0)
    assert pair.exposed_s(30_000_000, 0.0) == pytest.approx(2.4, rel=0.1)
    assert pair.exposed_s(30_000_000, 2.0) == pytest.approx(0.4, rel=0.3), "computing the prompt hides the rest"


# --- leases ------------------------------------------------------------------------------------------


def test_a_lease_that_is_alive_hides_none_that_has_ended() -> None:
    """vllm#58222: the reaper meets a live lease first; vllm#46283, sglang#39428: nobody speaks for the others."""
    leases = Leases(10.0)
    for request in (1, 2, 3):
        leases.begin(request, now=0.0)
    leases.extend([1, 99], now=9.0)
    assert leases.ended(10.5) == [2, 3]
    leases.drop(2), leases.drop(3)
    assert leases.requests() == [1]
    assert leases.ended(19.5) == [1]


# --- the planner -------------------------------------------------------------------------------------


def pressures(wait_s: float, slowdown: float, prefill: int = 2, decode: int = 2) -> list[Pressure]:
    return [Pressure(f"p{i}", "prefill", wait_s, 1.0, i) for i in range(prefill)] + [
        Pressure(f"d{i}", "decode", 0.0, slowdown, 5 - i) for i in range(decode)
    ]


def test_a_worker_changes_sides_when_one_pool_is_short_for_a_while_and_the_other_is_not() -> None:
    planner = Planner()
    assert [planner.look(pressures(3.0, 1.1), now) for now in (0.0, 2.0, 4.0)] == [None, None, "d1"]
    assert [planner.look(pressures(3.0, 1.1), now) for now in (6.0, 8.0, 10.0, 30.0)] == [None] * 4, "it rests"
    assert planner.look(pressures(3.0, 1.1), 40.0) == "d1"
    planner = Planner()
    assert [planner.look(pressures(0.0, 4.0), now) for now in (0.0, 2.0, 4.0)] == [None, None, "p0"]


@pytest.mark.parametrize(
    "loads",
    [
        pressures(3.0, 4.0),
        pressures(0.5, 1.1),
        pressures(3.0, 1.1, decode=1),
        pressures(0.0, 4.0, prefill=1),
        pressures(3.0, 1.1, prefill=0),
    ],
    ids=["both are short", "neither is", "the last decode worker", "the last prefill worker", "no pools"],
)
def test_a_worker_stays_where_it_is_when_that_would_not_help(loads: list[Pressure]) -> None:
    planner = Planner()
    assert [planner.look(loads, 2.0 * look) for look in range(10)] == [None] * 10


def test_a_short_burst_flips_nobody() -> None:
    planner = Planner()
    looks = [pressures(3.0, 1.1), pressures(3.0, 1.1), pressures(0.0, 1.0)] * 5
    assert [planner.look(loads, 2.0 * at) for at, loads in enumerate(looks)] == [None] * 15
