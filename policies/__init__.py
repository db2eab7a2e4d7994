"""The decision core: policies in YAML, and what they decide. No I/O, no clock, no randomness of its own."""

from policies.check import CheckFailure, check
from policies.conditions import WEEKDAYS
from policies.decide import decide
from policies.errors import NoCandidate, NoRoute, PolicyError, Problem
from policies.explain import Candidate, Decision
from policies.loader import load
from policies.model import Forecast, Goals, Policy, Price, Profile, Provider, Resilience, Target
from policies.needs import NEEDS, needs_of
from policies.overrides import OVERRIDES, UNCHANGED, Overrides
from policies.prefix import prefix_of
from policies.presets import PRESETS, preset
from policies.state import RouterState, TargetState
from policies.tokens import Estimate, estimate_prompt_tokens

__all__ = [
    "NEEDS",
    "OVERRIDES",
    "PRESETS",
    "UNCHANGED",
    "WEEKDAYS",
    "Candidate",
    "CheckFailure",
    "Decision",
    "Estimate",
    "Forecast",
    "Goals",
    "NoCandidate",
    "NoRoute",
    "Overrides",
    "Policy",
    "PolicyError",
    "Price",
    "Problem",
    "Profile",
    "Provider",
    "Resilience",
    "RouterState",
    "Target",
    "TargetState",
    "check",
    "decide",
    "estimate_prompt_tokens",
    "load",
    "needs_of",
    "prefix_of",
    "preset",
]
