"""Token ids to text as they come, never half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backends.models.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_CONTEXT = 6
"""Ids before the new ones that are decoded again: what precedes a token can decide its leading space."""
_MAX_HELD = 32
"""Ids held back for a character; more than any encoding of one takes, so the bytes are not one."""


class Detokenizer:
    """One answer's text. The pieces joined are what decoding all ids at once gives."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._ids: list[int] = []
        self._shown = 0
        """Ids whose text has been returned."""

    def push(self, ids: Sequence[int]) -> str:
        """Take more ids; the text that is certain now."""
        self._ids.extend(ids)
        before, text = self._pending()
        if text.endswith(_REPLACEMENT) and len(self._ids) - self._shown <= _MAX_HELD:
            return ""  # the middle of a character, or of several
        return self._show(before, text)

    def finish(self) -> str:
        """The rest: an answer that ends inside a character shows the replacement character."""
        return self._show(*self._pending())

    def _pending(self) -> tuple[str, str]:
        """(text of the context alone, text of context and new ids)."""
        start = max(0, self._shown - _CONTEXT)
        return self._decode(self._ids[start : self._shown]), self._decode(self._ids[start:])

    def _show(self, before: str, text: str) -> str:
        self._shown = len(self._ids)
        del self._ids[: max(0, self._shown - _CONTEXT)]
        self._shown = len(self._ids)
        return text[len(before) :]
