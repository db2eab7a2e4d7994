"""A request inside the engine: its tokens, its KV blocks, and where it stands."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn and when generation ends.

    `temperature` 0 is greedy. `seed` names the whole random stream: the number drawn for output position i
    is a pure function of (seed, i), so the same seed gives the same text whatever else is in the batch and
    on whichever worker a position is computed.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    """Token ids that end generation; the ending token is reported but is not part of the text."""
    top_k: int = 0
    """Draw from the k likeliest tokens only; 0 for all."""
    min_p: float = 0.0
    """Leave out tokens less likely than this share of the likeliest one's probability."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """OpenAI's: subtracted from the logit of each token generated so far, once, and for each time it was."""
    repetition_penalty: float = 1.0
    """Keskar et al. 2019 (CTRL): logits of tokens in prompt or answer are divided (negative: multiplied) by it."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, added to its logit)."""
    min_tokens: int = 0
    """No stop id is drawn before the answer has as many tokens."""
    logprobs: int | None = None
    """Report each token's log-probability, as the model gives it, and those of so many likeliest; None for none."""

    @property
    def plain(self) -> bool:
        """Whether logits are used as the model gives them."""
        return not (
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.min_tokens
        )

    def uniform(self, position: int) -> float:
        """The number in [0, 1) for output `position`: SplitMix64 (Steele et al. 2014) on seed and position."""
        z = (self.seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1342543DE82EF95) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((z ^ (z >> 31)) >> 11) / (1 << 53)


class Status(Enum):
    WAITING = auto()
    """Submitted; holds no blocks."""
    PREFILLING = auto()
    """Holds its prompt's blocks; some of what is known is not computed yet."""
    RECEIVING = auto()
    """Holds its prompt's blocks; another worker's KV is being written into them."""
    DECODING = auto()
    SWAPPED = auto()
    """Preempted: its KV lies in host memory and waits for blocks."""
    HELD = auto()
    """Prefilled for another worker: its KV stays until that one is done, for it may die."""
    FINISHED = auto()


class Constraint(Protocol):
    """A grammar's state, as `grammar.Grammar` keeps it."""

    def mask(self, vocabulary: int) -> Any: ...

    def advance(self, token: int) -> None: ...

    @property
    def finished(self) -> bool: ...

    @property
    def error(self) -> str: ...


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` is the prompt and what was generated; KV exists for the first `computed` of them.

    One that goes on from where another worker left it comes with the `replay` it had given already: those tokens'
    KV is computed like a prompt's, but they are part of the answer.
    """

    id: int
    tokens: list[int]
    params: SamplingParams
    prefill_only: bool = False
    """Stop after the first token and hold the KV for another worker."""
    remote_kv: bool = False
    """The prompt's KV and the first token come from another worker."""
    deadline: float = 0.0
    """When the first token is due, on any one clock: of those that wait, the earliest goes first."""
    tpot_s: float | None = None
    """Seconds between its tokens that were promised; None for no promise."""
    replay: InitVar[SequenceOf[int]] = ()
    """Tokens of the answer that were given before it came here."""
    prompt_len: int = 0
    known_len: int = 0
    """Tokens that are computed before anything is drawn: the prompt, and what is replayed."""
    status: Status = Status.WAITING
    computed: int = 0
    cached: int = 0
    """Prompt tokens whose KV was found rather than computed."""
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    """`prefix_keys` of the prompt, where its blocks may be shared."""
    decoded_at: int = 0
    """The scheduler's step in which it last got a token."""
    passed_by: int = 0
    """How many that came later began before it."""
    grammar: Constraint | None = None
    """What the answer must look like."""
    host_kv: object = None
    """The runner's copy of the KV while the sequence is swapped out, or spilled while it is held."""

    def __post_init__(self, replay: SequenceOf[int]) -> None:
        self.prompt_len = len(self.tokens)
        self.take_over(replay)

    def take_over(self, replay: SequenceOf[int]) -> None:
        """Go on after `replay`, the answer's tokens so far; those that are here already are the same."""
        for token in replay[self.output_len :]:
            self.append(token)
        self.known_len = len(self.tokens)

    def append(self, token: int) -> None:
        """Take the next token of the answer."""
        self.tokens.append(token)
        if self.grammar is not None and token not in self.params.stop_ids:
            self.grammar.advance(token)

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    def finish_reason(self) -> str | None:
        """Why generation is over after the newest token, in OpenAI's words; None while it goes on."""
        if self.tokens[-1] in self.params.stop_ids or (self.grammar is not None and self.grammar.finished):
            return "stop"
        if self.output_len >= self.params.max_tokens:
            return "length"
        return None
