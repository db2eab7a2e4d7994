"""Which candidates can take a request at all, and why the others cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from policies.model import Profile, Target
from policies.overrides import UNCHANGED

if TYPE_CHECKING:
    from policies.state import TargetState

Kind = Literal["context", "needs", "overrides", "budget", "busy", "cooling"]


@dataclass(frozen=True, slots=True)
class Dropped:
    """`kind` is what it failed by; `reason` is told."""

    kind: Kind
    reason: str
    status: int = 400
    """HTTP's, of a refusal for that."""
    wait_s: float | None = None
    """After which it may be otherwise."""


def why_not(target: Target, known: TargetState | None, profile: Profile, now_s: float = 0.0) -> Dropped | None:
    """None where `target` can take the request."""
    if profile.overrides is not UNCHANGED and (reason := _overridden(target, profile)) is not None:
        return Dropped("overrides", reason)
    if profile.needs and (reason := _lacking(target, profile)) is not None:
        return Dropped("needs", reason)
    if (reason := _too_long(target, known, profile)) is not None:
        return Dropped("context", reason)
    if known is None:
        return None
    if (wait_s := known.shut_s(now_s)) > 0:
        shut = max(known.breaker, known.quota, key=lambda one: one.wait_s(now_s))
        return Dropped("cooling", f"{shut.why}; tried again in {wait_s:.1f} s", shut.status, wait_s)
    if target.concurrency is not None and known.inflight + known.reserved >= (limit := known.limit(target) or 0):
        return Dropped("busy", f"it has {known.inflight} requests under way, and its limit is {limit}", 503, 1.0)
    return None


def _overridden(target: Target, profile: Profile) -> str | None:
    asked = profile.overrides
    names = {target.name, target.provider}
    if asked.only and names.isdisjoint(asked.only):
        return f"the request asks for only {', '.join(asked.only)}"
    if not names.isdisjoint(asked.ignore):
        return "the request asks to ignore it"
    if asked.deny_data_collection and not target.keeps_no_data:
        return "the request denies data collection, and its provider is not declared to keep nothing"
    if (most := asked.max_price) is not None:
        if target.price is None:
            return "the request has a max_price, and its price is unknown"
        if target.price.input > most.input or target.price.output > most.output:
            return (
                f"it costs {target.price.input:g} and {target.price.output:g} USD per million tokens in and out, more "
                f"than the request's max_price of {most.input:g} and {most.output:g}"
            )
    return None


def _lacking(target: Target, profile: Profile) -> str | None:
    """A target that declares no capabilities may have any, unless the request wants it declared."""
    if target.capabilities is None:
        if not profile.overrides.require_parameters:
            return None
        return f"the request needs {_listed(profile.needs)} and requires that to be declared"
    missing = profile.needs - target.capabilities
    return f"it has no {_listed(missing)}" if missing else None


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))


def _too_long(target: Target, known: TargetState | None, profile: Profile) -> str | None:
    """litellm#31557: a prompt that does not fit is not sent."""
    limit, own = target.context, known.context if known is not None else None
    if limit is None or (own is not None and own < limit):
        limit = own
    if limit is None:
        return None
    prompt = profile.tokens_by_target.get(target.name, profile.prompt_tokens)
    answer = profile.max_tokens or 1
    if prompt + answer <= limit:
        return None
    return f"prompt of {prompt} tokens and answer of {answer} exceed its context of {limit}"
