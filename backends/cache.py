"""Where splitroute keeps what it can make or fetch again: weights and compiled kernels, per user."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$SPLITROUTE_CACHE`, else `splitroute` in the user's cache folder. It may not exist yet."""
    if own := os.environ.get("SPLITROUTE_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "splitroute"
