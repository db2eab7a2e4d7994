"""From logits to token ids: greedy, or temperature and nucleus sampling (Holtzman et al. 2020)."""

from __future__ import annotations

import torch

from backends.disagg.engine.sequence import Sequence


def sample(logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    """The next token id of each sequence; row i of `logits` (float32 [>= n, vocab]) is sequence i's."""
    greedy: list[int] = logits.argmax(-1).tolist()
    return [_draw(logits[row], seq) if seq.params.temperature > 0 else greedy[row] for row, seq in enumerate(sequences)]


def _draw(logits: torch.Tensor, seq: Sequence) -> int:
    """Inverse-CDF draw with the seed's number for this output position."""
    params = seq.params
    probs, ids = (logits / params.temperature).softmax(-1).sort(descending=True, stable=True)
    cumulative = probs.double().cumsum(-1)
    kept = len(probs)
    if params.top_p < 1.0:  # the smallest set whose mass reaches top_p; at least one token
        kept = min(kept, int((cumulative < params.top_p).sum()) + 1)
    target = params.uniform(seq.output_len) * float(cumulative[kept - 1])
    index = int(torch.searchsorted(cumulative[:kept], target, right=True))
    return int(ids[min(index, kept - 1)])
