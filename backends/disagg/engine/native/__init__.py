"""Builds and binds the compiled forward pass at first use, where there is a C compiler.

The library lies in the user's cache under a name made of the source, the compiler and the processor, so
it is built once a machine. `load` returns None where it cannot be had (no compiler, a compiler that
fails), and the caller uses torch instead.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from backends.cache import cache_dir

log = logging.getLogger("splitroute.native")

_SOURCE = Path(__file__).with_name("engine.c")
_INCLUDED = tuple(_SOURCE.with_name(name) for name in ("lanes.h", "codes.h", "linear.h", "attention.h", "forward.h"))
# Not -ffast-math: a library linked with it flushes denormal numbers to zero in every thread that loads it, in
# other people's code too, and sums would no longer be taken in the order that is written.
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")


def _processor() -> str:
    """What -march=native looks at: a cache folder may be shared by machines of different kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _build(compiler: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        for extra in (("-fopenmp",), ()):  # Apple's clang has no OpenMP
            command = [compiler, *_FLAGS, *extra, "-o", str(built), str(_SOURCE), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode == 0:
                built.replace(target)  # atomic: two workers may build at once
                return
        raise OSError(f"{compiler} failed: {done.stderr.strip()[-500:]}")


@functools.cache
def load() -> ctypes.CDLL | None:
    """The compiled library, or None. `SPLITROUTE_NATIVE=0` turns it off."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if os.environ.get("SPLITROUTE_NATIVE") == "0" or compiler is None:
        return None
    sources = b"".join(source.read_bytes() for source in (_SOURCE, *_INCLUDED))
    made_of = sources + f"{compiler} {_FLAGS} {_processor()}".encode()
    target = cache_dir() / "native" / f"kernels-{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    try:
        if not target.exists():
            _build(compiler, target)
        library = ctypes.CDLL(str(target))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("native kernels not available, using torch: %s", error)
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    for suffix in ("f32", "bf16"):
        getattr(library, f"forward_{suffix}").argtypes = [pointer] * 4 + [integer]
        pack, pack_codes = getattr(library, f"pack_{suffix}"), getattr(library, f"pack_codes_{suffix}")
        linear_rows = getattr(library, f"linear_rows_{suffix}")
        pack.argtypes = pack_codes.argtypes = [pointer] * 2 + [integer] * 2
        linear_rows.argtypes = [pointer] * 2 + [integer, pointer, integer]
        pack.restype = pack_codes.restype = linear_rows.restype = None
        decode = getattr(library, f"paged_decode_{suffix}")
        decode.argtypes = [pointer] * 4 + [integer, pointer, pointer, integer, integer, ctypes.c_float]
        decode.argtypes += [integer] * 2
    return library
