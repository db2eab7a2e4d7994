"""`when:` and `classes:`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from policies.conditions import (
    FLAGS,
    GROUPS,
    KEYED,
    NUMBERS,
    OPERATORS,
    SIGNALS,
    WEEKDAYS,
    Condition,
    Test,
    never_holds,
)
from policies.loader.language import Entry, Mapping_, Node, Scalar, Sequence
from policies.loader.reader import Reader, shown
from policies.model import ClassDef
from policies.needs import NEEDS

_EXAMPLE = "{prompt_tokens: {gte: 4000}}"
_CLASS = "{when: {prompt_tokens: {gte: 4000}}, priority: -1}"
_ORDERINGS = ("lt", "lte", "gt", "gte")
_UNREADABLE = (Test("stream", "in", ()),)
"""Stands for a condition that was reported: it must not count as one that always holds."""
DEFAULT_CLASS = ClassDef("default", Condition())


def read_classes(reader: Reader, node: Node | None, routes: Iterable[str]) -> tuple[ClassDef, ...]:
    """In order. Without the section, one class takes every request."""
    if node is None:
        return (DEFAULT_CLASS,)
    known = {"model": tuple(routes)}
    classes: list[ClassDef] = []
    entries = list(reader.mapping(node, "'classes'", "long: {when: {prompt_tokens: {gte: 4000}}}, default: {}") or ())
    for entry in entries:
        if classes and not classes[-1].when:
            reader.problems.add(
                entry,
                f"class {entry.key!r} is never reached: {classes[-1].name!r} before it takes every request",
                "put the class without a condition last",
            )
        when = read_when(reader, f"class {entry.key!r}", _when_of(reader, entry), known, within_rule=False)
        classes.append(ClassDef(entry.key, when, _priority_of(reader, entry)))
    if isinstance(node, Mapping_) and (not classes or classes[-1].when):
        reader.problems.add(
            entries[-1] if entries else node,
            "the last class must take every request that is left",
            "end the classes with: default: {}",
        )
    return tuple(classes) or (DEFAULT_CLASS,)


def _when_of(reader: Reader, entry: Entry) -> Node | None:
    found = reader.entries(entry.value, f"class {entry.key!r}", _CLASS, ("when", "priority"))
    return found["when"].value if "when" in found else None


def _priority_of(reader: Reader, entry: Entry) -> float:
    if not isinstance(entry.value, Mapping_):
        return 0.0
    found = next((one for one in entry.value.entries if one.key == "priority"), None)
    return (reader.amount(found.value, "'priority'") or 0.0) if found is not None else 0.0


def read_when(
    reader: Reader, what: str, node: Node | None, known: dict[str, tuple[str, ...]], *, within_rule: bool
) -> Condition:
    """A condition; `known` has, for text signals, the values that exist. None always holds."""
    if node is None:
        return Condition()
    signals = [signal for signal in SIGNALS if within_rule or signal != "class"]
    tests: list[Test] = []
    any_of: list[tuple[Condition, ...]] = []
    all_of: list[Condition] = []
    none_of: list[Condition] = []
    for entry in reader.entries(node, f"'when' of {what}", _EXAMPLE, (*signals, *GROUPS)).values():
        if entry.key in GROUPS:
            group = _group(reader, what, entry, known, within_rule=within_rule)
            if entry.key == "any":
                any_of.append(group)
            else:
                (all_of if entry.key == "all" else none_of).extend(group)
        elif entry.key in KEYED:
            tests += _keyed(reader, entry)
        else:
            tests += _exclusive(reader, entry, _tests(reader, entry.key, entry, known))
    if isinstance(node, Mapping_) and not node.entries:
        reader.problems.add(node, f"'when' of {what} is empty", "leave 'when' out to match every request")
    read = Condition(tuple(tests), tuple(any_of), tuple(all_of), tuple(none_of))
    return read or Condition(_UNREADABLE)


def _group(
    reader: Reader, what: str, entry: Entry, known: dict[str, tuple[str, ...]], *, within_rule: bool
) -> tuple[Condition, ...]:
    """The conditions of `any: […]`, `all: […]` or `not: {…}`, which may also be a list."""
    if entry.key == "not" and isinstance(entry.value, Mapping_):
        items: tuple[Node, ...] | None = (entry.value,)
    else:
        items = reader.sequence(entry.value, f"{entry.key!r} in 'when' of {what}", f"[{_EXAMPLE}, {{stream: true}}]")
    if items == ():
        reader.problems.add(entry, f"{entry.key!r} in 'when' of {what} is empty", "leave it out")
    return tuple(read_when(reader, what, item, known, within_rule=within_rule) for item in items or ())


def _keyed(reader: Reader, entry: Entry) -> list[Test]:
    """Under `metadata` and `headers`, each name is a text signal of its own."""
    tests: list[Test] = []
    example = "{team: search}" if entry.key == "metadata" else "{x-team: search}"
    for inner in reader.mapping(entry.value, repr(entry.key), example) or ():
        key = inner.key.lower() if entry.key == "headers" else inner.key
        tests += _exclusive(reader, inner, _tests(reader, entry.key, inner, {}, key))
    if isinstance(entry.value, Mapping_) and not entry.value.entries:
        reader.problems.add(entry, f"the condition on {entry.key!r} is empty", f"write it as {example}")
    return tests


def _exclusive(reader: Reader, entry: Entry, tests: tuple[Test, ...]) -> tuple[Test, ...]:
    if never_holds(tests):
        reader.problems.add(
            entry, f"the condition on {entry.key!r} can never hold", "its comparisons exclude each other"
        )
    return tests


def _tests(
    reader: Reader, signal: str, entry: Entry, known: dict[str, tuple[str, ...]], key: str | None = None
) -> tuple[Test, ...]:
    if isinstance(entry.value, Mapping_):
        operators = [name for name in OPERATORS if signal in NUMBERS or name not in _ORDERINGS]
        found = reader.entries(entry.value, f"the condition on {entry.key!r}", _EXAMPLE, operators)
        if not entry.value.entries:
            reader.problems.add(entry, f"the condition on {entry.key!r} is empty", f"known: {', '.join(operators)}")
    else:
        found = {"in" if isinstance(entry.value, Sequence) else "eq": entry}
    tests = []
    for operator, given in found.items():
        if operator == "in":
            items = reader.sequence(given.value, f"'in' of {entry.key!r}", "[a, b]")
            if items is not None:
                tests.append(Test(signal, "in", tuple(_value(reader, signal, item, known) for item in items), key))
                if not items:
                    reader.problems.add(given.value, f"the list for {entry.key!r} is empty", "it would match nothing")
        else:
            tests.append(Test(signal, operator, _value(reader, signal, given.value, known), key))
    return tuple(test for test in tests if test.value is not None and None not in _many(test.value))


def _many(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _value(reader: Reader, signal: str, node: Node, known: dict[str, tuple[str, ...]]) -> Any:
    if signal in NUMBERS:
        return reader.amount(node, repr(signal), low=0.0)
    if signal in FLAGS:
        return reader.flag(node, repr(signal))
    known = {**known, "needs": NEEDS, "weekday": WEEKDAYS}
    if signal in known:
        return reader.one_of(node, {"needs": "need"}.get(signal, signal), known[signal])
    if isinstance(node, Scalar):
        return reader.text(node, repr(signal))
    reader.problems.add(node, f"{signal!r} must be text, not {shown(node)}")
    return None
