"""Server-sent events cut out of a byte stream, kept byte for byte (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_EVENT_BYTES = 8 << 20
_BOM = b"\xef\xbb\xbf"
# A blank line ends an event. A lone CR may be the first half of CRLF, so it counts once the next byte is there.
_BLANK_LINE = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?=[^\n]))")


class EventTooLarge(Exception):
    """An event that grows past `MAX_EVENT_BYTES` without ending."""


@dataclass(frozen=True, slots=True)
class Event:
    raw: bytes
    """As it came, its blank line included."""
    data: bytes | None
    """Its `data` lines joined; None in an event without any, such as a keep-alive comment."""


class Splitter:
    """Feed it chunks of any size. What it has taken and not returned is in `rest`."""

    def __init__(self) -> None:
        self._buffer = b""
        self._begun = False

    @property
    def rest(self) -> bytes:
        """An event whose end has not come."""
        return self._buffer

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """The events that `chunk` completes. Raises EventTooLarge."""
        buffer = self._buffer + chunk if self._buffer else chunk
        at = 0
        for blank in _BLANK_LINE.finditer(buffer):
            if blank.end() > at:
                yield self._event(buffer[at : blank.end()])
                at = blank.end()
        self._buffer = buffer[at:]
        if len(self._buffer) > MAX_EVENT_BYTES:
            raise EventTooLarge

    def _event(self, raw: bytes) -> Event:
        lines = raw
        if not self._begun:
            self._begun = True
            lines = raw.removeprefix(_BOM)
        return Event(raw, _data_of(lines))


def _data_of(raw: bytes) -> bytes | None:
    # Nearly every event of an API is one line.
    if raw.startswith(b"data:") and raw.endswith(b"\n\n") and raw.find(b"\n") == len(raw) - 2 and b"\r" not in raw:
        return raw[5:-2].removeprefix(b" ")
    found = []
    for line in re.split(rb"\r\n|\n|\r", raw):
        name, _, value = line.partition(b":")
        if name == b"data":
            found.append(value.removeprefix(b" "))
    return b"\n".join(found) if found else None
