"""Builds and binds the C kernels at first use, where there is a C compiler.

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

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("paged_attention.c", "skinny_linear.c"))
# What lets sums be vectorised. Not -ffast-math as a whole: a library linked with it flushes denormal numbers
# to zero in every thread that loads it, in other people's code too.
_FAST_SUMS = ("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math")
_FLAGS = ("-O3", "-march=native", *_FAST_SUMS, "-freciprocal-math", "-shared", "-fPIC")


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
            command = [compiler, *_FLAGS, *extra, "-o", str(built), *map(str, _SOURCES), "-lm"]
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
    made_of = b"".join(source.read_bytes() for source in _SOURCES) + f"{compiler} {_FLAGS} {_processor()}".encode()
    target = cache_dir() / "native" / f"kernels-{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    try:
        if not target.exists():
            _build(compiler, target)
        library = ctypes.CDLL(str(target))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("native kernels not available, using torch: %s", error)
        return None
    pointer, integer, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_long
    for name in ("paged_decode_f32", "paged_decode_bf16"):
        function = getattr(library, name)
        function.restype = integer
        function.argtypes = [pointer, pointer, long, long, pointer, integer, pointer, pointer]
        function.argtypes += [integer] * 5 + [ctypes.c_float, integer, integer]
    for name in ("skinny_linear_f32", "skinny_linear_bf16"):
        function = getattr(library, name)
        function.restype = integer
        function.argtypes = [pointer] * 3 + [integer] * 4
    return library
