"""Where the CLI's words go: results to stdout, progress and errors to stderr.

rich is imported on first use, so that `--help` and scripts that want JSON do not wait for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from router.cli.errors import CliError

if TYPE_CHECKING:
    from rich.console import Console

_PIPED_WIDTH = 140
"""Columns when stdout is a file or a pipe: rich would assume 80 and fold tables that nobody needs folded."""


@cache
def out() -> Console:
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)


@cache
def err() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else _PIPED_WIDTH)


def fail(error: CliError) -> None:
    """Print `error` to stderr as plain text: its paths and brackets must not be taken for markup."""
    print(f"splitroute: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"  try: {error.hint}", file=sys.stderr)


@contextmanager
def download_bar(name: str) -> Iterator[Callable[[int, int | None], None]]:
    """A progress callback `(bytes done, bytes in all or None)` that shows a bar from its first call on.

    Nothing appears when nothing is downloaded.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    bar = Progress(
        TextColumn("pulling {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=err(),
    )
    task: TaskID | None = None

    def report(done: int, total: int | None) -> None:
        nonlocal task
        if task is None:
            bar.start()
            task = bar.add_task(name, total=total)
        bar.update(task, completed=done, total=total)

    try:
        yield report
    finally:
        bar.stop()


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A callback that is told how many of `total` are done, and draws a bar on stderr where that is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err(), transient=True, disable=not err().is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)
