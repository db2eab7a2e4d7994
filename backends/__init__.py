"""Where tokens come from: hosted APIs, other engines' P/D clusters and the bundled P/D cluster.

`create` makes a backend from a validated provider entry of a policy; what a type needs is imported then.
"""

from __future__ import annotations

from pydantic import BaseModel

from backends.base import Backend
from backends.options import PROVIDER_OPTIONS, AnthropicOptions, DisaggOptions, OpenAIOptions

__all__ = ["PROVIDER_OPTIONS", "create"]


def create(name: str, options: BaseModel) -> Backend:
    """The backend for provider `name`; it is not started yet."""
    if isinstance(options, OpenAIOptions):
        from backends.hosted.openai import OpenAIBackend

        return OpenAIBackend(name, options)
    if isinstance(options, AnthropicOptions):
        from backends.hosted.anthropic import AnthropicBackend

        return AnthropicBackend(name, options)
    if isinstance(options, DisaggOptions):
        from backends.disagg.backend import DisaggBackend

        return DisaggBackend(name, options)
    raise TypeError(f"no backend for options of type {type(options).__name__}")
