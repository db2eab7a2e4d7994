"""A request's body keeps every byte but those that are changed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.hosted.splice import spliced

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
_NAMES = st.sampled_from(["model", "stream_options", "slo", "messages", "x", "ü", 'a"b', "{", "["])


@given(
    body=st.dictionaries(_NAMES, _VALUES, max_size=6),
    changes=st.dictionaries(st.sampled_from(["model", "stream_options"]), _VALUES, max_size=2),
    dropped=st.frozensets(st.sampled_from(["slo", "x"])),
    indent=st.none() | st.integers(0, 3),
    ascii_only=st.booleans(),
)
def test_it_says_what_a_changed_dict_would(
    body: dict[str, Any], changes: dict[str, Any], dropped: frozenset[str], indent: int | None, ascii_only: bool
) -> None:
    raw = json.dumps(body, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    made = spliced(raw, changes, dropped)
    if made is None:  # a name with escapes: the caller writes the body anew
        assert any("\\" in json.dumps(name, ensure_ascii=ascii_only) for name in body)
        return
    kept = {name: value for name, value in body.items() if name not in dropped}
    assert json.loads(made) == {**kept, **changes}


@pytest.mark.parametrize(
    ("raw", "made"),
    [
        (b'{"model":"a","n":1.00}', b'{"model":"new","n":1.00}'),
        (b'{ "n" : [ 1e3 ] , "model" : "a" }', b'{ "n" : [ 1e3 ] , "model" :"new"}'),
        (b'{"x":{"model":"inner"},"model":"a"}', b'{"x":{"model":"inner"},"model":"new"}'),
        (b'{"x":"model","model":"a"}', b'{"x":"model","model":"new"}'),
        (b'{"x":"say \\"model\\": {[","model":"a\\"b"}', b'{"x":"say \\"model\\": {[","model":"new"}'),
        (b"{}", b'{"model":"new"}'),
    ],
)
def test_everything_else_is_as_it_was_written(raw: bytes, made: bytes) -> None:
    assert spliced(raw, {"model": "new"}) == made


@pytest.mark.parametrize("raw", [b'{"model":"a","model":"b"}', b'{"mod\\u0065l":"a"}'])
def test_what_cannot_be_done_in_place_is_said(raw: bytes) -> None:
    assert spliced(raw, {"model": "new"}) is None
