"""Which failures another attempt may mend, where, and when."""

from __future__ import annotations

from tenacity import RetryCallState, wait_exponential_jitter

from backends.base import BackendError

_CLIENTS_FAULT = frozenset({400, 413, 415, 422})
"""Another target would say the same; asking there would cost and hide the reason (litellm#19216)."""
_ONLY_HERE = frozenset({"unsupported_parameter", "context_length_exceeded"})
"""Codes of a 400 that another target may not give (litellm#10793)."""
_MAY_PASS = frozenset({408, 409, 425, 429})
"""4xx that are about the moment, not about the request."""
_BACKOFF = wait_exponential_jitter(multiplier=0.1, max=2.0, exp_base=4, jitter=0.1)
"""Before a target that failed is tried again and has not said when. With jitter: those that failed together do not
come back together."""


def is_final(error: BackendError) -> bool:
    """Whether every target would refuse the request."""
    return error.status in _CLIENTS_FAULT and error.code not in _ONLY_HERE


def is_final_here(error: BackendError) -> bool:
    """Whether this target would fail again: the request does not fit it, or its credentials or model are wrong."""
    return 400 <= error.status < 500 and error.status not in _MAY_PASS


def wait_s(error: BackendError, failures: int) -> float:
    """Until this target may be tried again; what it said itself, newest first (litellm#20722)."""
    if error.retry_after_s is not None:
        return error.retry_after_s
    state = RetryCallState(retry_object=None, fn=None, args=(), kwargs={})  # type: ignore[arg-type]
    state.attempt_number = failures
    return _BACKOFF(state)
