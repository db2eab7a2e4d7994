"""The scheduler and the block pool, driven without torch, sockets or a clock."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backends.disagg.engine.blocks import BlockPool
from backends.disagg.engine.scheduler import Scheduler, Step
from backends.disagg.engine.sequence import SamplingParams, Sequence, Status


def sequence(id: int, prompt: int, max_tokens: int = 8, **kinds: bool) -> Sequence:
    return Sequence(id, list(range(prompt)), SamplingParams(max_tokens=max_tokens), **kinds)


def scheduler(blocks: int = 8, block_size: int = 4, max_batch: int = 8, chunk: int = 8) -> Scheduler:
    return Scheduler(BlockPool(blocks, block_size), max_batch=max_batch, prefill_chunk=chunk)


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


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrive, receive, step, abort: no block is lost, none is owned twice, everybody ends."""

    def __init__(self) -> None:
        super().__init__()
        self.sched = scheduler(blocks=10, block_size=4, max_batch=4, chunk=8)
        self.next_id = 0
        self.live: dict[int, Sequence] = {}
        self.receiving: list[Sequence] = []

    @rule(
        prompt=st.integers(1, 30),
        max_tokens=st.integers(1, 9),
        kind=st.sampled_from(["plain", "plain", "prefill_only", "remote_kv"]),
    )
    def arrive(self, prompt: int, max_tokens: int, kind: str) -> None:
        seq = sequence(self.next_id, prompt, max_tokens, **({} if kind == "plain" else {kind: True}))
        self.next_id += 1
        self.sched.add(seq)
        self.live[seq.id] = seq

    @rule()
    def step(self) -> None:
        step = self.sched.schedule()
        self.receiving += step.receive
        for chunk in step.prefill:
            assert chunk.start == chunk.seq.computed
        for seq in step.decode:
            assert seq.computed == len(seq.tokens) - 1 < len(seq.blocks) * self.sched.pool.block_size
        carry_out(self.sched, step)

    @precondition(lambda self: self.receiving)
    @rule()
    def kv_lands(self) -> None:
        seq = self.receiving.pop(0)
        if seq.status is Status.RECEIVING:
            self.sched.received(seq, 1)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        seq = self.live.pop(data.draw(st.sampled_from(sorted(self.live))))
        self.sched.finish(seq)
        assert seq.blocks == []

    @invariant()
    def every_block_has_one_owner(self) -> None:
        owned = [block for seq in self.sched.sequences.values() for block in seq.blocks]
        assert len(owned) == len(set(owned))
        assert len(owned) + self.sched.pool.free_count == 10

    def teardown(self) -> None:
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


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_max_tokens_beyond_the_pool_does_not_hang() -> None:
    """sglang#30033: admission ignores growth. A lone sequence larger than the pool would wait for itself."""
    sched = scheduler(blocks=2, block_size=4)
    seq = sequence(1, 7, max_tokens=2)
    sched.add(seq)
    for _ in range(5):
        carry_out(sched, sched.schedule())
    assert seq.status is Status.FINISHED
