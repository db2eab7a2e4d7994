"""How the bundled cluster refuses a request: field, value and remedy, as 400."""

from __future__ import annotations

from typing import Any

from backends.base import BackendError


def unsupported(param: str, value: Any, remedy: str) -> BackendError:
    """Another target may take it: this code lets the router ask there."""
    return BackendError(
        f"{param}={_short(value)} is not supported by the bundled cluster; {remedy}",
        status=400,
        param=param,
        code="unsupported_parameter",
    )


def bad(param: str, value: Any, remedy: str) -> BackendError:
    return BackendError(f"invalid {param}: {_short(value)}; {remedy}", status=400, param=param, code="invalid_value")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
