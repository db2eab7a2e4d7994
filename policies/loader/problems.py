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
    @property
    def file(self) -> str: ...


class Problems:
    """The problems found so far in one file."""

    def __init__(self, file: str, into: Problems | None = None) -> None:
        """With `into`, what is found is found there too: of a file that another one includes."""
        self.file = file
        self._found: dict[Problem, None] = {} if into is None else into._found

    def add(self, place: Place, message: str, suggestion: str | None = None) -> None:
        self._add(Problem(place.file or self.file, place.line, place.column, message, suggestion))

    def add_at(self, line: int, column: int, message: str, suggestion: str | None = None) -> None:
        self._add(Problem(self.file, line, column, message, suggestion))

    def _add(self, problem: Problem) -> None:
        # A dict, because a node that an alias repeats would repeat its problem.
        self._found.setdefault(problem)

    def raise_if_any(self) -> None:
        if self._found:
            raise PolicyError(sorted(self._found, key=self._place))

    def _place(self, problem: Problem) -> tuple[bool, str, int, int]:
        """The policy's own problems come first."""
        return problem.file != self.file, problem.file, problem.line, problem.column
