"""`prefix-affinity`: prompts that begin alike go to the same target, as long as it is not crowded.

When: several replicas with prefix caches and long common beginnings (system prompts, documents, few-shot examples):
they are computed once. Limits: a beginning that everybody shares would overload one target, so one with over 1.25
times its share of what is under way is passed by; within a bundled cluster, placement does better, by blocks.
"""

from __future__ import annotations

from policies.choose.option import Asked, Option, by_rendezvous, crowded


def prefix_affinity(options: list[Option], asked: Asked) -> tuple[list[Option], str]:
    """By weighted rendezvous hashing of the prompt's beginning, with bounded loads."""
    return placed(options, asked, asked.prefix, "prompts that begin like this one")


def placed(options: list[Option], asked: Asked, key: str | None, what: str) -> tuple[list[Option], str]:
    """The same for any `key`; without one, the least busy first."""
    if key is None:
        ordered = sorted(options, key=lambda option: (option.inflight, option.place))
        for option in options:
            option.reason = f"{option.inflight} under way"
        return ordered, f"{ordered[0].target} is the least busy: nothing says where {what} go"
    preferred = by_rendezvous(options, key, asked.weights)
    full = [option for option in preferred if crowded(option, options)]
    ordered = [option for option in preferred if option not in full] + full
    for distance, option in enumerate(preferred):
        option.reason = f"number {distance + 1} for {what}" + (", crowded" if option in full else "")
    first = ordered[0]
    if first is preferred[0]:
        return ordered, f"{first.target} is where {what} go"
    return ordered, f"{preferred[0].target} is where {what} go, but crowded; {first.target} is next"
