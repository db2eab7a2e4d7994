"""`resilience:`, `overrides:`, `timezone:` and `checks:`."""

from __future__ import annotations

import zoneinfo
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, get_args

from policies.breaker import BreakerRule
from policies.loader.language import Mapping_, Node, Scalar
from policies.loader.reader import Reader, shown
from policies.loader.targets import goals_of
from policies.model import AfterCommit, Check, Hedge, Profile, Resilience
from policies.needs import NEEDS
from policies.overrides import OVERRIDES

REQUEST_KEYS = (
    "model",
    "prompt_tokens",
    "uncached_tokens",
    "max_tokens",
    "ttft_ms",
    "tpot_ms",
    "stream",
    "needs",
    "session",
    "key",
    "priority",
)
_CHECK_EXAMPLE = "- {request: {model: chat, prompt_tokens: 6000}, expect: {target: mini}}"


def read_resilience(reader: Reader, node: Node, base: Resilience, *, whole: bool = True) -> Resilience:
    """What it does not say is as in `base`. A route's (not `whole`) has no breaker: targets are shared."""
    names = [field.name for field in fields(Resilience) if whole or field.name != "breaker"]
    found = reader.entries(node, "'resilience'", "{retries: 2, ttft_timeout_ms: 3000}", names)
    values: dict[str, Any] = {}
    for name, entry in found.items():
        if name == "after_commit":
            values[name] = reader.one_of(entry.value, "'after_commit'", get_args(AfterCommit))
        elif name == "max_cost_usd":
            values[name] = reader.amount(entry.value, repr(name), above=0.0)
        elif name == "hedge":
            values[name] = _hedge(reader, entry.value)
        elif name == "breaker":
            values[name] = _breaker(reader, entry.value)
        else:
            values[name] = reader.whole(entry.value, repr(name), 0 if name == "retries" else 1)
    return replace(base, **{name: value for name, value in values.items() if value is not None})


def _hedge(reader: Reader, node: Node) -> Hedge | None:
    example = "{percent: 5, usd_per_hour: 1}"
    found = reader.entries(node, "'hedge'", example, ("percent", "usd_per_hour"))
    if isinstance(node, Mapping_) and "percent" not in found:
        reader.problems.add(node, "'hedge' has no 'percent'", f"write it as {example}")
    percent = reader.percentage(found["percent"].value, "'percent'", above=0.0) if "percent" in found else None
    usd = reader.amount(found["usd_per_hour"].value, "'usd_per_hour'", low=0.0) if "usd_per_hour" in found else None
    return None if percent is None else Hedge(percent, usd)


def _breaker(reader: Reader, node: Node) -> BreakerRule:
    names = [field.name for field in fields(BreakerRule)]
    found = reader.entries(node, "'breaker'", "{failures: 5, rate: 0.5, open_ms: 1000}", names)
    values: dict[str, Any] = {}
    for name, entry in found.items():
        if name == "rate":
            values[name] = reader.amount(entry.value, "'rate'", above=0.0)
            if values[name] is not None and values[name] > 1:
                reader.problems.add(entry.value, f"'rate' must be at most 1, not {values[name]:g}")
        else:
            values[name] = reader.whole(entry.value, repr(name), 0 if name == "failures" else 1)
    return BreakerRule(**{name: value for name, value in values.items() if value is not None})


def read_overrides(reader: Reader, node: Node) -> tuple[frozenset[str], dict[str, frozenset[str]]]:
    """What requests may change, and what those by the keys that are named: `all`, `none` or a list of names, or a
    mapping with `default` and `keys`."""
    if not isinstance(node, Mapping_):
        return _allowed(reader, node), {}
    found = reader.entries(node, "'overrides'", "{default: none, keys: {team-a: all}}", ("default", "keys"))
    default = _allowed(reader, found["default"].value) if "default" in found else frozenset(OVERRIDES)
    keys = reader.mapping(found["keys"].value, "'keys' of 'overrides'", "team-a: all") if "keys" in found else None
    return default, {entry.key: _allowed(reader, entry.value) for entry in keys or ()}


def _allowed(reader: Reader, node: Node) -> frozenset[str]:
    if isinstance(node, Scalar) and node.value in ("all", "none"):
        return frozenset(OVERRIDES if node.value == "all" else ())
    items = reader.sequence(node, "'overrides'", "all, none or [order, only, max_price]")
    read = [reader.one_of(item, "override", OVERRIDES) for item in items or ()]
    return frozenset(name for name in read if name is not None)


def read_timezone(reader: Reader, node: Node) -> str:
    name = reader.text(node, "'timezone'")
    if name is not None:
        try:
            zoneinfo.ZoneInfo(name)
            return name
        except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
            reader.problems.add(node, f"unknown timezone {shown(node)}", "write it as Europe/Paris, or UTC")
    return "UTC"


def read_checks(
    reader: Reader, node: Node, routes: Iterable[str], targets: Iterable[str], classes: Iterable[str]
) -> tuple[Check, ...]:
    known = {"target": tuple(targets), "class": tuple(classes), "route": tuple(routes)}
    read = [_check(reader, item, known) for item in reader.sequence(node, "'checks'", _CHECK_EXAMPLE) or ()]
    return tuple(check for check in read if check is not None)


def _check(reader: Reader, node: Node, known: dict[str, tuple[str, ...]]) -> Check | None:
    parts = reader.entries(node, "a check", _CHECK_EXAMPLE, ("request", "expect"))
    if not isinstance(node, Mapping_):
        return None
    for needed in ("request", "expect"):
        if needed not in parts:
            reader.problems.add(node, f"a check has no {needed!r}", f"write it as {_CHECK_EXAMPLE}")
    if len(parts) < 2:
        return None
    asked = parts["request"].value
    found = reader.entries(asked, "'request' of a check", _CHECK_EXAMPLE, REQUEST_KEYS)
    for needed in ("model", "prompt_tokens"):
        if needed not in found and isinstance(asked, Mapping_):
            reader.problems.add(asked, f"'request' of a check has no {needed!r}", f"write it as {_CHECK_EXAMPLE}")
    model = reader.one_of(found["model"].value, "route", known["route"]) if "model" in found else None
    tokens = {
        name: reader.whole(found[name].value, repr(name), 1) if name in found else None
        for name in ("prompt_tokens", "uncached_tokens", "max_tokens")
    }
    stream = reader.flag(found["stream"].value, "'stream'") if "stream" in found else False
    goals = goals_of(reader, found)
    needs = reader.sequence(found["needs"].value, "'needs'", "[tools, vision]") if "needs" in found else ()
    needed_names = [reader.one_of(item, "need", NEEDS) for item in needs or ()]
    wanted = parts["expect"].value
    expect = reader.entries(wanted, "'expect' of a check", "{target: mini}", known)
    if isinstance(wanted, Mapping_) and not wanted.entries:
        reader.problems.add(wanted, "'expect' of a check is empty", "expect a target, class or route")
    names = {name: reader.one_of(entry.value, name, known[name]) for name, entry in expect.items()}
    if model is None or tokens["prompt_tokens"] is None:
        return None
    request = Profile(
        model=model,
        prompt_tokens=tokens["prompt_tokens"],
        exact=True,
        max_tokens=tokens["max_tokens"],
        uncached_tokens=tokens["uncached_tokens"],
        goals=goals,
        stream=bool(stream),
        needs=frozenset(name for name in needed_names if name is not None),
        session=reader.text(found["session"].value, "'session'") if "session" in found else None,
        key=reader.text(found["key"].value, "'key'") if "key" in found else None,
        priority=reader.amount(found["priority"].value, "'priority'", low=0.0) if "priority" in found else None,
    )
    return Check(node.line, request, names.get("target"), names.get("class"), names.get("route"))
