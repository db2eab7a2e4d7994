"""`routes:`: for each model name that clients ask for, rules from the most particular to the last."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from policies.choose import BY_GOALS, BY_WEIGHTS, CHOOSERS
from policies.conditions import Condition
from policies.loader.conditions import read_when
from policies.loader.language import Mapping_, Node, Scalar
from policies.loader.reader import Reader, shown
from policies.loader.targets import goals_of
from policies.model import Rule, Slo

_EXAMPLE = "- {candidates: [mini, tiny], choose: in-order}"
_KEYS = ("when", "candidates", "choose", "slo", "weights")


def read_routes(
    reader: Reader, node: Node, targets: Iterable[str], classes: Iterable[str]
) -> dict[str, tuple[Rule, ...]]:
    """By the model name that clients ask for."""
    names, known = tuple(targets), {"class": tuple(classes)}
    routes = {}
    for entry in reader.mapping(node, "'routes'", f"chat: [{_EXAMPLE[2:]}]") or ():
        items = reader.sequence(entry.value, f"route {entry.key!r}", _EXAMPLE)
        if items is None:
            continue
        rules: list[Rule] = []
        for item in items:
            if rules and not rules[-1].when:
                reader.problems.add(
                    item,
                    f"this rule of route {entry.key!r} is never reached: the one in line {rules[-1].line} "
                    "takes every request",
                    "put the rule without a condition last",
                )
            rules.append(_rule(reader, entry.key, item, names, known))
        if not rules or rules[-1].when:
            reader.problems.add(
                items[-1] if items else entry,
                f"the last rule of route {entry.key!r} must take every request that is left",
                f"end the route with a rule without 'when', such as {_EXAMPLE}",
            )
        routes[entry.key] = tuple(rules)
    if isinstance(node, Mapping_) and not routes:
        reader.problems.add(node, "'routes' is empty", f"name at least one, such as chat: [{_EXAMPLE[2:]}]")
    return routes


def _rule(
    reader: Reader, route: str, node: Node, targets: tuple[str, ...], known: Mapping[str, tuple[str, ...]]
) -> Rule:
    what = f"a rule of route {route!r}"
    found = reader.entries(node, what, _EXAMPLE, _KEYS)
    when = Condition()
    if "when" in found:
        when = read_when(reader, what, found["when"].value, dict(known), within_rule=True)
    candidates: list[str] = []
    if "candidates" in found:
        for item in reader.sequence(found["candidates"].value, f"'candidates' of {what}", "[mini, tiny]") or ():
            name = reader.one_of(item, "target", targets)
            if name in candidates:
                reader.problems.add(item, f"{name!r} is a candidate twice", "keep one of them")
            elif name is not None:
                candidates.append(name)
        if getattr(found["candidates"].value, "items", None) == ():
            reader.problems.add(found["candidates"].value, f"'candidates' of {what} is empty", "name a target")
    elif isinstance(node, Mapping_):
        reader.problems.add(node, f"{what} has no 'candidates'", f"write it as {_EXAMPLE}")
    choose = None
    if "choose" in found:
        choose = reader.one_of(found["choose"].value, "way to choose", CHOOSERS)
    elif isinstance(node, Mapping_):
        reader.problems.add(node, f"{what} has no 'choose'", f"known: {', '.join(CHOOSERS)}")
    slo = _slo(reader, what, found["slo"].value) if "slo" in found else None
    if slo is not None and choose is not None and choose not in BY_GOALS:
        reader.problems.add(found["slo"], f"'slo' has no effect with choose: {choose}", "use cheapest-meeting-slo")
    weights = _weights(reader, what, found["weights"].value, candidates) if "weights" in found else {}
    if "weights" in found and choose is not None and choose not in BY_WEIGHTS:
        reader.problems.add(found["weights"], f"'weights' have no effect with choose: {choose}", "use weighted")
    return Rule(when, tuple(candidates), choose or "in-order", slo, node.line, weights)


def _weights(reader: Reader, what: str, node: Node, candidates: list[str]) -> dict[str, float]:
    found = reader.entries(node, f"'weights' of {what}", "{mini: 9, tiny: 1}", candidates)
    read = {name: reader.amount(entry.value, f"the weight of {name!r}", low=0.0) for name, entry in found.items()}
    weights = {name: weight for name, weight in read.items() if weight is not None}
    if isinstance(node, Mapping_) and candidates and all(weights.get(name, 1.0) == 0 for name in candidates):
        reader.problems.add(node, f"'weights' of {what} leave nobody: all are 0", "give one a weight above 0")
    return weights


def _slo(reader: Reader, what: str, node: Node) -> Slo | None:
    example = "{ttft_ms: 500, tpot_ms: 50, at: p90}"
    found = reader.entries(node, f"'slo' of {what}", example, ("ttft_ms", "tpot_ms", "at"))
    if not isinstance(node, Mapping_):
        return None
    goals = goals_of(reader, found)
    if not {"ttft_ms", "tpot_ms"} & set(found):
        reader.problems.add(node, f"'slo' of {what} has neither 'ttft_ms' nor 'tpot_ms'", f"write it as {example}")
    share = _share(reader, found["at"].value) if "at" in found else None
    return Slo(goals) if share is None else Slo(goals, share)


def _share(reader: Reader, node: Node) -> float | None:
    """`p90` or 0.9."""
    if isinstance(node, Scalar) and not node.broken:
        value = node.value
        if isinstance(value, str) and (found := re.fullmatch(r"p(\d{1,2}(?:\.\d+)?)", value)):
            value = float(found[1]) / 100
        if isinstance(value, float) and 0 < value < 1:
            return value
        reader.problems.add(node, f"'at' must be a share such as p90 or 0.9, not {shown(node)}")
    return None
