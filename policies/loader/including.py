"""`include:`: sections that several policies share, each in a file of its own.

What a file says itself comes first and wins; what it includes fills in the names and keys that it does not have. Two
included files that give the same name are a mistake, because nobody could tell which one is meant.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from dataclasses import replace

from policies.loader.language import Entry, Mapping_, Node, Sequence, parse
from policies.loader.problems import Problems
from policies.loader.reader import Reader, kind_of

Read = Callable[[str], str]
"""The text of a file by its path. Raises OSError."""

_MERGED = ("providers", "targets", "classes", "routes", "resilience")
_MOST = 32


class Including:
    """`files` are all that were read, the policy's own first."""

    def __init__(self, reader: Reader, env: Mapping[str, str], read: Read | None) -> None:
        self.files: list[str] = []
        self._reader = reader
        self._env = env
        self._read = read

    def root(self, text: str, filename: str) -> Node | None:
        """The file's root with everything that it includes, or None for an empty file."""
        self.files.append(filename)
        root = parse(text, self._env, Problems(filename, into=self._reader.problems))
        if not isinstance(root, Mapping_) or root.get("include") is None:
            return root
        named = self._reader.sequence(root.get("include") or root, "'include'", "[providers.yaml]") or ()
        own = Mapping_(root.line, root.column, tuple(one for one in root if one.key != "include"), root.file)
        return _filled(self._reader, own, [part for node in named if (part := self._part(node, filename)) is not None])

    def _part(self, node: Node, beside: str) -> Mapping_ | None:
        name = self._reader.text(node, "a file of 'include'")
        if name is None:
            return None
        path = posixpath.normpath(posixpath.join(posixpath.dirname(beside.replace("\\", "/")), name))
        if self._read is None:
            self._reader.problems.add(node, f"{name!r} cannot be included here", "load the policy from a file")
            return None
        if path in self.files:
            self._reader.problems.add(node, f"{path!r} is included already", "include it once, and not in a circle")
            return None
        if len(self.files) > _MOST:
            self._reader.problems.add(node, f"more than {_MOST} files are included")
            return None
        try:
            text = self._read(path)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            self._reader.problems.add(node, f"cannot read {path!r}: {reason.lower()}", "paths are beside this file")
            return None
        root = self.root(text, path)
        if isinstance(root, Mapping_):
            return root
        found = "it is empty" if root is None else f"it is {kind_of(root)}, not a mapping"
        self._reader.problems.add(node, f"{path!r} cannot be included: {found}")
        return None


def _filled(reader: Reader, own: Mapping_, parts: list[Mapping_]) -> Mapping_:
    sections = {entry.key: entry for entry in own}
    given: dict[tuple[str, str], Entry] = {}
    for part in parts:
        for entry in part:
            section = sections.get(entry.key)
            if section is None:
                sections[entry.key] = entry
                if entry.key in _MERGED and isinstance(entry.value, Mapping_):
                    given |= {(entry.key, one.key): one for one in entry.value}
            elif entry.key == "checks" and isinstance(section.value, Sequence) and isinstance(entry.value, Sequence):
                items = (*section.value.items, *entry.value.items)
                sections[entry.key] = replace(section, value=replace(section.value, items=items))
            elif entry.key in _MERGED and isinstance(section.value, Mapping_) and isinstance(entry.value, Mapping_):
                sections[entry.key] = _merged(reader, section, entry, given)
    return Mapping_(own.line, own.column, tuple(sections.values()), own.file)


def _merged(reader: Reader, section: Entry, more: Entry, given: dict[tuple[str, str], Entry]) -> Entry:
    assert isinstance(section.value, Mapping_) and isinstance(more.value, Mapping_)
    known = {one.key for one in section.value}
    added = []
    for one in more.value:
        first = given.get((section.key, one.key))
        if first is not None:
            reader.problems.add(
                one, f"{one.key!r} is given in {first.file}:{first.line} too", "keep one of them, or say it yourself"
            )
        elif one.key not in known:
            added.append(one)
            given[section.key, one.key] = one
    entries = (*section.value.entries, *added)
    if section.key == "classes":  # the last one takes what is left
        entries = (*(one for one in entries if not _takes_all(one)), *(one for one in entries if _takes_all(one)))
    return replace(section, value=replace(section.value, entries=entries))


def _takes_all(entry: Entry) -> bool:
    return isinstance(entry.value, Mapping_) and entry.value.get("when") is None
