"""How much may go into a step so that every time per token that was promised is kept. Plain Python."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from backends.disagg.engine.sequence import Sequence
from backends.disagg.engine.step_time import StepLoad, StepTime

PATIENCE_STEPS = 16
"""A running sequence without a goal gets a token, and a waiting prompt a chunk, at least every so many steps."""
_FORESIGHT_TOKENS = 64


class Promises:
    """Decides by predicted step times; where nothing was promised, or nothing is known yet, it limits nothing."""

    def __init__(self, step_time: StepTime) -> None:
        self.step_time = step_time

    def limit(self, members: Iterable[Sequence]) -> float | None:
        """The strictest seconds per token promised to any of `members`, of those that it could keep if alone."""
        if not self.step_time.ready:
            return None
        kept = (
            seq.tpot_s
            for seq in members
            if seq.tpot_s is not None and self.step_time.at_worst(StepLoad(1, len(seq.tokens))) <= seq.tpot_s
        )
        return min(kept, default=None)

    def choose(self, running: SequenceOf[Sequence]) -> list[Sequence]:
        """Those of `running` that get a token now: all, or as many of the most urgent as fit, in their order."""
        limit = self.limit(running)
        if limit is None or self.step_time.at_worst(decode_load(running)) <= limit:
            return list(running)
        chosen: set[Sequence] = set()
        context = 0
        for seq in sorted(running, key=lambda seq: seq.decoded_at + _interval(seq, limit)):
            context += len(seq.tokens)
            if chosen and self.step_time.at_worst(StepLoad(len(chosen) + 1, context)) > limit:
                break
            chosen.add(seq)
        return [seq for seq in running if seq in chosen]

    def prompt_tokens(self, decode: SequenceOf[Sequence], most: int, start: int) -> int:
        """How many tokens, `most` at most, of a prompt of which `start` are computed may be computed beside
        `decode`."""
        limit = self.limit(decode)
        if limit is None:
            return most
        return min(most, self.step_time.prompt_tokens_within(limit, decode_load(decode), start))

    def room_for(self, newcomer: Sequence, members: SequenceOf[Sequence], chunk: int) -> bool:
        """Whether `newcomer` can join `members` and every promise, its own too, be kept, with `chunk` prompt tokens
        in each step.

        Those whose tokens may come further apart than the strictest promise count for less; next to a newcomer
        without a promise everybody counts full, as nobody is to be slowed down for it.
        """
        limit = self.limit([*members, newcomer])
        if limit is None or not members:
            return True
        batch, context = 1.0, float(_soon(newcomer))
        for seq in members:
            share = 1.0 if newcomer.tpot_s is None else 1.0 / _interval(seq, limit)
            batch += share
            context += share * (_soon(seq) if newcomer.tpot_s is None or seq.tpot_s is not None else len(seq.tokens))
        return self.step_time.at_worst(StepLoad(batch, context, chunk)) <= limit


def decode_load(sequences: SequenceOf[Sequence]) -> StepLoad:
    return StepLoad(len(sequences), sum(len(seq.tokens) for seq in sequences))


def _interval(seq: Sequence, limit: float) -> int:
    """How many steps of `limit` seconds may lie between two of `seq`'s tokens."""
    if seq.tpot_s is None:
        return PATIENCE_STEPS
    return min(PATIENCE_STEPS, max(1, int(seq.tpot_s / limit)))


def _soon(seq: Sequence) -> int:
    """Its context when it has grown for a while: a batch that just fits now would break its promise then."""
    return len(seq.tokens) + min(_FORESIGHT_TOKENS, seq.params.max_tokens - seq.output_len)
