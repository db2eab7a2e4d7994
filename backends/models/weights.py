"""Weights as (Hugging Face name, torch tensor), one at a time: a model never lies in memory twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from backends.models.errors import ModelError
from backends.models.files import ModelFiles

if TYPE_CHECKING:
    import torch

    from backends.models.config import ModelConfig


def load_weights(files: ModelFiles, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight, in the dtype of the file (GGUF: float32). Raises ModelError for a broken file."""
    if files.kind == "gguf":
        import torch

        from backends.models.gguf_model import read_weights

        for name, array in read_weights(files.path, config):
            yield name, torch.from_numpy(array)
        return
    from safetensors import SafetensorError, safe_open

    for path in files.weight_files():
        try:
            with safe_open(path, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - not a dict
                    yield name, shard.get_tensor(name)
        except SafetensorError as error:
            raise ModelError(
                f"{path}: not a complete safetensors file ({error})", hint="is it truncated? fetch it again"
            ) from None
