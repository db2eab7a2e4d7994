"""A policy file that changes while its router serves: the new policy is taken, or the old one stays and says why."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from backends.base import BackendError
from policies import Policy, PolicyError

if TYPE_CHECKING:
    from router.sdk import Router

log = logging.getLogger("splitroute.policy")

LOOK_EVERY_S = 1.0


@dataclass(slots=True)
class Reloading:
    """What became of changes to the policy."""

    reloads: int = 0
    error: str | None = None
    """Why the file as it is now is not in use; None where it is."""


async def reload(router: Router, load: Callable[[], Policy]) -> bool:
    """Let `router` use what `load` reads; whether it does. The reason why not is kept for /health, and logged."""
    state = router.reloading
    try:
        policy = await asyncio.to_thread(load)
        await router.use(policy)
    except (PolicyError, OSError, UnicodeDecodeError) as error:
        state.error = str(error)
    except BackendError as error:
        state.error = error.message if error.hint is None else f"{error.message}; {error.hint}"
    else:
        state.reloads, state.error = state.reloads + 1, None
        log.warning("the policy has been loaded again: %s", policy.filename)
        return True
    log.error("the policy stays as it was: %s", state.error)
    return False


async def follow(router: Router, path: Path, load: Callable[[], Policy]) -> None:
    """Reload whenever the file or one that it includes changes, and on SIGHUP whether one has or not; for ever."""
    asked = asyncio.Event()
    if hasattr(signal, "SIGHUP"):
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, asked.set)
    seen = _marks(router, path)
    while True:
        try:
            await asyncio.wait_for(asked.wait(), LOOK_EVERY_S)
        except TimeoutError:
            marks = _marks(router, path)
            if marks == seen or None in marks:  # None: between an editor's removal and its rename
                continue
        asked.clear()
        seen = _marks(router, path)
        if await reload(router, load):
            seen = _marks(router, path)  # of the files that are included now


def _marks(router: Router, path: Path) -> list[tuple[int, int, int] | None]:
    return [_mark(path), *(_mark(Path(name)) for name in router.policy.included)]


def _mark(path: Path) -> tuple[int, int, int] | None:
    """Changes when the file does: also when a link to it is pointed elsewhere, as Kubernetes does."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
