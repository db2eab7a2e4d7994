"""Binds the compiled forward pass, where there is a C compiler; where not, the caller uses torch instead."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from backends.disagg.engine.native import build

_SOURCE = Path(__file__).with_name("engine.c")
_INCLUDED = tuple(_SOURCE.with_name(name) for name in ("lanes.h", "codes.h", "linear.h", "attention.h", "forward.h"))


@functools.cache
def load() -> ctypes.CDLL | None:
    """The compiled library, or None. `SPLITROUTE_NATIVE=0` turns it off."""
    library = build.library("kernels", _SOURCE, _INCLUDED)
    if library is None:
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
