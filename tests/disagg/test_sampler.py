"""Drawing tokens: each parameter does what its name says, and a seed gives the same token in any company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.disagg.engine.sampler import sample
from backends.disagg.engine.sequence import SamplingParams, Sequence

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -4.0])


def draw(
    logits: torch.Tensor = LOGITS, prompt: tuple[int, ...] = (0,), said: tuple[int, ...] = (), **params: Any
) -> int:
    return sample(logits.clone()[None], [sequence(prompt, said, **params)])[0]


def sequence(prompt: tuple[int, ...] = (0,), said: tuple[int, ...] = (), **params: Any) -> Sequence:
    seq = Sequence(1, list(prompt), SamplingParams(max_tokens=10, **params))
    seq.tokens += said
    return seq


def drawn(**params: Any) -> set[int]:
    """What 200 seeds draw."""
    return {draw(seed=seed, temperature=1.5, **params) for seed in range(200)}


def test_greedy_is_the_likeliest() -> None:
    assert draw() == 0


def test_without_limits_every_token_may_come() -> None:
    assert drawn() == {0, 1, 2, 3, 4, 5} or drawn() == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(("top_k", "allowed"), [(1, {0}), (2, {0, 1}), (3, {0, 1, 2})])
def test_top_k_leaves_the_k_likeliest(top_k: int, allowed: set[int]) -> None:
    assert drawn(top_k=top_k) == allowed


def test_top_p_leaves_the_smallest_set_that_reaches_it() -> None:
    probs = (LOGITS / 1.5).softmax(-1)
    share = float(probs[0] + probs[1] / 2)
    assert drawn(top_p=share) == {0, 1}
    assert drawn(top_p=0.0) == {0}


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    assert drawn(top_k=2, top_p=0.99) == {0, 1}
    assert drawn(top_k=2, top_p=0.5) == {0}


def test_min_p_leaves_out_the_unlikely() -> None:
    probs = (LOGITS / 1.5).softmax(-1)
    assert drawn(min_p=float(probs[2] / probs[0]) - 1e-4) == {0, 1, 2}
    assert drawn(min_p=1.0) == {0}


def test_presence_and_frequency_penalize_what_was_said_and_not_the_prompt() -> None:
    assert draw(prompt=(0, 0, 0), presence_penalty=2.0, frequency_penalty=2.0) == 0
    assert draw(said=(0,), presence_penalty=1.5) == 1
    assert draw(said=(0,), frequency_penalty=0.6) == 0
    assert draw(said=(0, 0), frequency_penalty=0.6) == 1
    assert draw(said=(1,), presence_penalty=-1.5) == 1, "a negative one encourages"


def test_repetition_penalizes_prompt_and_answer_on_both_sides_of_zero() -> None:
    assert draw(prompt=(0,), repetition_penalty=3.0) == 1
    assert draw(torch.tensor([-1.0, -1.5]), prompt=(0,), repetition_penalty=2.0) == 1


def test_a_bias_is_added() -> None:
    assert draw(logit_bias=((5, 100.0),)) == 5
    assert draw(logit_bias=((0, -100.0),)) == 1


def test_no_stop_id_is_drawn_before_min_tokens() -> None:
    """vllm#16705"""
    stops = frozenset({0})
    assert draw(stop_ids=stops, min_tokens=2) == 1
    assert draw(said=(1,), stop_ids=stops, min_tokens=2) == 1
    assert draw(said=(1, 1), stop_ids=stops, min_tokens=2) == 0


@pytest.mark.parametrize("flat", [0.01, 1.0, 6.0])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_p": 0.3},
        {"top_p": 0.999},
        {"top_k": 600},
        {"top_k": 40, "top_p": 0.5},
        {"min_p": 0.001},
        {"min_p": 0.9},
    ],
    ids=str,
)
def test_draws_from_a_large_vocabulary_follow_the_distribution(params: dict[str, Any], flat: float) -> None:
    """Whether or not the likeliest few hundred decide: never outside the allowed set, and as often as its odds say."""
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(0)) * flat
    probs, order = logits.double().softmax(-1).sort(descending=True)
    allowed = torch.ones(3000, dtype=torch.bool)
    if top_k := params.get("top_k"):
        allowed[top_k:] = False
    mass = probs.where(allowed, 0).cumsum(-1)
    allowed &= mass - probs < params.get("top_p", 1.0) * float(mass[-1])
    allowed &= probs >= params.get("min_p", 0.0) * probs[0] * (1 - 1e-6)
    count = int(allowed.sum())
    sequences = [sequence(seed=seed, temperature=1.0, **params) for seed in range(400)]
    tokens = sample(logits.expand(400, -1).clone(), sequences)
    place = torch.empty(3000, dtype=torch.int64)
    place[order] = torch.arange(3000)
    places = place[torch.tensor(tokens)]
    assert int(places.max()) <= count  # one off where rounding puts a token on the other side of top_p
    expected = float((probs[:count] * torch.arange(count)).sum() / probs[:count].sum())
    spread = float((probs[:count] * torch.arange(count) ** 2).sum() / probs[:count].sum() - expected**2) ** 0.5
    assert abs(float(places.double().mean()) - expected) <= 4 * spread / 20 + 1e-9


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    temperature=st.floats(0.1, 2),
    top_p=st.floats(0, 1),
    top_k=st.integers(0, 8),
    min_p=st.floats(0, 1),
    neighbours=st.integers(0, 5),
)
def test_a_seed_draws_the_same_in_any_company(
    seed: int, temperature: float, top_p: float, top_k: int, min_p: float, neighbours: int
) -> None:
    params = {"seed": seed, "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    alone = draw(**params)
    rows = torch.stack([LOGITS.flip(0)] * neighbours + [LOGITS])
    others = [sequence(temperature=1.0, seed=index, presence_penalty=1.0) for index in range(neighbours)]
    assert sample(rows, [*others, sequence(**params)])[-1] == alone
