"""From logits to token ids: penalties and biases, then greedy or a draw (temperature, top-k, nucleus, min-p)."""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F

from backends.disagg.engine.sequence import Sequence

TopTokens = tuple[tuple[int, float], ...]
_LIKELIEST = 512
_STRETCH = 256


def sample(logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    """The next token id of each sequence; row i of `logits` (float32 [>= n, vocab]) is sequence i's."""
    for row, seq in enumerate(sequences):
        if not seq.params.plain or seq.grammar is not None:
            _adjust(logits[row], seq)
    tokens: list[int] = logits.argmax(-1).tolist()
    drawn = [row for row, seq in enumerate(sequences) if seq.params.temperature > 0]
    cut = [row for row in drawn if _cut(sequences[row])]
    free = [row for row in drawn if not _cut(sequences[row])]
    for draw, some in ((_draw_cut, cut), (_draw, free)):
        if some:
            chosen = [sequences[row] for row in some]
            temperatures = torch.tensor([seq.params.temperature for seq in chosen], device=logits.device)
            probs = (logits[some] / temperatures[:, None]).softmax(-1)
            for row, token in zip(some, draw(probs, chosen), strict=True):
                tokens[row] = token
    return tokens


def _cut(seq: Sequence) -> bool:
    """Whether some tokens are left out of its draws."""
    return seq.params.top_k > 0 or seq.params.top_p < 1.0 or seq.params.min_p > 0.0


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


def _draw(probs: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    """Inverse-CDF draws from probs [n, vocab], in the vocabulary's order, each with its seed's number.

    In two steps, first a stretch of the vocabulary and then a token in it: running sums over all of it take longer.
    """
    numbers = torch.tensor([seq.params.uniform(seq.output_len) for seq in sequences], dtype=torch.float64)
    stretches = F.pad(probs, (0, -probs.shape[-1] % _STRETCH)).view(len(sequences), -1, _STRETCH)
    masses = stretches.sum(-1).double()
    stretch, left = _place(masses, numbers.to(probs.device))
    inside, _ = _place(stretches[torch.arange(len(sequences)), stretch].double(), left)
    tokens: list[int] = (stretch * _STRETCH + inside).tolist()
    return tokens


def _place(masses: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row of masses [n, places], where numbers [n] in [0, 1) of its sum fall: (the place, always one with a
    mass, and how far into it, in [0, 1])."""
    sums = masses.cumsum(-1)
    total = sums[:, -1:]
    target = torch.minimum(numbers[:, None] * total, total.nextafter(torch.zeros_like(total)))
    place = torch.searchsorted(sums, target, right=True)
    mass = masses.gather(-1, place)
    before = sums.gather(-1, place) - mass
    return place.squeeze(-1), ((target - before) / mass).clamp(0, 1).squeeze(-1)


def _draw_cut(probs: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    """Draws among the likeliest only (top-k; nucleus: Holtzman et al. 2020; min-p), from the likeliest down.

    The likeliest few hundred nearly always decide: sorting a whole vocabulary takes longer than a small model.
    """
    values, ids = probs.topk(min(_LIKELIEST, probs.shape[-1]))
    tokens = []
    for row, seq in enumerate(sequences):
        index = _draw_sorted(values[row], seq, whole=values.shape[-1] == probs.shape[-1])
        if index is None:
            every, order = probs[row].sort(descending=True, stable=True)
            index = _draw_sorted(every, seq, whole=True)
            assert index is not None
            tokens.append(int(order[index]))
        else:
            tokens.append(int(ids[row, index]))
    return tokens


def _draw_sorted(probs: torch.Tensor, seq: Sequence, *, whole: bool) -> int | None:
    """The place that is drawn in probs, sorted from the likeliest down; None where the rest of a vocabulary that
    is not `whole` here could matter."""
    params = seq.params
    # Whether less likely tokens than these may be among those that are kept.
    unseen = not whole and not 0 < params.top_k <= len(probs)
    kept = min(len(probs), params.top_k or len(probs))
    cumulative = probs[:kept].double().cumsum(-1)
    total = 1.0 if unseen else float(cumulative[-1])  # what top_p is a share of: all that top_k left
    ends = [kept]
    if params.top_p < 1.0:  # the smallest set whose mass reaches top_p; at least one token
        ends.append(int((cumulative < params.top_p * total).sum()) + 1)
    if params.min_p > 0.0:
        ends.append(int((probs[:kept] >= params.min_p * probs[0]).sum()))
    end = min(ends)
    if unseen and end == kept:
        return None
    target = params.uniform(seq.output_len) * float(cumulative[end - 1])
    return min(int(torch.searchsorted(cumulative[:end], target, right=True)), end - 1)


def logprobs(logits: torch.Tensor, sequences: list[Sequence]) -> dict[Sequence, torch.Tensor]:
    """Float32 [vocab] for each sequence that asked for them; to be called before `sample`, which changes logits."""
    return {seq: logits[row].log_softmax(-1) for row, seq in enumerate(sequences) if seq.params.logprobs is not None}


def top_tokens(row: torch.Tensor, chosen: int, count: int) -> TopTokens:
    """(token, log-probability) of the `chosen` one, then of the `count` likeliest, best first."""
    values, ids = row.topk(count) if count else (row[:0], row[:0])
    best = zip(ids.tolist(), values.tolist(), strict=True)
    return ((chosen, float(row[chosen])), *((int(token), value) for token, value in best))
