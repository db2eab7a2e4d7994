"""The ways to order candidates, by the name that a rule's `choose:` has; each file says when to use it."""

from __future__ import annotations

from policies.choose.cheapest import cheapest
from policies.choose.cheapest_meeting_slo import cheapest_meeting_slo
from policies.choose.highest_throughput import highest_throughput
from policies.choose.in_order import in_order
from policies.choose.least_busy import least_busy
from policies.choose.lowest_latency import lowest_latency
from policies.choose.most_likely_to_meet_slo import most_likely_to_meet_slo
from policies.choose.option import Asked, Chooser, Option
from policies.choose.prefix_affinity import prefix_affinity
from policies.choose.round_robin import round_robin
from policies.choose.spill_over import spill_over
from policies.choose.sticky import sticky
from policies.choose.weighted import weighted

CHOOSERS: dict[str, Chooser] = {
    "in-order": in_order,
    "cheapest-meeting-slo": cheapest_meeting_slo,
    "most-likely-to-meet-slo": most_likely_to_meet_slo,
    "spill-over": spill_over,
    "lowest-latency": lowest_latency,
    "highest-throughput": highest_throughput,
    "cheapest": cheapest,
    "least-busy": least_busy,
    "round-robin": round_robin,
    "weighted": weighted,
    "prefix-affinity": prefix_affinity,
    "sticky": sticky,
}
BY_GOALS = frozenset({"cheapest-meeting-slo", "most-likely-to-meet-slo", "lowest-latency", "spill-over"})
"""Those to which a rule's `slo` matters."""
EXPLORING = frozenset({"cheapest-meeting-slo", "lowest-latency", "spill-over"})
"""Those that try targets again; a rule's `explore` matters to them."""
BY_WEIGHTS = frozenset({"weighted", "least-busy", "prefix-affinity", "sticky"})
"""Those to which a rule's `weights` matter."""

__all__ = ["BY_GOALS", "BY_WEIGHTS", "CHOOSERS", "EXPLORING", "Asked", "Chooser", "Option"]
