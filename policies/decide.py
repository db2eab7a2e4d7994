"""The decision: route, class, rule, candidates, choice. A pure function of what it is given."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING

from policies.choose import CHOOSERS, Asked, Option
from policies.classify import classify, facts_of
from policies.eligible import Dropped, why_not
from policies.errors import NoCandidate, NoRoute
from policies.explain import Candidate, Decision, Predicted
from policies.model import Goals, Policy, Profile, Rule, Share, Slo, Target
from policies.prefer import BY_SORT, prefer
from policies.state import RouterState, TargetState

if TYPE_CHECKING:
    import random


_UNSEEN = TargetState()
"""Of which nothing has been observed. Only read."""


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
    for rule in rules:  # the last one always holds
        if rule.when.holds(facts):
            break
    slo = _goals_of(rule, profile)
    answer_tokens = state.answer_tokens(profile.model, class_name, profile.max_tokens)
    options: list[Option] = []
    dropped: dict[str, Dropped] = {}
    key = (profile.model, rule.line)
    over_budget = rule.spill.usd_per_hour is not None and state.spent_usd(key) >= rule.spill.usd_per_hour
    names = rule.candidates
    canary = rule.canary if rule.canary is not None and _drawn(rule.canary, profile, rng) else None
    if canary is not None:
        names = (canary.target, *names)
    targets = policy.targets
    for place, name in enumerate(names):
        target, known = targets[name], state.get(name)
        if (why := why_not(target, known, profile, state.now_s)) is not None:
            dropped[name] = why
        elif over_budget and (target.price is None or target.price.input or target.price.output):
            cap = rule.spill.usd_per_hour
            dropped[name] = Dropped("budget", f"the last hour's answers have cost the {cap:g} USD that the rule allows")
        else:
            options.append(_option(target, known, profile, place, slo.goals, answer_tokens))
    asked = Asked(
        slo=slo,
        rng=rng,
        weights=rule.weights,
        turn=state.turns.get(key, 0),
        session=profile.session,
        prefix=profile.prefix,
        answer_tokens=answer_tokens,
        left=state.left(key),
        back_at=rule.spill.back_at or (slo.at + 1) / 2,
        explore=rule.explore,
    )
    choose = BY_SORT[profile.overrides.sort] if profile.overrides.sort else rule.choose
    ordered, reason = CHOOSERS[choose](options, asked) if options else ([], "no candidate can take the request")
    if canary is not None and canary.target not in dropped:
        ordered = sorted(ordered, key=lambda option: option.target != canary.target)
        reason = f"{canary.target} is the canary of this rule, and this request is one of its {canary.percent:g}%"
    if options:
        ordered, reason = prefer(ordered, reason, profile.overrides, policy.targets)
    if dropped and options:
        reason += f" ({len(dropped)} of {len(names)} candidates cannot take it)"
    decision = Decision(
        route=profile.model,
        class_name=class_name,
        rule=rule.line,
        choose=choose,
        candidates=partial(_candidates, names, options, dropped),
        order=tuple([option.target for option in ordered]),
        reason=reason,
        mirror=rule.mirror.target if rule.mirror is not None and _drawn(rule.mirror, profile, rng) else None,
        left=_left(options) if choose == "spill-over" else frozenset(),
        goals=slo.goals or None,
        predicted=partial(_predicted, options),
    )
    if not options:
        raise NoCandidate(decision, dropped)
    return decision


def _left(options: list[Option]) -> frozenset[str]:
    return frozenset(option.target for option in options if option.verdict == "left")


def _drawn(share: Share, profile: Profile, rng: random.Random) -> bool:
    """Whether a request is one of the share: a session always is or never."""
    if profile.session is None:
        return rng.random() * 100 < share.percent
    digest = hashlib.blake2b(f"{share.target}\0{profile.session}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") * 100 < share.percent * 2**32


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
    known = known or _UNSEEN
    if profile.forecasts and (forecast := profile.forecasts.get(target.name)) is not None:
        ttft_ms, tpot_ms, p_meet = known.foreseen.expect(forecast, goals)
    else:
        ttft_ms, tpot_ms, p_meet = known.predictor.expect(prompt, known.inflight, goals)
    return Option(target.name, place, cost, ttft_ms, tpot_ms, p_meet, target.expect, known.inflight, known.passed_over)


def _candidates(names: tuple[str, ...], options: list[Option], dropped: dict[str, Dropped]) -> tuple[Candidate, ...]:
    kept = {option.target: option for option in options}
    return tuple(_shown(kept[name]) if name in kept else Candidate(name, False, dropped[name].reason) for name in names)


def _predicted(options: list[Option], target: str) -> Predicted:
    option = next(option for option in options if option.target == target)
    return Predicted(option.ttft_ms, option.tpot_ms, option.p_meet)


def _shown(option: Option) -> Candidate:
    return Candidate(option.target, True, option.why, option.ttft_ms, option.tpot_ms, option.p_meet, option.cost_usd)
