"""Reads the GGUF container (version 2 and 3 of the ggml project's specification): metadata and tensor places.

The `gguf` package reads it too, in 3.9 s for a vocabulary of 49,000 because it makes numpy views of every
string; this takes 0.1 s, three times at each start of a cluster. Dequantization is that package's.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from backends.models.errors import ModelError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_DIMENSIONS = 8
_MAX_DEPTH = 4
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """`shape` is row-major, as torch has it; `quantization` is ggml's type number; `offset` from the file's start."""

    name: str
    shape: tuple[int, ...]
    quantization: int
    offset: int


@dataclass(frozen=True, slots=True)
class GGUF:
    path: Path
    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    data: mmap.mmap


class _Cursor:
    """Reads forward through the map. Raises ValueError at the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def number(self, form: struct.Struct) -> Any:
        (value,) = form.unpack(self.take(form.size))
        return value

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self._data):
            raise ValueError("it ends in the middle of its header")
        taken = self._data[self.at : end]
        self.at = end
        return taken

    def string(self) -> str:
        return self.take(self.number(_U64)).decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if (form := _SCALARS.get(kind)) is not None:
            return self.number(form)
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth > _MAX_DEPTH:
            raise ValueError(f"unknown metadata type {kind}")
        kind, count = self.number(_U32), self.number(_U64)
        if (form := _SCALARS.get(kind)) is not None:
            return [value for (value,) in form.iter_unpack(self.take(form.size * count))]
        read: Callable[[], Any] = self.string if kind == _STRING else lambda: self.value(kind, depth + 1)
        return [read() for _ in range(count)]


def open_gguf(path: Path) -> GGUF:
    """Raises ModelError for a file that is not there, not GGUF, or truncated."""
    try:
        state = path.stat()
        return _open(path, state.st_mtime_ns, state.st_size)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from None


@lru_cache(maxsize=1)  # configuration, tokenizer and weights are read one after the other
def _open(path: Path, mtime_ns: int, size: int) -> GGUF:
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return _parse(path, data)
    except (ValueError, struct.error, OverflowError, MemoryError) as error:
        raise ModelError(
            f"{path}: not a complete GGUF file: {error}", hint="if it was downloaded, fetch it again"
        ) from None


def _parse(path: Path, data: mmap.mmap) -> GGUF:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    cursor = _Cursor(data)
    if cursor.take(len(MAGIC)) != MAGIC:
        raise ValueError("it does not begin with 'GGUF'")
    if (version := cursor.number(_U32)) not in _VERSIONS:
        raise ValueError(f"version {version} is not read here (2 and 3 are)")
    tensor_count, field_count = cursor.number(_U64), cursor.number(_U64)
    metadata = {}
    for _ in range(field_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number(_U32))
    places = []
    for _ in range(tensor_count):
        name, dimensions = cursor.string(), cursor.number(_U32)
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(reversed([cursor.number(_U64) for _ in range(dimensions)]))
        places.append((name, shape, cursor.number(_U32), cursor.number(_U64)))
    alignment = int(metadata.get("general.alignment", _ALIGNMENT)) or _ALIGNMENT
    start = -(-cursor.at // alignment) * alignment
    tensors = []
    for name, shape, quantization, offset in places:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(quantization)]
        elements = 1
        for length in shape:
            elements *= length
        if start + offset + elements // block * block_bytes > len(data):
            raise ValueError(f"it ends in the middle of its weights, at tensor {name!r}")
        tensors.append(TensorInfo(name, shape, quantization, start + offset))
    return GGUF(path, metadata, tuple(tensors), data)
