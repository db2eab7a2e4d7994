"""From logits to token ids: penalties and biases, then greedy or a draw (temperature, top-k, nucleus, min-p)."""

from __future__ import annotations

from collections import Counter

import torch

from backends.disagg.engine.sequence import Sequence

TopTokens = tuple[tuple[int, float], ...]


def sample(logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    """The next token id of each sequence; row i of `logits` (float32 [>= n, vocab]) is sequence i's."""
    for row, seq in enumerate(sequences):
        if not seq.params.plain or seq.grammar is not None:
            _adjust(logits[row], seq)
    greedy: list[int] = logits.argmax(-1).tolist()
    return [_draw(logits[row], seq) if seq.params.temperature > 0 else greedy[row] for row, seq in enumerate(sequences)]


def _adjust(logits: torch.Tensor, seq: Sequence) -> None:
    """Apply what the request asks for to one row [vocab], in place. Only requests that ask pay for it."""
    params = seq.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(seq.tokens)), device=logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and seq.output_len:
        counts = Counter(seq.tokens[seq.prompt_len :])
        said = torch.tensor(list(counts), device=logits.device)
        times = torch.tensor(list(counts.values()), device=logits.device)
        logits[said] -= params.frequency_penalty * times + params.presence_penalty
    for token, bias in params.logit_bias:
        logits[token] += bias
    allowed: torch.Tensor | None = None
    if seq.grammar is not None:
        allowed = seq.grammar.mask(len(logits)).to(logits.device)
        logits.masked_fill_(~allowed, float("-inf"))
    if seq.output_len < params.min_tokens and params.stop_ids:
        ends = torch.tensor(sorted(params.stop_ids), device=logits.device)
        if allowed is not None:
            allowed[ends] = False
            if not allowed.any():
                return  # a grammar that only allows the end is not to be argued with
        logits[ends] = float("-inf")


def _draw(logits: torch.Tensor, seq: Sequence) -> int:
    """Inverse-CDF draw with the seed's number for this output position (nucleus: Holtzman et al. 2020)."""
    params = seq.params
    probs, ids = (logits / params.temperature).softmax(-1).sort(descending=True, stable=True)
    kept = min(len(probs), params.top_k or len(probs))
    cumulative = probs[:kept].double().cumsum(-1)
    if params.top_p < 1.0:  # the smallest set whose mass, of what top_k left, reaches top_p; at least one token
        kept = min(kept, int((cumulative < params.top_p * float(cumulative[-1])).sum()) + 1)
    if params.min_p > 0.0:
        kept = min(kept, int((probs[:kept] >= params.min_p * probs[0]).sum()))
    target = params.uniform(seq.output_len) * float(cumulative[kept - 1])
    index = int(torch.searchsorted(cumulative[:kept], target, right=True))
    return int(ids[min(index, kept - 1)])


def logprobs(logits: torch.Tensor, sequences: list[Sequence]) -> dict[Sequence, torch.Tensor]:
    """Float32 [vocab] for each sequence that asked for them; to be called before `sample`, which changes logits."""
    return {seq: logits[row].log_softmax(-1) for row, seq in enumerate(sequences) if seq.params.logprobs is not None}


def top_tokens(row: torch.Tensor, chosen: int, count: int) -> TopTokens:
    """(token, log-probability) of the `chosen` one, then of the `count` likeliest, best first."""
    values, ids = row.topk(count) if count else (row[:0], row[:0])
    best = zip(ids.tolist(), values.tolist(), strict=True)
    return ((chosen, float(row[chosen])), *((int(token), value) for token, value in best))
