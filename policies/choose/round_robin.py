"""`round-robin`: each in its turn.

When: equal targets and requests much alike. Limits: a slow target gets as many as a fast one; where prompts differ a
lot, least-busy keeps queues shorter.
"""

from __future__ import annotations

from policies.choose.option import Asked, Option


def round_robin(options: list[Option], asked: Asked) -> tuple[list[Option], str]:
    """The next one in the policy's order after the last request of this rule, and those after it."""
    at = asked.turn % len(options)
    ordered = options[at:] + options[:at]
    for distance, option in enumerate(ordered):
        option.reason = "its turn" if not distance else f"its turn comes {distance} later"
    return ordered, f"it is {ordered[0].target}'s turn"
