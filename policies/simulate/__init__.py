"""Traffic replayed through the live decision against models of the targets: what a policy would do, before it does."""

from policies.simulate.report import Report, summarize
from policies.simulate.run import Outcome, simulate
from policies.simulate.trace import Request, TraceError, read_trace
from policies.simulate.world import World, world_of

__all__ = [
    "Outcome",
    "Report",
    "Request",
    "TraceError",
    "World",
    "read_trace",
    "simulate",
    "summarize",
    "world_of",
]
