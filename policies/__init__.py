"""The decision core: policies in YAML, and what they decide. No I/O, no clock, no randomness of its own."""

from policies.check import CheckFailure, check
from policies.decide import decide
from policies.errors import NoCandidate, NoRoute, PolicyError, Problem
from policies.estimate import estimate_prompt_tokens
from policies.explain import Candidate, Decision
from policies.loader import load
from policies.model import Goals, Policy, Price, Profile, Provider, Resilience, Target
from policies.presets import PRESETS, preset
from policies.state import RouterState, TargetState

__all__ = [
    "PRESETS",
    "Candidate",
    "CheckFailure",
    "Decision",
    "Goals",
    "NoCandidate",
    "NoRoute",
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
    "preset",
]
