"""A model's files on this machine: one GGUF file, or a Hugging Face folder."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from backends.models.errors import ModelError
from backends.models.gguf_file import MAGIC

_SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`path` is the .gguf file, or the folder with config.json, tokenizer.json and safetensors."""

    name: str
    path: Path
    kind: Literal["gguf", "hf"]

    def weight_files(self) -> list[Path]:
        """The files with tensors in them, sorted. Raises ModelError where there are none."""
        if self.kind == "gguf":
            return [self.path]
        found = sorted(self.path.glob("*.safetensors"))
        if not found:
            raise ModelError(
                f"{self.path}: no .safetensors file in this folder",
                hint="pickled weights (.bin) are not read: save the model with safe_serialization=True",
            )
        return found


def at_path(name: str, path: Path) -> ModelFiles:
    """The model at `path`. Raises ModelError saying what is missing."""
    if path.is_dir():
        for needed in ("config.json", "tokenizer.json"):
            if not (path / needed).is_file():
                raise ModelError(
                    f"{path}: no {needed} in this folder",
                    hint="name a Hugging Face folder (config.json, tokenizer.json, *.safetensors) or a .gguf file",
                )
        files = ModelFiles(name, path, "hf")
        files.weight_files()
        return files
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except FileNotFoundError:
        raise ModelError(
            f"{path}: no such file or folder", hint="`splitroute model list` shows what can be had by name"
        ) from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
    if magic != MAGIC:
        raise ModelError(
            f"{path}: not a GGUF file (it begins with {magic!r})",
            hint="name a .gguf file or a Hugging Face folder",
        )
    return ModelFiles(name, path, "gguf")


def fingerprint(files: ModelFiles) -> str:
    """16 hex digits that two workers compare before one reads the other's KV.

    From the configuration, and of each weight file its size, beginning and end: enough to tell models,
    quantizations and fine-tunes apart without reading gigabytes at every start.
    """
    digest = hashlib.sha256(files.kind.encode())
    if files.kind == "hf":
        digest.update((files.path / "config.json").read_bytes())
    for path in files.weight_files():
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
