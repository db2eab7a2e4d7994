"""Policies whose targets are scripts of the fake provider."""

from __future__ import annotations

from router import Router
from router.chaos import FakeProvider


def policy_of(provider: FakeProvider, *models: str, **resilience: int) -> str:
    """One route `chat`, in order; target `t0` is the first model, `t1` the second."""
    limits = {"retries": 2, "ttft_timeout_ms": 2000, "idle_timeout_ms": 2000, "deadline_ms": 10000, **resilience}
    targets = "\n".join(
        f"  t{index}: {{provider: fake, model: {model!r}, price: {{input: 1, output: 2}}}}"
        for index, model in enumerate(models)
    )
    names = ", ".join(f"t{index}" for index in range(len(models)))
    return f"""
version: 1
providers:
  fake: {{type: openai, base_url: "{provider.url}", api_key: sk-very-secret-key}}
targets:
{targets}
routes:
  chat:
    - {{candidates: [{names}], choose: in-order}}
resilience: {{{", ".join(f"{name}: {value}" for name, value in limits.items())}}}
"""


def router_of(provider: FakeProvider, *models: str, **resilience: int) -> Router:
    return Router.from_text(policy_of(provider, *models, **resilience), filename="test.yaml", env={})


ASK = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
