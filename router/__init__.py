"""splitroute: send each LLM request where its latency goal is met at the least cost.

    async with Router.from_policy("policy.yaml") as router:
        result = await router.chat(model="chat", messages=[...], ttft_ms=400)

Names are imported when they are first used, so that `import router` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backends.base import KVTransfer, Usage
    from policies import Decision, PolicyError
    from router.errors import RouterError
    from router.results import Attempt, ChatStream, Result, StreamEvent
    from router.sdk import Router
    from router.sync import SyncRouter

__all__ = [
    "Attempt",
    "ChatStream",
    "Decision",
    "KVTransfer",
    "PolicyError",
    "Result",
    "Router",
    "RouterError",
    "StreamEvent",
    "SyncRouter",
    "Usage",
]

_HOME = {
    "Attempt": "router.results",
    "ChatStream": "router.results",
    "Decision": "policies",
    "KVTransfer": "backends.base",
    "PolicyError": "policies",
    "Result": "router.results",
    "Router": "router.sdk",
    "RouterError": "router.errors",
    "StreamEvent": "router.results",
    "SyncRouter": "router.sync",
    "Usage": "backends.base",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
