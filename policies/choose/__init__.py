"""The ways to order candidates, by the name that a rule's `choose:` has.

Each takes what is known of the candidates that can hold the request and orders them; none drops any, because
a request that misses its goal is still better answered than refused.
"""

from __future__ import annotations

from collections.abc import Callable

from policies.choose.cheapest_meeting_slo import cheapest_meeting_slo
from policies.choose.in_order import in_order
from policies.choose.option import Option
from policies.model import Slo

Chooser = Callable[[list[Option], Slo], tuple[list[Option], str]]
"""(options in the policy's order, the goals) -> (options best first with their reasons, why the first is first)."""

CHOOSERS: dict[str, Chooser] = {"in-order": in_order, "cheapest-meeting-slo": cheapest_meeting_slo}

__all__ = ["CHOOSERS", "Chooser", "Option"]
