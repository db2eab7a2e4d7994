"""The one error of this room."""

from __future__ import annotations


class ModelError(Exception):
    """A model that cannot be found, fetched or read. `hint` is what to do next, where something can be done."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
