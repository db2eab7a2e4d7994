"""Where an adaptive cluster computes a prompt, in simulated time: what backends/disagg/placement.py weighs, on what the
simulation knows."""

from __future__ import annotations

from collections.abc import Sequence

from policies.simulate.engine import Worker
from policies.simulate.trace import Request

_ANSWER_TOKENS = 64
_CROWDING = 0.1
_CHUNK = 512
_INTERRUPTIONS = 2


def place(
    request: Request, cached: int, prefill: Sequence[Worker], decode: Sequence[Worker], transfer_s: float
) -> tuple[Worker, bool]:
    """Who computes the prompt, and whether it decodes the answer too."""
    tokens, answer = request.prompt_tokens, min(request.max_tokens or _ANSWER_TOKENS, _ANSWER_TOKENS)

    def decoding(worker: Worker) -> float:
        return answer * worker.step_s(1, tokens) * (1 + _CROWDING * worker.streams)

    def computing(worker: Worker, company: int) -> float:
        waits = (worker.streams + company) * worker.prompt_s(tokens, cached)
        return worker.first_token_s(tokens, cached) + waits

    beside = min(decoding(worker) for worker in decode)
    places = [(computing(worker, 0) + beside + transfer_s, False, worker) for worker in prefill]
    places += [(computing(worker, 1) + decoding(worker), True, worker) for worker in decode]
    places += [
        (computing(worker, 1) + decoding(worker) + _INTERRUPTIONS * worker.prompt_s(_CHUNK), True, worker)
        for worker in prefill
    ]
    _, whole, worker = min(places, key=lambda place: place[:2])
    return worker, whole
