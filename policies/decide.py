"""The decision: route, class, rule, candidates, choice. A pure function of what it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.choose import CHOOSERS, Option
from policies.classify import classify, facts_of
from policies.errors import NoCandidate, NoRoute
from policies.explain import Candidate, Decision
from policies.model import Goals, Policy, Profile, Rule, Slo, Target
from policies.state import RouterState, TargetState

if TYPE_CHECKING:
    import random

EXPECTED_OUTPUT_TOKENS = 256
"""The length of an answer that nobody limited, for comparing costs."""


def decide(policy: Policy, profile: Profile, state: RouterState, rng: random.Random) -> Decision:
    """Order the targets that can take the request, best first.

    `rng` is there for choices that spread load; those so far need none. Raises NoRoute for a model that is no
    route, NoCandidate where every candidate's context is too short.
    """
    rules = policy.routes.get(profile.model)
    if rules is None:
        raise NoRoute(profile.model, policy.routes)
    facts = facts_of(profile)
    facts["class"] = class_name = classify(policy, facts)
    rule = next(rule for rule in rules if rule.when.holds(facts))
    slo = _goals_of(rule, profile)
    options: list[Option] = []
    dropped: dict[str, str] = {}
    for place, name in enumerate(rule.candidates):
        target, known = policy.targets[name], state.get(name)
        if (reason := _too_long(target, known, profile)) is not None:
            dropped[name] = reason
        else:
            options.append(_option(target, known, profile, place, slo.goals))
    ordered, reason = CHOOSERS[rule.choose](options, slo) if options else ([], "no candidate can hold the request")
    if dropped and options:
        reason += f" ({len(dropped)} of {len(rule.candidates)} candidates too small)"
    kept = {option.target: option for option in options}
    decision = Decision(
        route=profile.model,
        class_name=class_name,
        rule=rule.line,
        choose=rule.choose,
        candidates=tuple(
            _shown(kept[name]) if name in kept else Candidate(name, False, dropped[name]) for name in rule.candidates
        ),
        order=tuple(option.target for option in ordered),
        reason=reason,
    )
    if not options:
        raise NoCandidate(decision)
    return decision


def _goals_of(rule: Rule, profile: Profile) -> Slo:
    """The stricter of the rule's goals and the request's own."""
    if rule.slo is None:
        return Slo(profile.goals)
    return Slo(rule.slo.goals.stricter(profile.goals), rule.slo.at)


def _too_long(target: Target, known: TargetState | None, profile: Profile) -> str | None:
    """Why `target` cannot hold prompt and answer; None where it can (litellm#31557)."""
    limits = [limit for limit in (target.context, known.context if known else None) if limit is not None]
    if not limits:
        return None
    limit = min(limits)
    prompt = profile.tokens_by_target.get(target.name, profile.prompt_tokens)
    answer = profile.max_tokens or 1
    if prompt + answer <= limit:
        return None
    return f"prompt of {prompt} tokens and answer of {answer} exceed its context of {limit}"


def _option(target: Target, known: TargetState | None, profile: Profile, place: int, goals: Goals) -> Option:
    prompt = profile.tokens_by_target.get(target.name, profile.prompt_tokens)
    predicted = known.predict(prompt) if known is not None else None
    return Option(
        target=target.name,
        place=place,
        cost_usd=None
        if target.price is None
        else target.price.of(prompt, profile.max_tokens or EXPECTED_OUTPUT_TOKENS),
        ttft_ms=predicted.ttft_ms if predicted else None,
        tpot_ms=predicted.tpot_ms if predicted else None,
        p_meet=predicted.p_meet(goals) if predicted and goals else None,
        expect=target.expect,
    )


def _shown(option: Option) -> Candidate:
    return Candidate(
        target=option.target,
        kept=True,
        reason=option.reason,
        ttft_ms=option.ttft_ms,
        tpot_ms=option.tpot_ms,
        p_meet=option.p_meet,
        cost_usd=option.cost_usd,
    )
