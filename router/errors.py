"""What goes wrong with a request, in the terms of the API that the client speaks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policies import Decision
    from router.results import Attempt


_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""By status (https://docs.anthropic.com/en/api/errors)."""


class RouterError(Exception):
    """A request that was refused or failed.

    `status` is the HTTP status a client gets; `kind`, `code` and `param` are OpenAI's `error.type`,
    `error.code` and `error.param`. `decision` and `attempts` say what was tried, where it came to that.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        kind: str | None = None,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        decision: Decision | None = None,
        attempts: Sequence[Attempt] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind or ("rate_limit_error" if status == 429 else _usual_kind(status))
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.decision = decision
        self.attempts = tuple(attempts)

    def as_openai(self) -> dict[str, Any]:
        """The body OpenAI's API would send for this."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def as_anthropic(self) -> dict[str, Any]:
        """The body Anthropic's API would send for this."""
        usual = _usual_kind(self.status)
        special = set(_ANTHROPIC_KINDS.values()) - {"invalid_request_error", "api_error"}
        kind = self.kind if self.kind in special else _ANTHROPIC_KINDS.get(self.status, usual)
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def body(self, surface: str) -> dict[str, Any]:
        """In the words of the API that `surface` is one of."""
        return self.as_anthropic() if surface == "messages" else self.as_openai()

    def event(self, surface: str) -> bytes:
        """What ends a stream that cannot go on."""
        begin = b"event: error\n" if surface == "messages" else b""
        return begin + b"data: " + json.dumps(self.body(surface)).encode() + b"\n\n"


def _usual_kind(status: int) -> str:
    return "invalid_request_error" if 400 <= status < 500 else "api_error"


def invalid(param: str, value: Any, remedy: str) -> RouterError:
    """A 400 that names the field, the value and the remedy."""
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    what = f"missing {param}" if value is None else f"invalid {param}: {shown}"
    return RouterError(f"{what}; {remedy}", status=400, param=param, code="invalid_value")
