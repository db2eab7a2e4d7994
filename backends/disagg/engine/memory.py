"""Memory that loading a model freed goes back to the system."""

from __future__ import annotations

import contextlib
import ctypes


def give_back_freed_memory() -> None:
    """Reading weights frees as much as the model takes, piece by piece, and glibc would keep it for later."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
