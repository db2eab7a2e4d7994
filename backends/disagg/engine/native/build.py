"""Compiles the project's C where it is first used.

A library lies in the user's cache under a name made of its source, the compiler and the processor, so it is built once
a machine.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from backends.cache import cache_dir

log = logging.getLogger("splitroute.native")

# Not -ffast-math: a library linked with it flushes denormal numbers to zero in every thread that loads it, in
# other people's code too, and sums would no longer be taken in the order that is written.
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")


def library(name: str, source: Path, included: Sequence[Path] = (), flags: Sequence[str] = ()) -> ctypes.CDLL | None:
    """`source`, compiled and loaded; None where that cannot be (no compiler, or one that fails), with a warning.

    `SPLITROUTE_NATIVE=0` turns it off.
    """
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if os.environ.get("SPLITROUTE_NATIVE") == "0" or compiler is None:
        return None
    options = (*_FLAGS, *flags)
    sources = b"".join(path.read_bytes() for path in (source, *included))
    made_of = sources + f"{compiler} {options} {_processor()}".encode()
    target = cache_dir() / "native" / f"{name}-{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    try:
        if not target.exists():
            _build(compiler, options, source, target)
        return ctypes.CDLL(str(target))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("native %s not available: %s", name, error)
        return None


def _processor() -> str:
    """What -march=native looks at: a cache folder may be shared by machines of different kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _build(compiler: str, options: Sequence[str], source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        for extra in (("-fopenmp",), ()):  # Apple's clang has no OpenMP
            command = [compiler, *options, *extra, "-o", str(built), str(source), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode == 0:
                built.replace(target)  # atomic: two workers may build at once
                return
        raise OSError(f"{compiler} failed: {done.stderr.strip()[-500:]}")
