"""YAML to nodes that know their line and column, with `${NAME}` taken from the environment.

The loader reads nodes, not dicts, because every message points at a place in the file. What YAML would let
pass or decide silently is a problem here: duplicate keys, tags, merge keys, a second document.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from policies.loader.problems import Problems

_MAX_NODES = 100_000
"""Aliases can make a small file stand for a huge one; no policy is near this."""

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^{}\n]*))?\}")
# In a flow mapping ({api_key: ${KEY}}) YAML would read the reference's own braces as another mapping. Each
# character of a reference that means something to YAML is put out of its sight, one for one, so that lines
# and columns stay what the author sees.
_HIDDEN = {mark: chr(0xF8E0 + index) for index, mark in enumerate("{}[],:#")}
_HIDE = str.maketrans(_HIDDEN)
_SHOW = str.maketrans({hidden: mark for mark, hidden in _HIDDEN.items()})

_PREFIX = "tag:yaml.org,2002:"


@dataclass(frozen=True, slots=True)
class Scalar:
    line: int
    column: int
    value: str | int | float | bool | None
    text: str
    """As the file has it: a `${NAME}` is not expanded, so this may be shown."""
    from_env: bool = False
    """Whether `value` is a string with something from the environment in it: never shown."""
    broken: bool = False
    """Whether a variable is missing. That has been reported; nothing else needs to be said of this value."""
    file: str = ""
    """Empty for the policy's own; the path of one that it includes."""


@dataclass(frozen=True, slots=True)
class Sequence:
    line: int
    column: int
    items: tuple[Node, ...]
    file: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """A key with its own position and its value."""

    line: int
    column: int
    key: str
    value: Node
    file: str = ""


@dataclass(frozen=True, slots=True)
class Mapping_:
    line: int
    column: int
    entries: tuple[Entry, ...]
    file: str = ""

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def get(self, key: str) -> Node | None:
        return next((entry.value for entry in self.entries if entry.key == key), None)


Node = Scalar | Sequence | Mapping_


def parse(text: str, env: Mapping[str, str], problems: Problems) -> Node | None:
    """The file's root, or None for an empty file. Raises PolicyError where YAML itself cannot be read."""
    root = _compose(text, problems)
    if root is None:
        return None
    try:
        return _Reader(env, problems).read(root)
    except RecursionError:
        problems.add_at(1, 1, "the file is nested too deeply to be read")
        problems.raise_if_any()
        raise


def _compose(text: str, problems: Problems) -> Any:
    from ruamel.yaml import YAML  # here, and once a load: it takes a while to import
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    # Where the text already has one of the stand-ins (private use area), references need quotes in flow style.
    hide = not any(hidden in text for hidden in _HIDDEN.values())
    source = _REFERENCE.sub(lambda found: found[0].translate(_HIDE), text) if hide else text
    try:
        return YAML(typ="safe", pure=True).compose(source)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = ", ".join(str(part) for part in (error.context, error.problem) if part).translate(_SHOW)
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        problems.add_at(line, column, f"not valid YAML: {said or 'cannot be read'}", _remedy(said))
    except RecursionError:
        problems.add_at(1, 1, "not valid YAML: nested too deeply to be read")
    except YAMLError as error:
        # The reader's own error has an offset and no mark.
        before = text[: getattr(error, "position", 0)]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        problems.add_at(line, column, "not valid YAML: a control character or broken encoding")
    except (ValueError, TypeError, AttributeError, LookupError, AssertionError, NotImplementedError) as error:
        # The parser lets these out on some malformed directives, tags and escapes, without a place.
        problems.add_at(1, 1, f"not valid YAML: the parser gave up ({type(error).__name__})")
    problems.raise_if_any()
    return None


def _remedy(said: str) -> str | None:
    if "\\t" in said:
        return "indent with spaces, not tabs"
    if "mapping values are not allowed" in said:
        return "check the indentation, and quote text that has ': ' in it"
    if "another document" in said:
        return "one file is one policy: remove the '---'"
    return None


class _Reader:
    def __init__(self, env: Mapping[str, str], problems: Problems) -> None:
        self._env = env
        self._problems = problems
        self._open: set[int] = set()
        self._count = 0
        self._file = problems.file

    def read(self, node: Any) -> Node:
        line, column = node.start_mark.line + 1, node.start_mark.column + 1
        self._count += 1
        if self._count > _MAX_NODES:
            self._problems.add_at(line, column, f"the policy is larger than {_MAX_NODES} nodes, aliases included")
            self._problems.raise_if_any()
        if id(node) in self._open:
            self._problems.add_at(line, column, "an alias (*) inside the node it names")
            self._problems.raise_if_any()
        self._open.add(id(node))
        try:
            if node.id == "mapping":
                self._refuse_tag(node, "map")
                return Mapping_(line, column, tuple(self._entries(node)), self._file)
            if node.id == "sequence":
                self._refuse_tag(node, "seq")
                return Sequence(line, column, tuple(self.read(item) for item in node.value), self._file)
            return self._scalar(node, line, column)
        finally:
            self._open.discard(id(node))

    def _entries(self, node: Any) -> Iterator[Entry]:
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            line, column = key_node.start_mark.line + 1, key_node.start_mark.column + 1
            value = self.read(value_node)
            if key_node.id != "scalar":
                self._problems.add_at(line, column, "a key must be plain text, not a list or a mapping")
                continue
            key = str(key_node.value).translate(_SHOW)
            if key == "<<":
                self._problems.add_at(
                    line, column, "merge keys (<<) are not part of the policy language", "write the keys out"
                )
                continue
            if key in first:
                self._problems.add_at(
                    line, column, f"duplicate key {key!r}, first given in line {first[key]}", "keep one of them"
                )
                continue
            first[key] = line
            yield Entry(line, column, key, value, self._file)

    def _scalar(self, node: Any, line: int, column: int) -> Scalar:
        written = str(node.value).translate(_SHOW)
        tag = str(node.tag)
        if tag not in _READ:
            self._problems.add_at(line, column, f"the tag {tag!r} is not part of the policy language")
            return Scalar(line, column, None, written, broken=True, file=self._file)
        if "${" in written:
            return self._expand(written, line, column)
        return Scalar(line, column, _READ[tag](written), written, file=self._file)

    def _expand(self, written: str, line: int, column: int) -> Scalar:
        """`written` with `${NAME}` and `${NAME:-default}` replaced; `$${` stands for a plain `${`."""
        missing = False

        def value_of(found: re.Match[str]) -> str:
            nonlocal missing
            name, default = found[1], found[2]
            if value := self._env.get(name) or default:
                return value
            if default is None:
                missing = True
                self._problems.add_at(
                    line,
                    column,
                    f"environment variable {name} is not set or empty",
                    f"export {name}=..., or give a default: ${{{name}:-...}}",
                )
            return ""

        parts = written.split("$${")
        if any("${" in _REFERENCE.sub("", part) for part in parts):
            self._problems.add_at(
                line,
                column,
                "'${' does not begin a variable reference",
                "write ${NAME} or ${NAME:-default}; $${ stands for a plain ${",
            )
            return Scalar(line, column, None, written, broken=True, file=self._file)
        value = "${".join(_REFERENCE.sub(value_of, part) for part in parts)
        from_env = any(_REFERENCE.search(part) for part in parts)
        return Scalar(line, column, value, written, from_env=from_env, broken=missing, file=self._file)

    def _refuse_tag(self, node: Any, plain: str) -> None:
        if str(node.tag) != _PREFIX + plain:
            line, column = node.start_mark.line + 1, node.start_mark.column + 1
            self._problems.add_at(line, column, f"the tag {str(node.tag)!r} is not part of the policy language")


def _integer(text: str) -> int | str:
    digits = text.replace("_", "")
    try:
        return int(digits, 0 if re.match(r"[-+]?0[xob]", digits) else 10)
    except ValueError:  # base 60 of YAML 1.1, or thousands of digits: no number to us
        return text


def _real(text: str) -> float | str:
    try:
        return float(re.sub(r"\.(inf|nan)$", r"\1", text.replace("_", ""), flags=re.I))
    except ValueError:
        return text


_READ: dict[str, Any] = {
    _PREFIX + "str": str,
    _PREFIX + "timestamp": str,
    _PREFIX + "null": lambda text: None,
    _PREFIX + "bool": lambda text: text.lower() in ("true", "yes", "on"),
    _PREFIX + "int": _integer,
    _PREFIX + "float": _real,
}
