"""`when:` and `classes:`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from policies.conditions import FLAGS, NUMBERS, OPERATORS, SIGNALS, Condition, Test, never_holds
from policies.loader.language import Entry, Mapping_, Node, Scalar, Sequence
from policies.loader.reader import Reader, shown
from policies.model import ClassDef

_EXAMPLE = "{prompt_tokens: {gte: 4000}}"
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
        classes.append(ClassDef(entry.key, when))
    if isinstance(node, Mapping_) and (not classes or classes[-1].when):
        reader.problems.add(
            entries[-1] if entries else node,
            "the last class must take every request that is left",
            "end the classes with: default: {}",
        )
    return tuple(classes) or (DEFAULT_CLASS,)


def _when_of(reader: Reader, entry: Entry) -> Node | None:
    found = reader.entries(entry.value, f"class {entry.key!r}", "{when: {prompt_tokens: {gte: 4000}}}", ("when",))
    return found["when"].value if "when" in found else None


def read_when(
    reader: Reader, what: str, node: Node | None, known: dict[str, tuple[str, ...]], *, within_rule: bool
) -> Condition:
    """A condition; `known` has, for text signals, the values that exist. None always holds."""
    if node is None:
        return Condition()
    signals = SIGNALS if within_rule else tuple(signal for signal in SIGNALS if signal != "class")
    tests: list[Test] = []
    for entry in reader.entries(node, f"'when' of {what}", _EXAMPLE, signals).values():
        of_signal = _tests(reader, entry, known)
        if never_holds(of_signal):
            reader.problems.add(
                entry, f"the condition on {entry.key!r} can never hold", "its comparisons exclude each other"
            )
        tests += of_signal
    if isinstance(node, Mapping_) and not node.entries:
        reader.problems.add(node, f"'when' of {what} is empty", "leave 'when' out to match every request")
    return Condition(tuple(tests) or _UNREADABLE)


def _tests(reader: Reader, entry: Entry, known: dict[str, tuple[str, ...]]) -> tuple[Test, ...]:
    signal = entry.key
    if isinstance(entry.value, Mapping_):
        operators = [name for name in OPERATORS if signal in NUMBERS or name not in _ORDERINGS]
        found = reader.entries(entry.value, f"the condition on {signal!r}", _EXAMPLE, operators)
        if not entry.value.entries:
            reader.problems.add(entry, f"the condition on {signal!r} is empty", f"known: {', '.join(operators)}")
    else:
        found = {"in" if isinstance(entry.value, Sequence) else "eq": entry}
    tests = []
    for operator, given in found.items():
        if operator == "in":
            items = reader.sequence(given.value, f"'in' of {signal!r}", "[a, b]")
            if items is not None:
                tests.append(Test(signal, "in", tuple(_value(reader, signal, item, known) for item in items)))
                if not items:
                    reader.problems.add(given.value, f"the list for {signal!r} is empty", "it would match nothing")
        else:
            tests.append(Test(signal, operator, _value(reader, signal, given.value, known)))
    return tuple(test for test in tests if test.value is not None and None not in _many(test.value))


def _many(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _value(reader: Reader, signal: str, node: Node, known: dict[str, tuple[str, ...]]) -> Any:
    if signal in NUMBERS:
        return reader.amount(node, repr(signal), low=0.0)
    if signal in FLAGS:
        return reader.flag(node, repr(signal))
    if signal in known:
        return reader.one_of(node, signal, known[signal])
    if isinstance(node, Scalar):
        return reader.text(node, repr(signal))
    reader.problems.add(node, f"{signal!r} must be text, not {shown(node)}")
    return None
