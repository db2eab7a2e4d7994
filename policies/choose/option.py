"""What a chooser knows: of each candidate, and of the request."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from policies.model import EXPLORE, Goals, Slo

if TYPE_CHECKING:
    import random


@dataclass(slots=True)
class Option:
    """`p_meet` and the predictions are None where too little has been observed."""

    target: str
    place: int
    """In the policy's order, from 0."""
    cost_usd: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    p_meet: float | None
    expect: Goals
    """What the policy declares the target to keep."""
    inflight: int = 0
    """Attempts under way there."""
    passed_over: int = 0
    """Requests it could have had and others got, since it was last observed."""
    reason: str = ""
    say: Callable[[Option], str] | None = None
    """Makes the reason when somebody asks: words cost more than deciding."""
    verdict: str = ""
    """What `say` tells in words."""

    @property
    def why(self) -> str:
        """Why it is at its place."""
        return self.reason or (self.say(self) if self.say is not None else "")

    @property
    def cost_text(self) -> str:
        return "cost unknown" if self.cost_usd is None else f"${self.cost_usd:.6f}"

    @property
    def likely_ttft_ms(self) -> float | None:
        """As predicted, or else as declared."""
        return self.ttft_ms if self.ttft_ms is not None else self.expect.ttft_ms

    @property
    def likely_tpot_ms(self) -> float | None:
        return self.tpot_ms if self.tpot_ms is not None else self.expect.tpot_ms


@dataclass(frozen=True, slots=True)
class Asked:
    """What a chooser knows of the request and its rule."""

    slo: Slo
    rng: random.Random
    weights: Mapping[str, float] = field(default_factory=dict)
    """The rule's, by target."""
    turn: int = 0
    """How many requests this rule has sent."""
    session: str | None = None
    """Names the conversation or user that the request belongs to."""
    prefix: str | None = None
    """Names how the prompt begins."""
    answer_tokens: int = 1
    """As many as the answer is expected to have."""
    left: Collection[str] = ()
    """The targets that this rule has spilled over from, and not come back to."""
    back_at: float = 1.0
    """The chance to keep the goals with which it comes back."""
    explore: float = EXPLORE
    """Percent of requests that may go where nobody has looked lately."""


Chooser = Callable[[list[Option], Asked], tuple[list[Option], str]]
"""(options in the policy's order, what is asked) -> (options best first with their reasons, why the first is first).

None drops any: a request that misses its goal is still better answered than refused.
"""


def ranked(options: list[Option], key: Callable[[Option], Any]) -> list[Option]:
    """By `key`, the least first; None counts as most. Those alike stay in the policy's order."""

    def of(option: Option) -> tuple[Any, int]:
        value = key(option)
        return (math.inf if value is None else value, option.place)

    return sorted(options, key=of)


def due_again(options: Sequence[Option], first: Option, asked: Asked) -> list[Option]:
    """Those that have idled so long, because they were slow or nobody knows them, that only trying tells how they are
    now: each may have `explore` percent of the requests. That is what exploring may cost."""
    if not asked.explore:
        return []
    every = 100 / asked.explore
    return [option for option in options if option is not first and option.passed_over >= every and not option.inflight]


def by_rendezvous(options: Sequence[Option], key: str, weights: Mapping[str, float]) -> list[Option]:
    """The order in which `key` prefers them: for one key always the same, and when one leaves, only its keys move.

    Weighted rendezvous hashing (Thaler & Ravishankar 1998; weights as in Schindelhauer & Schomaker 2005).
    """

    def score(option: Option) -> float:
        digest = hashlib.blake2b(f"{option.target}\0{key}".encode(), digest_size=8).digest()
        draw = (int.from_bytes(digest, "big") + 1) / (2**64 + 1)
        return weights.get(option.target, 1.0) / -math.log(draw)

    return sorted(options, key=lambda option: (-score(option), option.place))


def crowded(option: Option, options: Sequence[Option]) -> bool:
    """Whether it has over 1.25 times its share of what is under way (Mirrokni et al. 2018, bounded loads)."""
    share = (sum(one.inflight for one in options) + 1) / len(options)
    return option.inflight >= max(1.0, math.ceil(1.25 * share))
