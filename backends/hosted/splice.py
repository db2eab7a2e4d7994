"""Changes to the top level of a JSON object that leave every other byte as its sender wrote it.

Numbers, the order of keys, escapes and blanks go on untouched: what a client sent is what its provider gets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\],:]', re.DOTALL)


def spliced(raw: bytes, changes: Mapping[str, Any], dropped: Collection[str] = ()) -> bytes | None:
    """`raw`, a JSON object, with `changes` made and `dropped` members left out.

    None where that cannot be done in place: a name given twice, or written with escapes.
    """
    names = [*changes, *dropped]
    if b"\\u" in raw and any(_escaped(raw)):
        return None
    new = {
        name: json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() for name, value in changes.items()
    }
    if len(names) == 1 and (quick := _only_one(raw, names[0], new.get(names[0]))) is not None:
        return quick
    parts: list[bytes] = []
    seen: set[str] = set()
    for name, member, value_at in _members(raw):
        if name in seen:
            return None
        seen.add(name)
        if name in new:
            parts.append(member[:value_at] + new[name])
        elif name not in dropped:
            parts.append(member)
    parts += [json.dumps(name).encode() + b":" + value for name, value in new.items() if name not in seen]
    return b"{" + b",".join(parts) + b"}"


def _dumped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _only_one(raw: bytes, name: str, value: bytes | None) -> bytes | None:
    """The common case, a single name that occurs once in the whole text as a key: quotes inside strings are escaped, so
    these bytes are nothing else."""
    key = b'"' + name.encode() + b'"'
    at = raw.find(key)
    if value is None or at < 0 or raw.find(key, at + 1) >= 0:
        return None
    # At the top level only where no other object was opened before it.
    if raw.count(b"{", 0, at) != 1 or raw.count(b"[", 0, at):
        return None
    colon = raw.find(b":", at + len(key))
    found = _STRING.match(raw, colon + 1 + _blanks(raw, colon + 1))
    return None if found is None else raw[: found.start()] + value + raw[found.end() :]


def _blanks(raw: bytes, at: int) -> int:
    end = at
    while raw[end : end + 1] in (b" ", b"\t", b"\n", b"\r"):
        end += 1
    return end - at


def _escaped(raw: bytes) -> Iterator[bool]:
    """Whether a name at the top level is written with escapes."""
    for _, member, value_at in _members(raw):
        yield b"\\" in member[:value_at]


def _members(raw: bytes) -> Iterator[tuple[str, bytes, int]]:
    """(name, the member as written, where in it the value begins) of a valid JSON object."""
    depth = 0
    begin = value = -1
    name = ""
    for token in _TOKEN.finditer(raw):
        mark = raw[token.start()]
        if mark in b"{[":
            depth += 1
            if depth == 1:
                begin = token.end()
        elif mark in b"}]":
            depth -= 1
            if depth == 0 and value >= 0:
                yield name, raw[begin : token.start()].rstrip(), value - begin
        elif depth == 1 and mark == 0x3A and value < 0:
            value = token.end()
        elif depth == 1 and mark == 0x2C:
            yield name, raw[begin : token.start()], value - begin
            begin, value = token.end(), -1
        elif depth == 1 and mark == 0x22 and value < 0:
            name = json.loads(token[0])
