"""What a provider's HTTP error means, in whatever shape it comes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from backends.base import BackendError

CONTEXT_EXCEEDED = "context_length_exceeded"
_SHOWN_CHARS = 500
# Each engine says "the prompt is too long" in words of its own (litellm#10793).
_CONTEXT_WORDINGS = re.compile(
    r"maximum context length"  # OpenAI, vLLM, Together, DeepSeek
    r"|context[_ ]length[_ ]exceeded"
    r"|context (?:length|window|size).{0,40}(?:exceed|too (?:long|small|large))"
    r"|exceeds? (?:the )?(?:available |maximum |model'?s? |max )*context"  # llama.cpp, SGLang, Fireworks
    r"|(?:is|are) longer than the model'?s context length"  # SGLang
    r"|prompt is too long"  # Anthropic
    r"|inputs? tokens? .{0,20}(?:exceed|must be less than|must have less than)"  # TGI
    r"|`inputs` tokens \+ `max_new_tokens` must be"  # TGI
    r"|(?:longer|larger|greater) than (?:the )?(?:maximum |max )?(?:model length|max_model_len|context)"
    r"|too (?:large|long) for model with \d+ maximum context"  # Mistral
    r"|input is too long for requested model"  # Bedrock
    r"|input token count .{0,40}exceeds the maximum number of tokens",  # Gemini
    re.IGNORECASE | re.DOTALL,
)


def refusal(provider: str, status: int, headers: Mapping[str, str], body: bytes) -> BackendError:
    """The error of an answer with `status`, with what the provider said kept."""
    said = _error_object(body)
    message = _message(said, body) or f"HTTP status {status} without a message"
    code = _text(said.get("code"))
    if status in (400, 413, 422) and (code == CONTEXT_EXCEEDED or _CONTEXT_WORDINGS.search(message)):
        code, status = CONTEXT_EXCEEDED, 400
    if 300 <= status < 400:
        message, status = f"a redirect ({status}), which is not followed; is base_url right?", 502
    return BackendError(
        f"{provider}: {message}",
        status=status if 400 <= status < 600 else 502,
        kind=_text(said.get("type")),
        code=code,
        param=_text(said.get("param")),
        retry_after_s=_retry_after_s(headers),
    )


def in_band(provider: str, error: Any) -> BackendError:
    """The error of an `{"error": …}` event in a stream."""
    said = error if isinstance(error, Mapping) else {"message": error}
    code = said.get("code")
    numbers = [
        int(value) for value in (said.get("status"), code) if isinstance(value, int | str) and str(value).isdigit()
    ]
    status = next((number for number in numbers if 400 <= number < 600), 502)
    message = _text(said.get("message")) or json.dumps(said)[:_SHOWN_CHARS]
    return BackendError(f"{provider}: {message}", status=status, kind=_text(said.get("type")), code=_text(code))


def _error_object(body: bytes) -> Mapping[str, Any]:
    """OpenAI's `error`, or what stands in its place: FastAPI's `detail`, vLLM's flat object, a plain string."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(parsed, Mapping):
        return {}
    error = parsed.get("error", parsed)
    if isinstance(error, str):
        return {"message": error}
    if not isinstance(error, Mapping):
        return {}
    if "message" not in error and "detail" in error:
        return {**error, "message": error["detail"]}
    return error


def _message(said: Mapping[str, Any], body: bytes) -> str:
    message = said.get("message")
    if message is None:
        text = body.decode("utf-8", "replace").strip()
        # A proxy's HTML page says nothing a client could use.
        return "" if text.startswith("<") else text[:_SHOWN_CHARS]
    return message if isinstance(message, str) else json.dumps(message)[:_SHOWN_CHARS]


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """RFC 9110, section 10.2.3: seconds, or a date. OpenAI also sends milliseconds."""
    if (milliseconds := headers.get("retry-after-ms", "")).isdigit():
        return int(milliseconds) / 1000
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None
