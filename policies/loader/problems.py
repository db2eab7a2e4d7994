"""Collects what is wrong, so that one load reports everything."""

from __future__ import annotations

from typing import Protocol

from policies.errors import PolicyError, Problem


class Place(Protocol):
    """Anything with a position in the file, counted from 1."""

    @property
    def line(self) -> int: ...

    @property
    def column(self) -> int: ...


class Problems:
    """The problems found so far in one file."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._found: dict[Problem, None] = {}

    def add(self, place: Place, message: str, suggestion: str | None = None) -> None:
        self.add_at(place.line, place.column, message, suggestion)

    def add_at(self, line: int, column: int, message: str, suggestion: str | None = None) -> None:
        # A dict, because a node that an alias repeats would repeat its problem.
        self._found.setdefault(Problem(self.file, line, column, message, suggestion))

    def raise_if_any(self) -> None:
        if self._found:
            raise PolicyError(sorted(self._found, key=lambda problem: (problem.line, problem.column)))
