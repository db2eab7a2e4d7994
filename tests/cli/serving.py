"""Runs `splitroute` as its users do: in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

COMMAND = str(Path(sys.executable).with_name("splitroute"))


@dataclass
class Running:
    """`splitroute up` or `splitroute worker`, serving."""

    process: subprocess.Popen[str]
    url: str
    """Of a worker, its address."""
    output: list[str] = field(default_factory=list)

    def workers(self) -> list[psutil.Process]:
        return [
            child
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if "backends.disagg.process" in child.cmdline()
        ]


def up(*arguments: str, env: dict[str, str] | None = None) -> AbstractContextManager[Running]:
    """A gateway until the end of the block; whatever is left then is killed."""
    return _serving(r"serving (http://\S+)/v1", "up", "--port", "0", *arguments, env=env)


def worker(*arguments: str, env: dict[str, str] | None = None) -> AbstractContextManager[Running]:
    """The same for a worker that waits for a gateway on another host."""
    return _serving(r"listening on (\S+) for", "worker", "--host", "127.0.0.1", *arguments, env=env)


def chaos() -> AbstractContextManager[Running]:
    """A provider that fails on purpose."""
    return _serving(r"chaos on (\S+);", "chaos", "--port", "0", env=None)


@contextmanager
def _serving(ready_line: str, *words: str, env: dict[str, str] | None) -> Iterator[Running]:
    process = subprocess.Popen(
        [COMMAND, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
    )
    running = Running(process, "")
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            running.output.append(line)
            if found := re.search(ready_line, line):
                running.url = found[1]
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(180), "not serving after three minutes"
        assert running.url, "".join(running.output)
        yield running
    except BaseException as error:  # what the process has to say of it
        said = "".join(running.output[-80:])
        error.add_note(f"splitroute {' '.join(words)} (exit status {process.poll()}) wrote:\n{said}")
        raise
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join(10)
