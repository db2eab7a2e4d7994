"""From what a policy calls a model to its files: a name, a path, or a Hub id, tried in this order."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path

from backends.models.errors import ModelError
from backends.models.files import ModelFiles, at_path
from backends.models.pull import Progress, cached_path, is_cached, pull
from backends.models.registry import MODELS

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["config.json", "generation_config.json", "tokenizer*.json", "*.jinja", "*.safetensors*"]


def resolve(name: str, *, pull_missing: bool = False, progress: Progress | None = None) -> ModelFiles:
    """The files of model `name`; with `pull_missing`, fetched first where they are not here.

    Raises ModelError with the command to try.
    """
    if (model := MODELS.get(name)) is not None:
        if pull_missing:
            return at_path(name, pull(model, progress))
        if not is_cached(model):
            raise ModelError(f"model {name!r} is not here yet", hint=f"splitroute model pull {name}")
        return at_path(name, cached_path(model))
    path = Path(name).expanduser()
    if path.exists() or _looks_like_path(name):
        return at_path(name, path.absolute())
    if _HUB_ID.fullmatch(name):
        return _from_hub(name, pull_missing)
    close = get_close_matches(name, MODELS, n=1)
    raise ModelError(
        f"unknown model {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""),
        hint=f"a name ({', '.join(MODELS)}), the path of a Hugging Face folder or a .gguf file, or a Hub id org/name",
    )


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "~", os.sep)) or name.endswith(".gguf") or name.count("/") > 1


def _from_hub(name: str, pull_missing: bool) -> ModelFiles:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=not pull_missing)
    except LocalEntryNotFoundError:
        raise ModelError(
            f"Hub model {name!r} is not here" + (" and the Hub cannot be reached" if pull_missing else " yet"),
            hint=f"splitroute model pull {name}, where huggingface.co can be reached",
        ) from None
    except Exception as error:  # the client raises its own, httpx's, requests' and the OS's errors
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"Hub model {name!r} cannot be fetched: {first_line}") from None
    return at_path(name, Path(folder))
