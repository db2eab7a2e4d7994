"""A policy as it is used: frozen, validated, every name resolved. `policies.load` makes it.

Latency in milliseconds, prices in USD per one million tokens, sizes in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from policies.breaker import BreakerRule
from policies.conditions import Condition
from policies.overrides import OVERRIDES, UNCHANGED, Overrides
from policies.tokens import Estimate

if TYPE_CHECKING:
    from pydantic import BaseModel

AfterCommit = Literal["error", "restart", "continue"]

OWN_HARDWARE = frozenset({"disagg"})
"""Provider types that run on the user's own machines: a target without a price costs nothing there."""
OWN_CAPABILITIES = frozenset({"tools", "json", "json-schema", "logprobs"})
"""What the bundled cluster has where a policy does not say; whether a model's template knows tools it says itself."""


@dataclass(frozen=True, slots=True)
class Goals:
    """Latency goals in milliseconds; None where nothing is asked."""

    ttft_ms: float | None = None
    """Time to first token."""
    tpot_ms: float | None = None
    """Time per output token after the first."""

    def __bool__(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None

    def stricter(self, other: Goals) -> Goals:
        """For each goal the smaller of both; a goal that only one side has stays."""
        return Goals(_smaller(self.ttft_ms, other.ttft_ms), _smaller(self.tpot_ms, other.tpot_ms))


def _smaller(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a target itself expects of a request if it came now: a P/D cluster knows its queues and its caches."""

    uncached_tokens: int
    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True, slots=True)
class Profile:
    """What a decision knows of one request."""

    model: str
    """The model name the client asked for: the name of a route."""
    prompt_tokens: int
    """What conditions see. The count of the target's own tokenizer where `exact`, else an estimate."""
    exact: bool = False
    max_tokens: int | None = None
    """The client's limit of the answer's length; None where it gave none."""
    goals: Goals = field(default_factory=Goals)
    stream: bool = False
    priority: float | None = None
    """The client's own figure; higher is more urgent."""
    needs: frozenset[str] = frozenset()
    """`policies.needs.NEEDS`: what the model must be capable of."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The client's own names for its request, as its body has them."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Those of the HTTP request that the policy asks for, names in lower case."""
    hour: float | None = None
    """Of the day in the policy's time zone, 0 to 24; None where nobody told the time."""
    weekday: str | None = None
    """`mon` to `sun`."""
    overrides: Overrides = UNCHANGED
    session: str | None = None
    """Names the conversation or user that the request belongs to."""
    key: str | None = None
    """The label of the gateway key that the request was let in by."""
    prefix: str | None = None
    """Names how the prompt begins: alike for prompts that could share KV."""
    tokens_by_target: Mapping[str, int] = field(default_factory=dict)
    """Prompt tokens as each target counts them: by its tokenizer, or estimated and corrected by what it reported."""
    forecasts: Mapping[str, Forecast] = field(default_factory=dict)
    """By target, for those that make them."""
    uncached_tokens: int | None = None
    """Of the prompt, at the target where they are fewest; None where nobody knows of any that is cached."""
    estimate: Estimate | None = None
    """What a target's count is compared with; None where none needs it."""


@dataclass(frozen=True, slots=True)
class Provider:
    name: str
    type: str
    options: BaseModel = field(repr=False)
    """The validated options. Not in the repr: headers may carry credentials."""


@dataclass(frozen=True, slots=True)
class Price:
    """USD per one million tokens."""

    input: float
    output: float

    def of(self, prompt_tokens: int, output_tokens: int) -> float:
        """USD for one request."""
        return (prompt_tokens * self.input + output_tokens * self.output) / 1e6


@dataclass(frozen=True, slots=True)
class Speed:
    """How a target behaves, for simulations; in milliseconds. Hosted targets have the first four, clusters the rest
    (of each worker), and the spread."""

    ttft_ms: float = 0.0
    """To the first token, before the prompt counts."""
    ttft_ms_per_1k: float = 0.0
    """More for each 1,000 prompt tokens."""
    tpot_ms: float = 0.0
    spread: float = 0.0
    """Of the times: the sigma of a log-normal factor."""
    step_ms: float = 0.0
    """Of a step in which nobody decodes and no prompt is computed; what follows adds to it."""
    step_ms_per_stream: float = 0.0
    step_ms_per_1k_context: float = 0.0
    """For each 1,000 KV tokens that the streams read together."""
    prompt_ms_per_1k: float = 0.0
    """For each 1,000 prompt tokens."""
    prompt_ms_per_1k_pairs: float = 0.0
    """For each 1,000 pairs of a prompt token and one before it."""
    transfer_ms_per_1k: float = 0.0
    """From prefill to decode, for each 1,000 prompt tokens, as far as nothing hides it."""


@dataclass(frozen=True, slots=True)
class Target:
    """A model at a provider."""

    name: str
    provider: str
    model: str
    context: int | None = None
    """Prompt and answer together, in tokens; None where the policy does not say."""
    price: Price | None = None
    """None: unknown. A target on own hardware without a price has Price(0, 0)."""
    expect: Goals = field(default_factory=Goals)
    """What the target is declared to keep until enough has been observed."""
    capabilities: frozenset[str] | None = None
    """`policies.needs.NEEDS` that it has; None where the policy does not say."""
    speed: Speed | None = None
    """How it behaves in a simulation; None where the policy does not say."""
    concurrency: int | None = None
    """How many requests may be under way there; None where the policy does not say, 0 where it is to be found out."""
    queue: int = 0
    """How many more may wait for that."""
    quota: str | None = None
    """Names the provider's limit of requests that it shares with other targets; None: with those of the same model."""
    keeps_no_data: bool = False
    """Whether its provider is declared to keep nothing of requests; own hardware does not."""


@dataclass(frozen=True, slots=True)
class ClassDef:
    name: str
    when: Condition
    priority: float = 0.0
    """Of its requests that do not say one themselves; the higher goes first where some must wait."""


@dataclass(frozen=True, slots=True)
class Slo:
    """The latency goals of a rule, and the share of requests that must meet all of them."""

    goals: Goals
    at: float = 0.9


@dataclass(frozen=True, slots=True)
class Share:
    """A target that gets a share of a rule's requests."""

    target: str
    percent: float
    """Above 0, and at most 100."""


@dataclass(frozen=True, slots=True)
class Spill:
    """How `choose: spill-over` comes back, and what it may cost."""

    back_at: float | None = None
    """The chance to keep the goals with which a target that was left is taken again; None for half-way between the
    rule's `at` and 1."""
    usd_per_hour: float | None = None
    """What the answers of the last hour may cost together; None for anything."""


EXPLORE = 2.0
"""What a rule that does not say explores with."""


@dataclass(frozen=True, slots=True)
class Rule:
    when: Condition
    candidates: tuple[str, ...]
    choose: str
    slo: Slo | None
    line: int
    """Where the rule stands in the file, from 1."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """By target, for choices that spread load; 1 for who is not named."""
    spill: Spill = field(default_factory=Spill)
    canary: Share | None = None
    """A target outside `candidates` that comes before them for a share of sessions, or of requests without one."""
    mirror: Share | None = None
    """A target that gets copies of a share of requests; what it answers nobody sees."""
    explore: float = EXPLORE
    """Percent of requests that each target may get that had none lately, to see how it is by now."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Every target that requests of this rule may reach."""
        more = [share.target for share in (self.canary, self.mirror) if share is not None]
        return (*self.candidates, *more)


@dataclass(frozen=True, slots=True)
class Hedge:
    """Second attempts beside slow first ones."""

    percent: float
    """Of requests that may have one."""
    usd_per_hour: float | None = None
    """What they may cost together; None for anything."""


@dataclass(frozen=True, slots=True)
class Resilience:
    retries: int = 2
    """Attempts after the first one."""
    ttft_timeout_ms: int = 3000
    """How long one attempt may take to its first content."""
    attempt_timeout_ms: int | None = None
    """How long one attempt may take before any of its answer can be given on: all of an answer that is not streamed
    has to be there by then. None for what is left of the deadline."""
    idle_timeout_ms: int = 10000
    """How long a stream may be silent after that."""
    deadline_ms: int = 60000
    """How long the request may take in all, over all attempts."""
    keepalive_ms: int = 15000
    """How long the gateway may be silent in a stream before it sends a comment."""
    after_commit: AfterCommit = "error"
    """What happens to a failure after content has come: the stream ends in an error; another target goes on where it
    stopped; or nothing is shown before all of it is there, so that it can start again unseen."""
    connect_timeout_ms: int | None = None
    """How long a new connection may take; None for what the provider says."""
    max_cost_usd: float | None = None
    """What all attempts of a request may cost together, as far as it can be told before each."""
    hedge: Hedge | None = None
    breaker: BreakerRule = field(default_factory=BreakerRule)
    """Of every target; only the policy's own counts, not a route's."""


@dataclass(frozen=True, slots=True)
class Check:
    """A request and what must be decided for it, while nothing has been observed."""

    line: int
    request: Profile
    target: str | None = None
    class_name: str | None = None
    route: str | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    filename: str
    providers: Mapping[str, Provider]
    targets: Mapping[str, Target]
    classes: tuple[ClassDef, ...]
    """In order: the first that matches names the request's class, and the last one always matches."""
    routes: Mapping[str, tuple[Rule, ...]]
    """By the model name that clients ask for. Each route's last rule always matches."""
    resilience: Resilience = field(default_factory=Resilience)
    """Where a route has none of its own."""
    resilience_by_route: Mapping[str, Resilience] = field(default_factory=dict)
    overrides: frozenset[str] = frozenset(OVERRIDES)
    """Those that a request may have."""
    overrides_by_key: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Those of requests that were let in by a key with that label."""
    timezone: str = "UTC"
    """What `hour` and `weekday` are told in."""
    checks: tuple[Check, ...] = ()
    included: tuple[str, ...] = ()
    """Paths of the files that it includes."""

    headers_asked_for: frozenset[str] = field(init=False)
    """Names of HTTP headers that conditions look at, in lower case."""

    def resilience_of(self, route: str) -> Resilience:
        return self.resilience_by_route.get(route, self.resilience)

    def overrides_of(self, key: str | None) -> frozenset[str]:
        """Those that a request by that key may have."""
        return self.overrides if key is None else self.overrides_by_key.get(key, self.overrides)

    def priority_of(self, class_name: str, profile: Profile) -> float:
        if profile.priority is not None:
            return profile.priority
        return next((one.priority for one in self.classes if one.name == class_name), 0.0)

    def rule_at(self, route: str, line: int) -> Rule:
        return next(rule for rule in self.routes[route] if rule.line == line)

    def __post_init__(self) -> None:
        whens = [one.when for one in self.classes] + [rule.when for rules in self.routes.values() for rule in rules]
        asked = frozenset[str]().union(*(when.keys("headers") for when in whens))
        object.__setattr__(self, "headers_asked_for", asked)
