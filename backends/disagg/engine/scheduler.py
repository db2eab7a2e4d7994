"""What the engine computes next. Plain Python: no torch, no clock, no I/O.

Every step decodes one token for each running sequence and spends what is left of the token budget on
prompts (chunked prefill, Agrawal et al. 2023). First come, first served. A sequence that outgrows the pool
swaps the youngest one out to host memory: a prompt is never computed twice.

Chunks start at multiples of `prefill_chunk` whatever the load, so a prompt is always computed in the same
pieces: its KV, and so the answer, does not depend on who else is being served.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from backends.disagg.engine.blocks import BlockPool
from backends.disagg.engine.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens `start .. start + length` of `seq`."""

    seq: Sequence
    start: int
    length: int

    @property
    def last(self) -> bool:
        return self.start + self.length == self.seq.prompt_len


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

    def __init__(self, pool: BlockPool, *, max_batch: int, prefill_chunk: int) -> None:
        self.pool = pool
        self.max_batch = max_batch
        self.prefill_chunk = prefill_chunk
        self.sequences: dict[int, Sequence] = {}
        self.waiting: deque[Sequence] = deque()
        self.prefilling: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """Decoding, oldest first."""
        self.swapped: deque[Sequence] = deque()
        """Oldest first: the first to come back."""

    # --- what happens to a sequence ------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue `seq`. Raises ValueError where it could never fit, however empty the pool."""
        need = self.pool.blocks_for(seq.prompt_len + 1)
        if need > self.pool.num_blocks:
            raise ValueError(
                f"a prompt of {seq.prompt_len} tokens needs {need} KV blocks; the worker has {self.pool.num_blocks}"
            )
        if seq.id in self.sequences:
            raise ValueError(f"sequence {seq.id} is already here")
        self.sequences[seq.id] = seq
        self.waiting.append(seq)

    def received(self, seq: Sequence, first_token: int) -> None:
        """The prompt's KV lies in `seq`'s blocks: it decodes from `first_token` on."""
        seq.computed = seq.prompt_len
        seq.tokens.append(first_token)
        seq.status = Status.DECODING
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
            case Status.DECODING:
                self.running.remove(seq)
            case Status.SWAPPED:
                self.swapped.remove(seq)
            case Status.RECEIVING | Status.HELD | Status.FINISHED:
                pass
        self.pool.give_back(seq.blocks)
        seq.blocks = []
        seq.status = Status.FINISHED

    def advance(self, seq: Sequence, computed: int, token: int | None) -> str | None:
        """Record that `seq` has `computed` tokens of KV and, where one was sampled, its next `token`.

        Returns the finish reason, or None. A finished sequence that is not held is forgotten at once.
        """
        seq.computed += computed
        if token is None:
            return None
        seq.tokens.append(token)
        reason = seq.finish_reason()
        if seq.status is Status.PREFILLING:
            self.prefilling.remove(seq)
            if seq.prefill_only and reason is None:
                seq.status = Status.HELD
                return None
            seq.status = Status.DECODING
            self.running.append(seq)
        if reason is not None:
            self.finish(seq)
        return reason

    # --- what to do next -----------------------------------------------------------------------------

    def schedule(self) -> Step:
        """The next step. Blocks it needs are taken here; nothing else changes until `advance`."""
        step = Step()
        self._grow_running(step)
        if not step.swap_out:
            self._swap_in(step)
        budget = self.prefill_chunk
        for seq in self.prefilling:
            budget = self._add_chunk(step, seq, budget)
        if not self.swapped:
            self._admit(step, budget)
        step.decode = list(self.running)
        return step

    def _grow_running(self, step: Step) -> None:
        """A block for each running sequence whose next token needs one; the youngest makes room."""
        for seq in list(self.running):
            if seq.status is not Status.DECODING or len(seq.tokens) <= len(seq.blocks) * self.pool.block_size:
                continue
            while (block := self.pool.take(1)) is None:
                victim = self.running.pop()
                step.swap_out.append((victim, victim.blocks))
                self.pool.give_back(victim.blocks)
                victim.blocks = []
                victim.status = Status.SWAPPED
                self.swapped.appendleft(victim)
                if victim is seq:
                    break
            else:
                seq.blocks += block

    def _swap_in(self, step: Step) -> None:
        while self.swapped and len(self.running) < self.max_batch:
            seq = self.swapped[0]
            blocks = self.pool.take(self.pool.blocks_for(len(seq.tokens)))
            if blocks is None:
                break
            self.swapped.popleft()
            seq.blocks = blocks
            seq.status = Status.DECODING
            self.running.append(seq)
            step.swap_in.append(seq)

    def _admit(self, step: Step, budget: int) -> None:
        while self.waiting and self._in_flight() < self.max_batch:
            seq = self.waiting[0]
            if not seq.remote_kv and budget <= 0:
                break
            blocks = self.pool.take(self.pool.blocks_for(seq.prompt_len + 1))
            if blocks is None:
                break
            self.waiting.popleft()
            seq.blocks = blocks
            if seq.remote_kv:
                seq.status = Status.RECEIVING
                step.receive.append(seq)
            else:
                seq.status = Status.PREFILLING
                self.prefilling.append(seq)
                budget = self._add_chunk(step, seq, budget)

    def _in_flight(self) -> int:
        """Sequences that hold blocks (held ones wait for another worker and do not count)."""
        idle = len(self.waiting) + len(self.swapped)
        return len(self.sequences) - idle - sum(s.status is Status.HELD for s in self.sequences.values())

    def _add_chunk(self, step: Step, seq: Sequence, budget: int) -> int:
        """Add `seq`'s next chunk where the budget allows; the first chunk of a step always fits."""
        length = min(self.prefill_chunk, seq.prompt_len - seq.computed)
        if step.prefill and length > budget:
            return 0
        step.prefill.append(Chunk(seq, seq.computed, length))
        return budget - length
