"""Takes typed values out of nodes; what is not as it should be becomes a problem with its place and remedy."""

from __future__ import annotations

from collections.abc import Iterable

from policies.errors import did_you_mean
from policies.loader.language import Entry, Mapping_, Node, Scalar, Sequence
from policies.loader.problems import Problems


class Reader:
    """Every method returns None where it has reported a problem, and the load goes on."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems

    def mapping(self, node: Node, what: str, example: str) -> Mapping_ | None:
        if isinstance(node, Mapping_):
            return node
        if not _is_broken(node):
            self.problems.add(node, f"{what} must be a mapping, not {kind_of(node)}", f"write it as {example}")
        return None

    def entries(self, node: Node, what: str, example: str, known: Iterable[str]) -> dict[str, Entry]:
        """The entries of a mapping whose keys are given; unknown ones are reported."""
        mapping = self.mapping(node, what, example)
        found = {}
        names = tuple(known)
        for entry in mapping or ():
            if entry.key in names:
                found[entry.key] = entry
            else:
                self.problems.add(entry, f"unknown key {entry.key!r} in {what}", did_you_mean(entry.key, names))
        return found

    def sequence(self, node: Node, what: str, example: str) -> tuple[Node, ...] | None:
        if isinstance(node, Sequence):
            return node.items
        if not _is_broken(node):
            self.problems.add(node, f"{what} must be a list, not {kind_of(node)}", f"write it as {example}")
        return None

    def text(self, node: Node, what: str) -> str | None:
        """A non-empty string."""
        if isinstance(node, Scalar) and isinstance(node.value, str) and node.value:
            return node.value
        self._refuse(node, what, "non-empty text", "put it in quotes if it looks like something else")
        return None

    def flag(self, node: Node, what: str) -> bool | None:
        if isinstance(node, Scalar) and isinstance(node.value, bool):
            return node.value
        self._refuse(node, what, "true or false")
        return None

    def whole(self, node: Node, what: str, low: int) -> int | None:
        """An integer of at least `low`."""
        value = _number(node)
        if isinstance(value, int) and value >= low:
            return value
        self._refuse(node, what, f"a whole number of at least {low}")
        return None

    def amount(self, node: Node, what: str, *, above: float | None = None, low: float | None = None) -> float | None:
        """A finite number above `above`, or of at least `low`, or any."""
        value = _number(node)
        if value is not None and value < float("inf"):
            if above is not None and value > above:
                return float(value)
            if low is not None and value >= low:
                return float(value)
            if above is None and low is None and value > float("-inf"):
                return float(value)
        wanted = "a number"
        if above is not None or low is not None:
            wanted += f" above {above:g}" if above is not None else f" of at least {low:g}"
        self._refuse(node, what, wanted)
        return None

    def percentage(
        self, node: Node, what: str, *, above: float | None = None, low: float | None = None
    ) -> float | None:
        """An amount of at most 100."""
        percent = self.amount(node, what, above=above, low=low)
        if percent is not None and percent > 100:
            self.problems.add(node, f"{what} must be at most 100, not {percent:g}")
        return percent

    def one_of(self, node: Node, what: str, known: Iterable[str]) -> str | None:
        """A name out of `known`."""
        names = tuple(known)
        value = self.text(node, what)
        if value is None or value in names:
            return value
        self.problems.add(node, f"unknown {what} {shown(node)}", did_you_mean(value, names))
        return None

    def _refuse(self, node: Node, what: str, wanted: str, remedy: str | None = None) -> None:
        if not _is_broken(node):
            self.problems.add(node, f"{what} must be {wanted}, not {shown(node)}", remedy)


def _is_broken(node: Node) -> bool:
    return isinstance(node, Scalar) and node.broken


def _number(node: Node) -> int | float | None:
    """The value of a number; text from the environment may spell one."""
    if not isinstance(node, Scalar) or isinstance(node.value, bool):
        return None
    if node.from_env and isinstance(node.value, str):
        try:
            return float(node.value) if "." in node.value else int(node.value)
        except ValueError:
            return None
    return node.value if isinstance(node.value, int | float) else None


def kind_of(node: Node) -> str:
    if isinstance(node, Mapping_):
        return "a mapping"
    if isinstance(node, Sequence):
        return "a list"
    return "nothing" if node.value is None else shown(node)


def shown(node: Node) -> str:
    """The node as the file has it: never what a variable expanded to."""
    if not isinstance(node, Scalar):
        return kind_of(node)
    if node.value is None and not node.text:
        return "nothing"
    text = repr(node.text) if isinstance(node.value, str) else node.text
    return text if len(text) <= 60 else text[:57] + "..."
