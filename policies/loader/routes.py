"""`routes:`: for each model name that clients ask for, rules from the most particular to the last."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from policies.choose import BY_GOALS, BY_WEIGHTS, CHOOSERS, EXPLORING
from policies.conditions import Condition
from policies.loader.conditions import read_when
from policies.loader.language import Entry, Mapping_, Node, Scalar
from policies.loader.reader import Reader, shown
from policies.loader.rest import read_resilience
from policies.loader.targets import goals_of
from policies.model import EXPLORE, Resilience, Rule, Share, Slo, Spill

_EXAMPLE = "- {candidates: [mini, tiny], choose: in-order}"
_KEYS = ("when", "candidates", "choose", "slo", "weights", "spill", "canary", "mirror", "explore")
_SHARE_EXAMPLE = "{target: next, percent: 5}"

Routes = tuple[dict[str, tuple[Rule, ...]], dict[str, Resilience]]


def read_routes(reader: Reader, node: Node, targets: Iterable[str], classes: Iterable[str], base: Resilience) -> Routes:
    """The rules and, where a route has its own, the resilience, by the model name that clients ask for."""
    names, known = tuple(targets), {"class": tuple(classes)}
    routes: dict[str, tuple[Rule, ...]] = {}
    resilience: dict[str, Resilience] = {}
    for entry in reader.mapping(node, "'routes'", f"chat: [{_EXAMPLE[2:]}]") or ():
        rules_node: Node = entry.value
        if isinstance(rules_node, Mapping_):
            what = f"route {entry.key!r}"
            found = reader.entries(rules_node, what, f"[{_EXAMPLE[2:]}]", ("rules", "resilience"))
            if "resilience" in found:
                resilience[entry.key] = read_resilience(reader, found["resilience"].value, base, whole=False)
            if "rules" not in found:
                reader.problems.add(entry, f"{what} has no 'rules'", f"write it as rules: [{_EXAMPLE[2:]}]")
                continue
            rules_node = found["rules"].value
        items = reader.sequence(rules_node, f"route {entry.key!r}", _EXAMPLE)
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
    return routes, resilience


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
    spill = _spill(reader, what, found["spill"].value) if "spill" in found else Spill()
    if "spill" in found and choose not in (None, "spill-over"):
        reader.problems.add(found["spill"], f"'spill' has no effect with choose: {choose}", "use spill-over")
    if slo is not None and spill.back_at is not None and spill.back_at < slo.at:
        reader.problems.add(
            found["spill"], f"'back_at' is below the slo's 'at' ({slo.at:g})", "a target comes back at a higher chance"
        )
    canary, mirror = (_percent(reader, what, found.get(name), targets, candidates) for name in ("canary", "mirror"))
    explore = None
    if "explore" in found:
        explore = reader.percentage(found["explore"].value, "'explore'", low=0.0)
        if choose is not None and choose not in EXPLORING:
            reader.problems.add(
                found["explore"],
                f"'explore' has no effect with choose: {choose}",
                f"it has with {', '.join(sorted(EXPLORING))}",
            )
    return Rule(
        when=when,
        candidates=tuple(candidates),
        choose=choose or "in-order",
        slo=slo,
        line=node.line,
        weights=weights,
        spill=spill,
        canary=canary,
        mirror=mirror,
        explore=EXPLORE if explore is None else explore,
    )


def _spill(reader: Reader, what: str, node: Node) -> Spill:
    found = reader.entries(node, f"'spill' of {what}", "{back_at: p97, usd_per_hour: 5}", ("back_at", "usd_per_hour"))
    return Spill(
        read_share(reader, found["back_at"].value, "'back_at'") if "back_at" in found else None,
        reader.amount(found["usd_per_hour"].value, "'usd_per_hour'", low=0.0) if "usd_per_hour" in found else None,
    )


def _percent(
    reader: Reader, what: str, entry: Entry | None, targets: tuple[str, ...], candidates: list[str]
) -> Share | None:
    if entry is None:
        return None
    found = reader.entries(entry.value, f"{entry.key!r} of {what}", _SHARE_EXAMPLE, ("target", "percent"))
    if not isinstance(entry.value, Mapping_):
        return None
    for needed in ("target", "percent"):
        if needed not in found:
            reader.problems.add(entry, f"{entry.key!r} of {what} has no {needed!r}", f"write it as {_SHARE_EXAMPLE}")
    target = reader.one_of(found["target"].value, "target", targets) if "target" in found else None
    percent = reader.percentage(found["percent"].value, "'percent'", above=0.0) if "percent" in found else None
    if entry.key == "canary" and target in candidates:
        reader.problems.add(found["target"].value, f"the canary {target!r} is a candidate too", "leave one of them out")
    return Share(target, percent) if target is not None and percent is not None else None


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
    share = read_share(reader, found["at"].value, "'at'") if "at" in found else None
    return Slo(goals) if share is None else Slo(goals, share)


def read_share(reader: Reader, node: Node, what: str) -> float | None:
    """`p90` or 0.9."""
    if isinstance(node, Scalar) and not node.broken:
        value = node.value
        if isinstance(value, str) and (found := re.fullmatch(r"p(\d{1,2}(?:\.\d+)?)", value)):
            value = float(found[1]) / 100
        if isinstance(value, float) and 0 < value < 1:
            return value
        reader.problems.add(node, f"{what} must be a share such as p90 or 0.9, not {shown(node)}")
    return None
