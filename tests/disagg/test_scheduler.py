"""The scheduler and the block pool, driven without torch, sockets or a clock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backends.disagg.engine.blocks import BlockPool, prefix_keys
from backends.disagg.engine.promises import PATIENCE_STEPS
from backends.disagg.engine.scheduler import Scheduler, Step
from backends.disagg.engine.sequence import SamplingParams, Sequence, Status
from backends.disagg.engine.step_time import StepLoad

LINEAR = [
    (load, 0.01 + 0.001 * load.batch + 0.00001 * load.context + 0.0005 * load.prompt)
    for load in (
        StepLoad(1, 10),
        StepLoad(8, 80),
        StepLoad(8, 8000),
        StepLoad(prompt=64),
        StepLoad(8, 80, 64),
    )
]
"""Steps of an imagined machine: 10 ms, 1 ms a sequence, 10 µs a token of context, 0.5 ms a prompt token."""


def sequence(id: int, prompt: int, max_tokens: int = 8, **kinds: bool) -> Sequence:
    return Sequence(id, list(range(prompt)), SamplingParams(max_tokens=max_tokens), **kinds)


class Driven(Scheduler):
    predicted = 0.0
    """How long the last step should take."""

    def schedule_and_carry_out(self) -> Step:
        step = self.schedule()
        self.predicted = self.step_time.predict(self.load_of(step))
        carry_out(self, step)
        return step


def scheduler(
    blocks: int = 8, block_size: int = 4, max_batch: int = 8, chunk: int = 8, grain: int | None = None
) -> Driven:
    return Driven(BlockPool(blocks, block_size), max_batch=max_batch, prefill_chunk=chunk, grain=grain)


def carry_out(sched: Scheduler, step: Step) -> None:
    """What the engine does with a step, with token 1 sampled everywhere."""
    for chunk in step.prefill:
        sched.advance(chunk.seq, chunk.length, 1 if chunk.last else None)
    for seq in step.decode:
        sched.advance(seq, 1, 1)


def test_a_prompt_is_computed_in_the_same_chunks_whatever_else_is_served() -> None:
    def chunks_of_second(others: int) -> list[tuple[int, int]]:
        sched = scheduler(blocks=200)
        for id in range(others):
            sched.add(sequence(id, 5, max_tokens=30))
        sched.add(sequence(99, 21))
        seen = []
        for _ in range(40):
            step = sched.schedule()
            seen += [(c.start, c.length) for c in step.prefill if c.seq.id == 99]
            carry_out(sched, step)
        return seen

    assert chunks_of_second(0) == [(0, 8), (8, 8), (16, 5)] == chunks_of_second(5)


def test_a_decoding_sequence_gets_a_token_every_step_while_a_long_prompt_is_computed() -> None:
    sched = scheduler(blocks=100)
    sched.add(sequence(1, 4, max_tokens=50))
    carry_out(sched, sched.schedule())
    sched.add(sequence(2, 64))
    for _ in range(8):
        step = sched.schedule()
        assert [seq.id for seq in step.decode] == [1]
        assert sum(chunk.length for chunk in step.prefill) <= 8
        carry_out(sched, step)


def test_the_youngest_is_swapped_out_when_the_pool_is_full_and_returns_without_prefilling_again() -> None:
    sched = scheduler(blocks=5, block_size=4)
    old, young = sequence(1, 7, max_tokens=9), sequence(2, 7, max_tokens=9)
    sched.add(old)
    sched.add(young)
    carry_out(sched, sched.schedule())
    carry_out(sched, sched.schedule())
    prefilled: list[int] = []
    swapped: list[int] = []
    for _ in range(40):
        step = sched.schedule()
        prefilled += [chunk.seq.id for chunk in step.prefill]
        swapped += [seq.id for seq, _ in step.swap_out]
        carry_out(sched, step)
    assert swapped and set(swapped) == {2}
    assert prefilled == []
    assert old.status is young.status is Status.FINISHED
    assert old.output_len == young.output_len == 9
    assert sched.pool.free_count == 5


def test_a_held_prompt_keeps_its_blocks_until_it_is_released() -> None:
    sched = scheduler()
    seq = sequence(1, 6, prefill_only=True)
    sched.add(seq)
    carry_out(sched, sched.schedule())
    assert seq.status is Status.HELD and sched.pool.free_count == 6
    assert sched.schedule().empty
    sched.finish(seq)
    assert sched.pool.free_count == 8


def test_a_prompt_that_can_never_fit_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="40 tokens needs 11 KV blocks; the worker has 8"):
        scheduler().add(sequence(1, 40))


def test_blocks_freed_twice_are_an_error_and_change_nothing() -> None:
    pool = BlockPool(4, 16)
    taken = pool.take(2)
    assert taken is not None
    pool.give_back(taken)
    with pytest.raises(ValueError, match="twice"):
        pool.give_back(taken)
    assert pool.free_count == 4
    assert pool.take(5) is None and pool.free_count == 4


def test_a_prompt_that_begins_like_an_earlier_one_computes_only_the_rest() -> None:
    sched = scheduler(blocks=40, block_size=4, grain=4)
    sched.add(sequence(1, 22, max_tokens=1))
    while not sched.schedule_and_carry_out().empty:
        pass
    assert sched.pool.free_count == 40
    sched.add(sequence(2, 23, max_tokens=1))
    step = sched.schedule()
    assert [(chunk.start, chunk.length) for chunk in step.prefill] == [(20, 3)]
    assert step.prefill[0].seq.cached == 20


def test_the_last_prompt_token_is_computed_even_where_its_block_is_here() -> None:
    sched = scheduler(blocks=40, block_size=4, grain=4)
    for id in (1, 2):
        sched.add(sequence(id, 8, max_tokens=1))
        step = sched.schedule_and_carry_out()
    assert [(chunk.start, chunk.length) for chunk in step.prefill] == [(4, 4)]


def test_a_prompt_being_computed_is_not_computed_a_second_time_by_one_that_comes_meanwhile() -> None:
    sched = scheduler(blocks=40, block_size=4, grain=4)
    for id in range(3):
        sched.add(sequence(id, 17, max_tokens=1))
    other = Sequence(9, [77] * 6, SamplingParams(max_tokens=1))
    sched.add(other)
    computed = dict.fromkeys((0, 1, 2, 9), 0)
    while not (step := sched.schedule_and_carry_out()).empty:
        for chunk in step.prefill:
            computed[chunk.seq.id] += chunk.length
    assert computed == {0: 17, 1: 1, 2: 1, 9: 6}


def test_who_waits_for_a_prefix_computes_it_when_its_neighbour_gives_up() -> None:
    sched = scheduler(blocks=40, block_size=4, grain=4)
    first, second = sequence(1, 24), sequence(2, 24, max_tokens=1)
    sched.add(first)
    sched.add(second)
    sched.schedule_and_carry_out()
    sched.finish(first)
    while not sched.schedule_and_carry_out().empty:
        pass
    assert second.status is Status.FINISHED and second.cached == 8


def test_the_longest_unused_prefix_makes_room_and_its_end_before_its_beginning() -> None:
    pool = BlockPool(3, 4)
    keys = prefix_keys(range(12), 4)
    blocks = pool.take(3)
    assert blocks is not None
    for block, key in zip(blocks, keys, strict=True):
        pool.seal(block, key)
    pool.give_back(blocks)
    assert pool.find(keys) == blocks
    assert pool.take(1) == blocks[2:]
    assert pool.find(keys) == blocks[:2]


@given(st.lists(st.integers(0, 3), max_size=24), st.lists(st.integers(0, 3), max_size=24), st.integers(1, 5))
def test_prompts_share_keys_as_far_as_their_full_blocks_are_alike(a: list[int], b: list[int], size: int) -> None:
    keys = zip(prefix_keys(a, size), prefix_keys(b, size), strict=False)
    for index, (ours, theirs) in enumerate(keys):
        end = (index + 1) * size
        assert (ours == theirs) == (a[:end] == b[:end])


def test_the_prompt_with_the_nearest_deadline_is_computed_first_even_among_those_under_way() -> None:
    sched = scheduler(blocks=100)
    for id, deadline in ((1, 30.0), (2, 10.0)):
        sched.add(Sequence(id, [id] * 40, SamplingParams(max_tokens=1), deadline=deadline))
    assert [chunk.seq.id for chunk in sched.schedule_and_carry_out().prefill] == [2]
    sched.add(Sequence(3, [3] * 8, SamplingParams(max_tokens=1), deadline=5.0))
    order = []
    while not (step := sched.schedule_and_carry_out()).empty:
        order += [chunk.seq.id for chunk in step.prefill]
    assert order == [3, 2, 2, 2, 2, 1, 1, 1, 1, 1]


def promised(sched: Scheduler, count: int, tpot_s: float | None, first_id: int = 0) -> list[Sequence]:
    """`count` sequences that all decode."""
    sequences = [
        Sequence(first_id + i, [first_id + i] * 4, SamplingParams(max_tokens=1000), tpot_s=tpot_s) for i in range(count)
    ]
    for seq in sequences:
        sched.add(seq)
    return sequences


def test_the_batch_grows_only_while_the_predicted_step_keeps_the_strictest_promise() -> None:
    sched = scheduler(blocks=1000, max_batch=64, grain=4)
    sched.step_time.fit(LINEAR)
    promised(sched, 40, tpot_s=0.030)
    longest = 0.0
    for _ in range(60):
        step = sched.schedule_and_carry_out()
        if step.decode:
            longest = max(longest, sched.predicted)
    assert longest <= 0.030
    assert 6 <= len(step.decode) < 12, "as large as the promise allows, no larger"
    assert step.decode == sched.running, "nobody who is running skips a step"


def test_a_worker_that_computes_no_prompts_leaves_no_time_for_them() -> None:
    """It takes in as many received sequences as the promise allows, not as many as would fit beside a prompt chunk."""
    sched = scheduler(blocks=1000, max_batch=40, grain=16, block_size=16, chunk=16)
    sched.step_time.fit(LINEAR)
    for id in range(20):  # beside 16 prompt tokens (8 ms) not two of them would fit into 20 ms
        sched.add(Sequence(id, [id] * 8, SamplingParams(max_tokens=60), remote_kv=True, tpot_s=0.020))
    for _ in range(10):
        step = sched.schedule()
        carry_out(sched, step)
        for seq in step.receive:
            sched.received(seq, 1)
    assert 4 <= len(step.decode) <= 9


def test_a_prompt_that_must_wait_for_time_lets_received_sequences_pass_but_not_for_ever() -> None:
    sched = scheduler(blocks=1000, max_batch=40, grain=16, block_size=16, chunk=16)
    sched.step_time.fit(LINEAR)
    sched.add(Sequence(0, [1] * 8, SamplingParams(max_tokens=2000), remote_kv=True, tpot_s=0.021))
    sched.add(Sequence(1, [2] * 8, SamplingParams(max_tokens=2000), remote_kv=True, tpot_s=0.021))
    late = Sequence(2, [3] * 64, SamplingParams(max_tokens=4), tpot_s=0.021, deadline=1.0)
    begun: list[int] = []
    for number in range(3, 60):
        step = sched.schedule()
        carry_out(sched, step)
        for seq in step.receive:
            begun.append(seq.id)
            sched.received(seq, 1)
        if number == 3:
            sched.add(late)
        sched.add(Sequence(number, [4] * 8, SamplingParams(max_tokens=2), remote_kv=True, tpot_s=0.021, deadline=2.0))
    assert late.status is Status.WAITING and 4 <= len(begun) <= 2 + 2 * 4
    for id in (0, 1):
        sched.finish(sched.sequences[id])
    for _ in range(8):
        sched.schedule_and_carry_out()
    assert late.status is not Status.WAITING, "it is the next to begin"


def test_without_promises_the_batch_grows_to_its_limit() -> None:
    sched = scheduler(blocks=1000, max_batch=40, grain=4)
    sched.step_time.fit(LINEAR)
    promised(sched, 40, tpot_s=None)
    for _ in range(60):
        step = sched.schedule_and_carry_out()
    assert len(step.decode) == 40


def test_a_promise_made_to_a_newcomer_slows_the_others_down_but_starves_none() -> None:
    sched = scheduler(blocks=2000, max_batch=64, grain=4)
    sched.step_time.fit(LINEAR)
    crowd = promised(sched, 40, tpot_s=None)
    for _ in range(30):
        sched.schedule_and_carry_out()
    (strict,) = promised(sched, 1, tpot_s=0.020, first_id=100)
    for _ in range(20):
        sched.schedule_and_carry_out()
    gained = {seq.id: seq.output_len for seq in (*crowd, strict)}
    for _ in range(64):
        step = sched.schedule_and_carry_out()
        assert sched.predicted <= 0.020
        assert strict in step.decode
    assert strict.output_len - gained[strict.id] == 64
    assert min(seq.output_len - gained[seq.id] for seq in crowd) >= 4


def test_a_promise_nobody_could_keep_does_not_bind_the_others() -> None:
    sched = scheduler(blocks=1000, max_batch=32, grain=4)
    sched.step_time.fit(LINEAR)
    promised(sched, 1, tpot_s=0.001, first_id=100)
    promised(sched, 20, tpot_s=None)
    for _ in range(40):
        step = sched.schedule_and_carry_out()
    assert len(step.decode) == 21


def test_a_waiting_prompt_is_computed_even_where_the_promises_leave_no_time_for_it() -> None:
    sched = scheduler(blocks=1000, max_batch=64, grain=8)
    sched.step_time.fit(LINEAR)
    promised(sched, 8, tpot_s=0.019)
    for _ in range(30):
        sched.schedule_and_carry_out()
    late = sequence(50, 16, max_tokens=1)
    sched.waiting.clear()
    sched.add(late)
    for seq in list(sched.running):  # contexts have grown: the promise is broken already
        seq.tokens += [1] * 200
        seq.computed += 200
        blocks = sched.pool.take(50)
        assert blocks is not None
        seq.blocks += blocks
    for seq in list(sched.running[1:]):
        sched.finish(seq)
    for _ in range(4 * PATIENCE_STEPS):
        sched.schedule_and_carry_out()
    assert late.status is Status.FINISHED


class Memory:
    """What the KV cache would hold: for each slot, the tokens that its key and value were computed from."""

    def __init__(self, sched: Scheduler) -> None:
        self.sched = sched
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}

    def at(self, blocks: list[int], position: int) -> tuple[int, int]:
        return blocks[position // self.sched.pool.block_size], position % self.sched.pool.block_size

    def compute(self, seq: Sequence, start: int, end: int) -> None:
        """Like the model: reads all that comes before `start`, writes what lies from there to `end`."""
        assert start == seq.computed
        for position in range(start):
            assert self.slots[self.at(seq.blocks, position)] == tuple(seq.tokens[: position + 1]), "somebody else's KV"
        for position in range(start, end):
            self.slots[self.at(seq.blocks, position)] = tuple(seq.tokens[: position + 1])

    def saved(self, seq: Sequence, blocks: list[int]) -> list[tuple[int, ...]]:
        return [self.slots[self.at(blocks, position)] for position in range(seq.computed)]

    def carry_out(self, step: Step) -> None:
        for seq, blocks in step.swap_out:
            seq.host_kv = self.saved(seq, blocks)
        for seq in step.swap_in:
            assert isinstance(seq.host_kv, list)
            for position, kv in enumerate(seq.host_kv):
                self.slots[self.at(seq.blocks, position)] = kv
            seq.host_kv = None
        for chunk in step.prefill:
            self.compute(chunk.seq, chunk.start, chunk.start + chunk.length)
        for seq in step.decode:
            assert seq.computed == len(seq.tokens) - 1
            self.compute(seq, seq.computed, seq.computed + 1)
        carry_out(self.sched, step)


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrive, share, preempt, receive, hold, spill, go on elsewhere, abort, finish: no block is lost,
    none is written by one while another reads it, everybody ends."""

    def __init__(self) -> None:
        super().__init__()
        self.next_id = 0
        self.live: dict[int, Sequence] = {}
        self.receiving: list[Sequence] = []

    @initialize(grain=st.sampled_from([4, 8]), prefix_cache=st.booleans(), measured=st.booleans())
    def start(self, grain: int, prefix_cache: bool, measured: bool) -> None:
        pool = BlockPool(10, 4)
        self.sched = Scheduler(pool, max_batch=4, prefill_chunk=8, grain=grain, prefix_cache=prefix_cache)
        if measured:
            self.sched.step_time.fit(LINEAR)
        self.memory = Memory(self.sched)

    @rule(
        prompt=st.integers(1, 30),
        differs=st.sampled_from([0, 0, 5, 9, 22]),
        max_tokens=st.integers(1, 9),
        kind=st.sampled_from(["plain", "plain", "prefill_only", "remote_kv"]),
        tpot_s=st.sampled_from([None, None, 0.001, 0.012, 0.015, 0.1]),
        deadline=st.floats(0, 3),
        replayed=st.sampled_from([0, 0, 1, 2, 6]),
    )
    def arrive(
        self,
        prompt: int,
        differs: int,
        max_tokens: int,
        kind: str,
        tpot_s: float | None,
        deadline: float,
        replayed: int,
    ) -> None:
        tokens = [position + 100 * (0 < differs <= position) for position in range(prompt)]
        replay = [1] * min(replayed, max_tokens - 1, 38 - prompt) if kind != "prefill_only" else []
        params = SamplingParams(max_tokens=max_tokens)
        seq = Sequence(self.next_id, tokens, params, tpot_s=tpot_s, deadline=deadline, replay=replay)
        seq.prefill_only, seq.remote_kv = kind == "prefill_only", kind == "remote_kv"
        self.next_id += 1
        self.sched.add(seq)
        self.live[seq.id] = seq

    @rule()
    def step(self) -> None:
        step = self.sched.schedule()
        self.receiving += step.receive
        self.memory.carry_out(step)

    @precondition(lambda self: self.receiving)
    @rule()
    def kv_lands(self) -> None:
        seq = self.receiving.pop(0)
        if seq.status is Status.RECEIVING:
            self.memory.compute(seq, seq.computed, seq.prompt_len)
            self.sched.received(seq, 1)

    @property
    def held(self) -> list[Sequence]:
        return [seq for seq in self.sched.sequences.values() if seq.status is Status.HELD]

    @precondition(lambda self: any(seq.blocks and seq.prefill_only for seq in self.held))
    @rule()
    def spill(self) -> None:
        seq = next(seq for seq in self.held if seq.blocks and seq.prefill_only)
        self.sched.spilled(seq, self.memory.saved(seq, seq.blocks))

    @precondition(lambda self: self.held)
    @rule(given_before=st.integers(1, 5))
    def nobody_takes_it_over(self, given_before: int) -> None:
        seq = self.held[0]
        self.sched.resume(seq, [1] * min(given_before, max(1, seq.params.max_tokens - 1), 38 - seq.prompt_len))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        seq = self.live.pop(data.draw(st.sampled_from(sorted(self.live))))
        self.sched.finish(seq)
        assert seq.blocks == []

    @invariant()
    def owners_add_up(self) -> None:
        for seq in self.sched.sequences.values():
            assert len(seq.blocks) == len(set(seq.blocks))
        owned = {block for seq in self.sched.sequences.values() for block in seq.blocks}
        assert len(owned) + self.sched.pool.free_count == 10

    def teardown(self) -> None:
        if not hasattr(self, "sched"):
            return
        for _ in range(3000):
            if not self.sched.sequences:
                break
            self.step()
            while self.receiving:
                self.kv_lands()
            for seq in [s for s in self.sched.sequences.values() if s.status is Status.HELD]:
                self.sched.finish(seq)
        assert not self.sched.sequences, "somebody starves"
        assert self.sched.pool.free_count == 10
        assert self.sched.pool.take(10) is not None and self.sched.pool.cached_count == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_max_tokens_beyond_the_pool_does_not_hang() -> None:
    """sglang#30033: admission ignores growth. A lone sequence larger than the pool would wait for itself."""
    sched = scheduler(blocks=2, block_size=4)
    seq = sequence(1, 7, max_tokens=2)
    sched.add(seq)
    for _ in range(5):
        carry_out(sched, sched.schedule())
    assert seq.status is Status.FINISHED
