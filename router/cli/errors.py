"""How a failure reaches the person at the terminal: one message, and the next thing to try."""

from __future__ import annotations

import sys


class CliError(Exception):
    """A failure in words for the user.

    `message` names what is wrong and with which value; `hint` is the command or change to try next. `message`
    may span lines (a policy's problems, one a line).
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def told(error: BaseException) -> CliError:
    """`error` in words for the user.

    Errors of the rooms below already carry a message and mostly a hint. Their classes are looked up in
    modules that are loaded: one that never was cannot have raised, and `splitroute --help` stays free of it.
    """
    if isinstance(error, CliError):
        return error
    if _is(error, "policies", "PolicyError"):
        return CliError(str(error), hint="docs/policies.md describes every key; splitroute policy check FILE")
    if isinstance(error, ModuleNotFoundError) and error.name:
        return _missing_module(error.name)
    hint = getattr(error, "hint", None)
    message = getattr(error, "message", None)
    if isinstance(hint, str) or isinstance(message, str):
        return CliError(message if isinstance(message, str) else str(error), hint=hint)
    if isinstance(error, OSError) and error.filename:
        return CliError(f"{error.filename}: {(error.strerror or str(error)).lower()}")
    return CliError(
        f"unexpected {type(error).__name__}: {error}",
        hint="the same command with --debug shows where it happened",
    )


def _is(error: BaseException, module: str, name: str) -> bool:
    loaded = sys.modules.get(module)
    kind = getattr(loaded, name, None) if loaded else None
    return isinstance(kind, type) and isinstance(error, kind)


_EXTRA_OF = {
    "torch": "local",
    "numpy": "local",
    "safetensors": "local",
    "gguf": "local",
    "tokenizers": "local",
    "jinja2": "local",
    "huggingface_hub": "local",
    "msgspec": "local",
    "xxhash": "local",
    "pip": "local",
    "litellm": "providers",
}


def _missing_module(name: str) -> CliError:
    extra = _EXTRA_OF.get(name.partition(".")[0])
    if extra is None:
        return CliError(f"the Python package {name!r} is missing", hint="pip install --force-reinstall splitroute")
    return CliError(
        f"this needs the Python package {name!r}, which is not installed",
        hint=f"pip install 'splitroute[{extra}]'",
    )
