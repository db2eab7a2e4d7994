"""What a router has learned of its targets, kept in a file over restarts."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.sdk import Router

log = logging.getLogger("splitroute.policy")

SAVE_EVERY_S = 30.0
_VERSION = 1


def recall(router: Router, path: Path) -> list[str]:
    """Let `router` know what the file says; the targets of which that is something. One that cannot be used is worth a
    line in the log and nothing else."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(saved, dict) or saved.get("version") != _VERSION or not isinstance(saved["targets"], dict):
            raise ValueError("it is of another version")
        router.state.restore_answers(saved.get("answers", []), router.policy)
        return router.state.restore(saved["targets"], router.policy)
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError) as error:
        log.warning("what was learned before is not used: %s: %s", path, error)
        return []


def save(router: Router, path: Path) -> None:
    """Write the file, whole or not at all. Raises OSError."""
    state = router.state
    text = json.dumps({"version": _VERSION, "targets": state.saved(router.policy), "answers": state.saved_answers()})
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


async def keep_saving(router: Router, path: Path) -> None:
    """From time to time, and once more when cancelled."""
    try:
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            _try(router, path)
    finally:
        _try(router, path)


def _try(router: Router, path: Path) -> None:
    try:
        save(router, path)
    except OSError as error:
        log.warning("what was learned is not kept: %s", error)
