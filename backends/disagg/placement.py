"""Where a request's prompt is computed and where its answer is decoded. Plain Python: no clock, no I/O.

What is weighed, in seconds: until the first token; what the hand-over takes that nothing hides; how long others' tokens
wait while the prompt is computed beside them; and, past the limits that were asked for, a penalty. A short uncached
prompt is therefore computed where it is decoded, and a long one elsewhere, unless the prefill workers are busier or the
link slower than that is worth. The inputs are measured: each worker's step times and backlog, each pair's transfers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from backends.disagg.engine.scheduler import LEAST_CHUNK
from backends.disagg.engine.step_time import Coefficients, StepLoad, compute_s, predicted, prompt_s
from backends.disagg.transfers import PairSpeed

W = TypeVar("W", bound=Hashable)

_MISSED = 10.0
"""Seconds that a limit which will not be kept weighs, beside how far it is missed."""
_ANSWER_TOKENS = 64
"""How many tokens an answer is taken to have, at most, when decode workers are compared."""
_LONG_ANSWER = 256
"""How many tokens the streams of a worker are taken to have still, where something has to wait for their end."""
_CROWDING = 0.1
"""How much longer steps are taken to be for each stream beside, beyond what was measured: alike workers are never
measured quite alike, and the difference must not send everybody to one of them."""
_MARGIN = 1.25
"""How much longer than predicted steps may be when a promise is to be kept beside them."""
_FORESIGHT = 256
"""KV tokens by which the streams of a worker are taken to grow together while a prompt is computed beside them."""
_INTERRUPTIONS = 2
"""Chunks of others' prompts that an answer decoded by a prefill worker is taken to wait for: they are what that worker
is there for."""
_COMPANY = 1
"""Streams that a decode worker is taken to have beside those it has: it is there to have some."""


@dataclass(frozen=True, slots=True)
class Load(Generic[W]):
    """What is known of a worker that may be given something."""

    worker: W
    step: Coefficients
    """How long its steps take."""
    chunk: int
    """Prompt tokens in a step, at most."""
    backlog: int
    """Prompt tokens it has still to compute."""
    backlog_pairs: float
    """`engine.step_time.pairs` of those."""
    decoding: int
    context: int
    """KV tokens that those read together."""
    uncached: int
    """Tokens of this prompt that it would have to compute."""

    def step_s(self, more: int = 0, context: int = 0) -> float:
        """Seconds between tokens, with `more` streams of `context` tokens each beside those it has."""
        return predicted(self.step, StepLoad(self.decoding + more, self.context + more * context))

    def alone_s(self, prompt_tokens: int) -> float:
        """Seconds that this prompt, `prompt_tokens` with what is cached, adds to the steps it is in."""
        return prompt_s(self.step, prompt_tokens - self.uncached, self.uncached)

    def prompt_s(self, prompt_tokens: int, tpot_s: float | None) -> float:
        """Seconds until this prompt is computed here, in the steps that streams promised `tpot_s` allow."""
        tokens = self.backlog + self.uncached
        # Those that decode read longer contexts by and by, and so does this one among them.
        beside = self.step_s(1, _FORESIGHT) if tpot_s is not None and self.decoding else self.step_s()
        compute = compute_s(self.step, self.backlog, self.backlog_pairs) + self.alone_s(prompt_tokens)
        per_step = float(self.chunk)
        if tpot_s is None or not self.decoding or not compute:
            return compute + max(1.0, tokens / per_step) * beside
        per_step = min(per_step, (tpot_s / _MARGIN - beside) * tokens / compute)
        if per_step < LEAST_CHUNK:  # it waits until those streams are done
            return compute + _LONG_ANSWER * tpot_s
        return compute + max(1.0, tokens / per_step) * beside


@dataclass(frozen=True, slots=True)
class Asked:
    """What placement needs to know of a request."""

    prompt_tokens: int
    max_tokens: int
    token_bytes: int
    """Of KV."""
    ttft_s: float | None
    tpot_s: float | None


@dataclass(frozen=True, slots=True)
class Place(Generic[W]):
    """`prefill` is None where the prompt is computed by whoever decodes."""

    prefill: W | None
    decode: W
    cost: float
    ttft_s: float
    """Until the first token, as predicted."""
    transfer_s: float = 0.0
    """What the hand-over will take that nothing hides, as predicted."""


def choose(
    asked: Asked,
    prefill: Sequence[Load[W]],
    decode: Sequence[Load[W]],
    pairs: dict[tuple[W, W], PairSpeed],
    default: PairSpeed,
    *,
    local: bool,
) -> Place[W]:
    """The cheapest place. `decode` is not empty; where `prefill` is not, a prompt is computed by whoever decodes only
    where `local` allows it, and then by any worker."""
    host = min(decode, key=lambda load: (_decode_cost(asked, load), load.backlog))
    places = [
        _split(asked, source, target, pairs.get((source.worker, target.worker), default))
        for source in prefill
        for target in ((host,) if len(prefill) * len(decode) > 64 else decode)
        if source.worker != target.worker
    ]
    if local or not places:
        places += [_whole(asked, load) for load in decode]
    if local:
        places += [_whole(asked, load, _INTERRUPTIONS * prompt_s(load.step, 0, load.chunk)) for load in prefill]
    return min(places, key=lambda place: place.cost)


def _decode_cost(asked: Asked, load: Load[W]) -> float:
    step_s = load.step_s(1, asked.prompt_tokens)
    crowded_s = step_s * (1.0 + _CROWDING * load.decoding)
    return min(asked.max_tokens, _ANSWER_TOKENS) * crowded_s + _missed(step_s, asked.tpot_s)


def _missed(seconds: float, limit: float | None) -> float:
    if limit is None or seconds <= limit:
        return 0.0
    return _MISSED * min(10.0, seconds / limit)


def _prefill_cost(asked: Asked, load: Load[W], ttft_s: float, company: int) -> float:
    """`company`: streams that are taken to wait beside those that do, while the prompt is computed."""
    waits = (load.decoding + company) * load.alone_s(asked.prompt_tokens)
    return ttft_s + waits + _missed(ttft_s, asked.ttft_s)


def _split(asked: Asked, source: Load[W], target: Load[W], pair: PairSpeed) -> Place[W]:
    ttft_s = source.prompt_s(asked.prompt_tokens, asked.tpot_s)
    moved = asked.prompt_tokens * asked.token_bytes
    transfer_s = pair.exposed_s(moved, source.alone_s(asked.prompt_tokens))
    cost = _prefill_cost(asked, source, ttft_s, 0) + _decode_cost(asked, target) + transfer_s
    return Place(source.worker, target.worker, cost, ttft_s, transfer_s)


def _whole(asked: Asked, load: Load[W], interrupted_s: float = 0.0) -> Place[W]:
    ttft_s = load.prompt_s(asked.prompt_tokens, asked.tpot_s)
    cost = _prefill_cost(asked, load, ttft_s, _COMPANY) + _decode_cost(asked, load) + interrupted_s
    return Place(None, load.worker, cost, ttft_s)
