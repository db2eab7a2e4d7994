"""The decision: route, class, rule, candidates, choice. A pure function of what it is given."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from policies.choose import CHOOSERS, Asked, Option
from policies.classify import classify, facts_of
from policies.eligible import Dropped, why_not
from policies.errors import NoCandidate, NoRoute
from policies.explain import Candidate, Decision
from policies.model import Goals, Policy, Profile, Rule, Slo, Target
from policies.prefer import BY_SORT, prefer
from policies.state import RouterState, TargetState

if TYPE_CHECKING:
    import random


def decide(policy: Policy, profile: Profile, state: RouterState, rng: random.Random) -> Decision:
    """Order the targets that can take the request, best first.

    `rng` is drawn from by choices that spread load at random. `state` is only read: `RouterState.sent` takes note
    of a decision that is carried out. Raises NoRoute for a model that is no route, NoCandidate where no candidate can
    take the request.
    """
    rules = policy.routes.get(profile.model)
    if rules is None:
        raise NoRoute(profile.model, policy.routes)
    facts = facts_of(profile)
    facts["class"] = class_name = classify(policy, facts)
    rule = next(rule for rule in rules if rule.when.holds(facts))
    slo = _goals_of(rule, profile)
    answer_tokens = state.answer_tokens(profile.model, class_name, profile.max_tokens)
    options: list[Option] = []
    dropped: dict[str, Dropped] = {}
    for place, name in enumerate(rule.candidates):
        target, known = policy.targets[name], state.get(name)
        if (why := why_not(target, known, profile)) is not None:
            dropped[name] = why
        else:
            options.append(_option(target, known, profile, place, slo.goals, answer_tokens))
    asked = Asked(
        slo=slo,
        rng=rng,
        weights=rule.weights,
        turn=state.turns.get((profile.model, rule.line), 0),
        session=profile.session,
        prefix=profile.prefix,
        answer_tokens=answer_tokens,
    )
    choose = BY_SORT[profile.overrides.sort] if profile.overrides.sort else rule.choose
    ordered, reason = CHOOSERS[choose](options, asked) if options else ([], "no candidate can take the request")
    if options:
        ordered, reason = prefer(ordered, reason, profile.overrides, policy.targets)
    if dropped and options:
        reason += f" ({len(dropped)} of {len(rule.candidates)} candidates cannot take it)"
    decision = Decision(
        route=profile.model,
        class_name=class_name,
        rule=rule.line,
        choose=choose,
        candidates=partial(_candidates, rule.candidates, options, dropped),
        order=tuple([option.target for option in ordered]),
        reason=reason,
    )
    if not options:
        raise NoCandidate(decision, {why.kind for why in dropped.values()})
    return decision


def _goals_of(rule: Rule, profile: Profile) -> Slo:
    """The stricter of the rule's goals and the request's own."""
    if rule.slo is None:
        return Slo(profile.goals)
    return Slo(rule.slo.goals.stricter(profile.goals), rule.slo.at)


def _option(
    target: Target, known: TargetState | None, profile: Profile, place: int, goals: Goals, answer_tokens: int
) -> Option:
    prompt = profile.tokens_by_target.get(target.name, profile.prompt_tokens)
    price = target.price
    cost = None if price is None else price.of(prompt, answer_tokens)
    # By position: this runs for every candidate of every request.
    if known is None or (predicted := known.predict(prompt)) is None:
        inflight, passed_over = (known.inflight, known.passed_over) if known is not None else (0, 0)
        return Option(target.name, place, cost, None, None, None, target.expect, inflight, passed_over)
    p_meet = predicted.p_meet(goals) if goals else None
    ttft_ms, tpot_ms = predicted.ttft_ms, predicted.tpot_ms
    return Option(target.name, place, cost, ttft_ms, tpot_ms, p_meet, target.expect, known.inflight, known.passed_over)


def _candidates(names: tuple[str, ...], options: list[Option], dropped: dict[str, Dropped]) -> tuple[Candidate, ...]:
    kept = {option.target: option for option in options}
    return tuple(_shown(kept[name]) if name in kept else Candidate(name, False, dropped[name].reason) for name in names)


def _shown(option: Option) -> Candidate:
    return Candidate(option.target, True, option.why, option.ttft_ms, option.tpot_ms, option.p_meet, option.cost_usd)
