"""Runs `splitroute` as its users do: in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

COMMAND = str(Path(sys.executable).with_name("splitroute"))


@dataclass
class Running:
    """`splitroute up`, serving."""

    process: subprocess.Popen[str]
    url: str
    output: list[str] = field(default_factory=list)

    def workers(self) -> list[psutil.Process]:
        return [
            child
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if "backends.disagg.process" in child.cmdline()
        ]


@contextmanager
def up(*arguments: str, env: dict[str, str] | None = None) -> Iterator[Running]:
    """Serve until the end of the block; whatever is left then is killed."""
    process = subprocess.Popen(
        [COMMAND, "up", "--port", "0", *arguments],
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
            if found := re.search(r"serving (http://\S+)/v1", line):
                running.url = found[1]
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(180), "not serving after three minutes"
        assert running.url, "".join(running.output)
        yield running
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join(10)
