"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Cuts text before the first stop string, holding back no more than could still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._longest = max(map(len, self._stops), default=0)

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next text; (what may be shown, whether a stop string was found). After True: no more."""
        if not self._stops:
            return text, False
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = self._unfinished()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, False

    def flush(self) -> str:
        """What was held back, when the text has ended without a stop string."""
        shown, self._held = self._held, ""
        return shown

    def _unfinished(self) -> int:
        """The length of the longest end of the held text that begins a stop string."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
