"""From what a request asks of its answer's form to a grammar, checked before anything is computed."""

from __future__ import annotations

import asyncio

from backends.base import BackendError
from backends.disagg.request import GenerationRequest
from backends.disagg.tools import JSON_STYLE, Style, call_grammar


def grammar_of(request: GenerationRequest, style: Style | None) -> str | None:
    """In llguidance's form; None where the answer is free."""
    if request.tools is not None and request.tools.forced and style is not None:
        return call_grammar(request.tools, style)
    if request.schema is None:
        return None
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema({**request.schema, "x-guidance": JSON_STYLE})


async def check_grammar(grammar: str, param: str) -> None:
    """Raises BackendError (400) for one that cannot be enforced, with the library's reason."""
    from llguidance import LLMatcher

    # In a thread, without the interpreter's lock: a large schema takes a while.
    broken, messages = await asyncio.to_thread(LLMatcher.validate_grammar_with_warnings, grammar)
    if broken:
        reason = messages[0].partition("\n")[0]
        raise BackendError(
            f"invalid {param}: its schema cannot be enforced ({reason}); simplify the schema",
            status=400,
            param=param,
            code="invalid_value",
        )
