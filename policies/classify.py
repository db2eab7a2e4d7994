"""Names a request's class: the first one of the policy whose condition holds."""

from __future__ import annotations

from typing import Any

from policies.model import Policy, Profile


def facts_of(profile: Profile) -> dict[str, Any]:
    """What conditions can ask about a request, `class` aside. Goals are the request's own, in milliseconds."""
    return {
        "prompt_tokens": profile.prompt_tokens,
        "uncached_tokens": profile.prompt_tokens if profile.uncached_tokens is None else profile.uncached_tokens,
        "max_tokens": profile.max_tokens,
        "ttft_ms": profile.goals.ttft_ms,
        "tpot_ms": profile.goals.tpot_ms,
        "stream": profile.stream,
        "priority": profile.priority,
        "hour": profile.hour,
        "weekday": profile.weekday,
        "session": profile.session,
        "key": profile.key,
        "needs": profile.needs,
        "metadata": profile.metadata,
        "headers": profile.headers,
        "model": profile.model,
    }


def classify(policy: Policy, facts: dict[str, Any]) -> str:
    """The class of a request with these facts. The loader makes sure that the last class takes every one."""
    return next(class_.name for class_ in policy.classes if class_.when.holds(facts))
