"""Policies that come with the package."""

from __future__ import annotations

from importlib.resources import files

from policies.errors import did_you_mean

PRESETS = (
    "agents",
    "cost-first",
    "demo",
    "hybrid",
    "latency-first",
    "local",
    "local-first",
    "privacy-local-only",
    "rag-long-context",
)


def preset(name: str) -> str:
    """The YAML text of a preset. Raises ValueError for an unknown name."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r} ({did_you_mean(name, PRESETS)})")
    return (files("policies.presets") / f"{name}.yaml").read_text(encoding="utf-8")
