"""Events are cut out of a stream byte for byte, however it is chunked."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.hosted import sse
from backends.hosted.sse import Event, EventTooLarge, Splitter

_PARTS = [b"data: a", b"data:b", b": comment", b"event: x", b"id", b"\n", b"\r", b"\r\n", b" ", "ü".encode()]


def split(chunks: list[bytes]) -> tuple[list[Event], bytes]:
    splitter = Splitter()
    events = [event for chunk in chunks for event in splitter.feed(chunk)]
    return events, splitter.rest


@given(parts=st.lists(st.sampled_from(_PARTS), max_size=14), data=st.data())
def test_chunking_changes_nothing_and_no_byte_is_lost(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    events, rest = split([whole])
    assert b"".join(event.raw for event in events) + rest == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    chunks = [whole[start:end] for start, end in itertools.pairwise([0, *cuts, len(whole)])]
    assert split(chunks) == (events, rest)


@pytest.mark.parametrize(
    ("raw", "data"),
    [
        (b"data: x\n\n", b"x"),
        (b"data:x\n\n", b"x"),
        (b"data:  x\n\n", b" x"),
        (b"data: x\r\n\r\n", b"x"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"event: e\nid: 1\ndata: x\n\n", b"x"),
        (b": keep-alive\n\n", None),
        (b"database: x\n\n", None),
        (b"data\n\n", b""),
        (b"\xef\xbb\xbfdata: x\n\n", b"x"),
    ],
)
def test_data_is_read_as_the_standard_says(raw: bytes, data: bytes | None) -> None:
    (event,), rest = split([raw])
    assert (event.raw, event.data, rest) == (raw, data, b"")


def test_an_event_without_its_blank_line_is_no_event() -> None:
    assert split([b"data: x\n"]) == ([], b"data: x\n")


def test_an_event_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    with pytest.raises(EventTooLarge):
        split([b"data: " + b"x" * 60, b"x" * 60])
