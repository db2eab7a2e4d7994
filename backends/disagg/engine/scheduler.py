"""What the engine computes next. Plain Python: no torch, no clock, no I/O.

A step decodes one token for each running sequence and spends what is left of the token budget on prompts
(chunked prefill, Agrawal et al. 2023). Prompts go by earliest deadline; a sequence without a goal has one too, so
nobody waits behind all who come later. Where somebody was promised a time per token, the batch grows, and prompts
are computed beside it, only while the predicted step time keeps that promise. A sequence that outgrows the pool swaps
the youngest one out to host memory: a prompt is never computed twice.

Chunks start at multiples of `grain`, and a prefix is shared in multiples of it. Runners whose arithmetic depends
on how a prompt is cut get `prefill_chunk` for it, so that every prompt is always cut alike: an answer never depends
on who else is being served, or was. For the same reason only prompts are shared, not what was generated.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from backends.disagg.engine.blocks import BlockPool, Key, prefix_keys
from backends.disagg.engine.promises import PATIENCE_STEPS, Promises, decode_load
from backends.disagg.engine.sequence import Sequence, Status
from backends.disagg.engine.step_time import StepLoad, StepTime, pairs

LEAST_CHUNK = 8
"""Prompt tokens that every step must have time for, beside those that decode, or no more prompts are begun."""
_MOST_PASSING = 4
"""How many sequences received from elsewhere pass a prompt that waits for such time."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start .. start + length` of what is known of `seq`."""

    seq: Sequence
    start: int
    length: int

    @property
    def last(self) -> bool:
        return self.start + self.length == self.seq.known_len


@dataclass(slots=True)
class Step:
    """One engine step, in the order it must be carried out: swap out, swap in, receive, compute."""

    swap_out: list[tuple[Sequence, list[int]]] = field(default_factory=list)
    """Sequences to copy to host memory and the blocks they had; the blocks may be reused in this step."""
    swap_in: list[Sequence] = field(default_factory=list)
    receive: list[Sequence] = field(default_factory=list)
    """Sequences whose blocks are ready to take another worker's KV."""
    prefill: list[Chunk] = field(default_factory=list)
    decode: list[Sequence] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (self.swap_out or self.swap_in or self.receive or self.prefill or self.decode)


class Scheduler:
    """Owns every sequence from `add` until it is finished, aborted or released."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_batch: int,
        prefill_chunk: int,
        grain: int | None = None,
        prefix_cache: bool = True,
    ) -> None:
        self.pool = pool
        self.max_batch = max_batch
        self.prefill_chunk = prefill_chunk
        self.grain = grain or prefill_chunk
        self.prefix_cache = prefix_cache
        self.step_time = StepTime()
        self._promises = Promises(self.step_time)
        self.sequences: dict[int, Sequence] = {}
        self.waiting: list[Sequence] = []
        """By deadline."""
        self.prefilling: list[Sequence] = []
        """By deadline."""
        self.receiving: set[Sequence] = set()
        self.running: list[Sequence] = []
        """Decoding, oldest first."""
        self.swapped: deque[Sequence] = deque()
        """Oldest first: the first to come back."""
        self._resumed: list[Sequence] = []
        """Held until now. They go by way of host memory, like those swapped out, and so find room for what follows."""
        self.short_of = 0
        """Blocks that the last step lacked to let the next sequence in, or one that runs go on."""
        self._least_chunk = min(pool.block_size, max(LEAST_CHUNK, self.grain))
        self._share_grain = math.lcm(self.grain, pool.block_size)
        self._claims: dict[Key, Sequence] = {}
        """Prefixes that are being computed right now, and by whom: who needs one waits for it."""
        self._steps = 0
        self._prefilled_at = 0

    # --- what happens to a sequence ------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue `seq`. Raises ValueError where it could never fit, however empty the pool."""
        need = self.pool.blocks_for(seq.known_len + 1)
        if need > self.pool.num_blocks:
            raise ValueError(
                f"a prompt of {seq.known_len} tokens needs {need} KV blocks; the worker has {self.pool.num_blocks}"
            )
        if seq.id in self.sequences:
            raise ValueError(f"sequence {seq.id} is already here")
        if self.prefix_cache:
            seq.keys = prefix_keys(seq.tokens[: seq.prompt_len], self.pool.block_size)
        self.sequences[seq.id] = seq
        insort(self.waiting, seq, key=_deadline)

    def received(self, seq: Sequence, first_token: int, *, exact: bool = True) -> None:
        """The prompt's KV lies in `seq`'s blocks: it goes on from `first_token`, or from what it replays.

        `exact`: bit for bit as it was computed, so that others may share it.
        """
        if exact:
            self._seal(seq, seq.prompt_len)
        seq.computed = seq.prompt_len
        if not seq.output_len:
            seq.take_over([first_token])
        self.receiving.remove(seq)
        self._run(seq)

    def resume(self, seq: Sequence, replay: SequenceOf[int]) -> None:
        """Nobody takes over `seq`, prefilled here or being so: it goes on here, after `replay`."""
        seq.prefill_only = False
        if seq.status is not Status.HELD:
            return  # its first token is still to come
        seq.take_over(replay)
        if seq.host_kv is None:
            self._resumed.append(seq)
        else:
            seq.status = Status.SWAPPED
            self.swapped.append(seq)

    def spilled(self, seq: Sequence, host_kv: object) -> None:
        """The KV of `seq`, which is held, lies in host memory now: its blocks are free."""
        assert seq.status is Status.HELD
        self.pool.give_back(seq.blocks)
        seq.blocks, seq.host_kv = [], host_kv

    def _run(self, seq: Sequence) -> None:
        """Decode `seq`, or first compute what it replays."""
        if len(seq.tokens) - seq.computed > 1:
            seq.status = Status.PREFILLING
            insort(self.prefilling, seq, key=_deadline)
            return
        seq.status = Status.DECODING
        seq.decoded_at = self._steps
        self.running.append(seq)

    def finish(self, seq: Sequence) -> None:
        """Forget `seq` and free its blocks, wherever it stands (finished, aborted, released)."""
        if self.sequences.pop(seq.id, None) is None:
            return
        match seq.status:
            case Status.WAITING:
                self.waiting.remove(seq)
            case Status.PREFILLING:
                self.prefilling.remove(seq)
                self._unclaim(seq, len(seq.keys))
            case Status.DECODING:
                self.running.remove(seq)
            case Status.SWAPPED:
                self.swapped.remove(seq)
            case Status.RECEIVING:
                self.receiving.remove(seq)
            case Status.HELD | Status.FINISHED:
                pass
        self.pool.give_back(seq.blocks)
        seq.blocks = []
        seq.status = Status.FINISHED

    def advance(self, seq: Sequence, computed: int, token: int | None) -> str | None:
        """Record that `seq` has `computed` tokens of KV and, where one was sampled, its next `token`.

        Returns the finish reason, or None. A finished sequence that is not held is forgotten at once.
        """
        if seq.status is Status.PREFILLING:
            self._seal(seq, seq.computed + computed)
        seq.computed += computed
        if token is None:
            return None
        seq.append(token)
        seq.decoded_at = self._steps
        reason = seq.finish_reason()
        if seq.status is Status.PREFILLING:
            self.prefilling.remove(seq)
            if seq.prefill_only and reason is None:
                seq.status = Status.HELD
                return None
            self._run(seq)
        if reason is not None:
            self.finish(seq)
        return reason

    def _seal(self, seq: Sequence, computed: int) -> None:
        """Let others find the prompt blocks that are complete now."""
        size = self.pool.block_size
        full = min(computed // size, len(seq.keys))
        for index in range(seq.computed // size, full):
            self.pool.seal(seq.blocks[index], seq.keys[index])
        self._unclaim(seq, full)

    def _unclaim(self, seq: Sequence, end: int) -> None:
        for key in seq.keys[seq.computed // self.pool.block_size : end]:
            if self._claims.get(key) is seq:
                del self._claims[key]

    # --- what to do next -----------------------------------------------------------------------------

    def schedule(self) -> Step:
        """The next step. Blocks it needs are taken here; nothing else changes until `advance`."""
        self._steps += 1
        self.short_of = 0
        step = Step()
        for seq in self._resumed:
            if seq.status is Status.HELD:
                self._swap_out(step, seq)
                self.swapped.append(seq)
        self._resumed.clear()
        self._grow_running(step)
        if not step.swap_out:
            self._swap_in(step)
        step.decode = self._promises.choose(self.running)
        start = self.prefilling[0].computed if self.prefilling else 0
        budget = self._promises.prompt_tokens(step.decode, self.prefill_chunk, start)
        if self._steps - self._prefilled_at >= PATIENCE_STEPS:
            budget = max(budget, self.grain)
        for seq in list(self.prefilling):
            budget = self._admit(step, budget, before=seq.deadline)
            budget = self._add_chunk(step, seq, budget)
        self._admit(step, budget)
        if step.prefill or not self.prefilling:
            self._prefilled_at = self._steps
        return step

    @staticmethod
    def load_of(step: Step) -> StepLoad:
        """What `StepTime` wants to know of `step`."""
        return replace(
            decode_load(step.decode),
            prompt=sum(chunk.length for chunk in step.prefill),
            pairs=sum(pairs(chunk.start, chunk.length) for chunk in step.prefill),
        )

    # --- room ----------------------------------------------------------------------------------------

    def _grow_running(self, step: Step) -> None:
        """A block for each running sequence whose next token needs one; the youngest makes room."""
        for seq in list(self.running):
            if seq.status is not Status.DECODING or len(seq.tokens) <= len(seq.blocks) * self.pool.block_size:
                continue
            while (block := self.pool.take(1)) is None:
                self.short_of += 1
                victim = self.running.pop()
                self._swap_out(step, victim)
                self.swapped.appendleft(victim)
                if victim is seq:
                    break
            else:
                seq.blocks += block

    def _swap_out(self, step: Step, seq: Sequence) -> None:
        step.swap_out.append((seq, seq.blocks))
        self.pool.give_back(seq.blocks)
        seq.blocks = []
        seq.status = Status.SWAPPED

    def _swap_in(self, step: Step) -> None:
        while self.swapped and len(self.running) < self.max_batch:
            seq = self.swapped[0]
            blocks = self._take(self.pool.blocks_for(len(seq.tokens)))
            if blocks is None:
                break
            self.swapped.popleft()
            seq.blocks = blocks
            self._run(seq)
            step.swap_in.append(seq)

    def _admit(self, step: Step, budget: int, before: float = math.inf) -> int:
        """Begin as many waiting sequences with a deadline `before` as fit; what is left of the budget.

        One that waits for a prefix lets others pass; the first that does not fit lets nobody pass, so that the
        large and the strict get their turn. But where only time is missing to compute its prompt, those whose
        prompts were computed elsewhere need not wait for that: a number of them pass. Those swapped out come first.
        """
        if self.swapped or not self.waiting:
            return budget
        passed: list[Sequence] = []
        untimely: Sequence | None = None
        in_flight = [*self.prefilling, *self.receiving, *self.running]
        while self.waiting and len(passed) < self.max_batch and len(in_flight) < self.max_batch:
            seq = self.waiting[0]
            if seq.deadline >= before or (budget <= 0 and not seq.remote_kv):
                break
            shared = None if untimely is not None and not seq.remote_kv else self._shared_prefix(seq)
            if shared is None:
                passed.append(self.waiting.pop(0))
                continue
            # Where no prompt is computed beside them, those that decode need not leave time for one.
            chunk = 0 if seq.remote_kv and not self.prefilling else self._least_chunk
            if not self._promises.room_for(seq, in_flight, chunk):
                if seq.remote_kv or seq.passed_by >= _MOST_PASSING:
                    break
                untimely = seq
                passed.append(self.waiting.pop(0))
                continue
            self.pool.share(shared)  # first, or making room could evict them
            blocks = self._take(self.pool.blocks_for(seq.known_len + 1) - len(shared))
            if blocks is None:
                self.pool.give_back(shared)
                break
            del self.waiting[0]
            in_flight.append(seq)
            seq.blocks = shared + blocks
            seq.cached = seq.computed = len(shared) * self.pool.block_size
            if seq.remote_kv:
                if untimely is not None:
                    untimely.passed_by += 1
                seq.status = Status.RECEIVING
                self.receiving.add(seq)
                step.receive.append(seq)
            else:
                seq.status = Status.PREFILLING
                for key in seq.keys[len(shared) :]:
                    self._claims.setdefault(key, seq)
                insort(self.prefilling, seq, key=_deadline)
                budget = self._add_chunk(step, seq, budget)
        self.waiting[:0] = passed
        return budget

    def _take(self, count: int) -> list[int] | None:
        blocks = self.pool.take(count)
        if blocks is None:
            self.short_of += count - self.pool.free_count
        return blocks

    def _shared_prefix(self, seq: Sequence) -> list[int] | None:
        """The blocks of `seq`'s prompt that are here already; None where waiting for a neighbour gives more."""
        size, grain = self.pool.block_size, self._share_grain
        # Of a prompt that is computed here, the last token is in any case: its logits are wanted.
        most = min(seq.prompt_len, seq.known_len - (not seq.remote_kv)) // grain * grain
        found = self.pool.find(seq.keys[: most // size])
        shared = len(found) * size // grain * grain
        if seq.keys and not seq.remote_kv and shared < most and seq.keys[(shared + grain) // size - 1] in self._claims:
            return None
        return found[: shared // size]

    def _add_chunk(self, step: Step, seq: Sequence, budget: int) -> int:
        """Add as much of `seq`'s next chunk as the budget allows; what is left of the budget."""
        length = min(self.prefill_chunk, seq.known_len - seq.computed)
        if length > budget:
            length = budget // self.grain * self.grain
        if length <= 0:
            return 0
        step.prefill.append(Chunk(seq, seq.computed, length))
        return budget - length


def _deadline(seq: Sequence) -> float:
    return seq.deadline
