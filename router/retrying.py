"""Which failures another attempt may mend, where, and when."""

from __future__ import annotations

from backends.base import BackendError

_CLIENTS_FAULT = frozenset({400, 413, 415, 422})
"""Another target would say the same; asking there would cost and hide the reason (litellm#19216)."""
_ONLY_HERE = frozenset({"unsupported_parameter", "context_length_exceeded"})
"""Codes of a 400 that another target may not give (litellm#10793)."""
_BACKOFF_S = (0.1, 0.5, 2.0)
"""Before a target that failed is tried again and has not said when."""


def is_final(error: BackendError) -> bool:
    """Whether every target would refuse the request."""
    return error.status in _CLIENTS_FAULT and error.code not in _ONLY_HERE


def is_final_here(error: BackendError) -> bool:
    """Whether this target would fail again: the request does not fit it, or its credentials or model are wrong."""
    return 400 <= error.status < 500 and error.status not in (408, 409, 425, 429)


def wait_s(error: BackendError, failures: int) -> float:
    """Until this target may be tried again; what it said itself, newest first (litellm#20722)."""
    if error.retry_after_s is not None:
        return error.retry_after_s
    return _BACKOFF_S[min(failures, len(_BACKOFF_S)) - 1]
