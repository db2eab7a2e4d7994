"""The policy language as a JSON Schema (draft 2020-12), for editors: completion, and mistakes shown while typing.

Names and types only. What hangs on other parts of a file (names of targets, the order of rules) the loader says. Where
a number or flag is wanted, `${NAME}` is let through.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_args

from policies.breaker import BreakerRule
from policies.choose import CHOOSERS
from policies.conditions import FLAGS, GROUPS, KEYED, NUMBERS, SETS, SIGNALS, TEXTS, WEEKDAYS
from policies.loader.rest import REQUEST_KEYS
from policies.model import AfterCommit, Resilience, Speed
from policies.needs import NEEDS
from policies.overrides import OVERRIDES

if TYPE_CHECKING:
    from pydantic import BaseModel

Schema = dict[str, Any]

_VARIABLE: Schema = {"type": "string", "pattern": r"\$\{"}
_TEXT: Schema = {"type": "string", "minLength": 1}


def _number(**limits: Any) -> Schema:
    return {"anyOf": [{"type": "number", **limits}, _VARIABLE]}


def _whole(low: int) -> Schema:
    return {"anyOf": [{"type": "integer", "minimum": low}, _VARIABLE]}


def _flag() -> Schema:
    return {"anyOf": [{"type": "boolean"}, _VARIABLE]}


def _one_of(names: Iterable[str]) -> Schema:
    return {"anyOf": [{"enum": list(names)}, _VARIABLE]}


def _list(items: Schema, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least}


def _mapping(required: Iterable[str] = (), **properties: Schema) -> Schema:
    found: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**found, "required": list(required)} if required else found


def _by_name(values: Schema, least: int = 0) -> Schema:
    return {"type": "object", "additionalProperties": values, "minProperties": least}


_GOAL = _number(exclusiveMinimum=0)
_SHARE: Schema = {
    "anyOf": [
        {"type": "string", "pattern": r"^p\d{1,2}(\.\d+)?$"},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        _VARIABLE,
    ]
}
_PART = _mapping(("target", "percent"), target=_TEXT, percent=_number(exclusiveMinimum=0, maximum=100))

_ALLOWED = {"anyOf": [{"enum": ["all", "none"]}, _list(_one_of(OVERRIDES))]}


def schema(provider_types: Mapping[str, type[BaseModel]]) -> Schema:
    """Of policies with those types of providers, each with the model of its options."""
    definitions: Schema = {"condition": _condition()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "splitroute routing policy",
        **_mapping(
            ("version",),
            version={"const": 1},
            include=_list(_TEXT, 1),
            providers=_by_name(_providers(provider_types, definitions), 1),
            targets=_by_name(_target(), 1),
            classes=_by_name(_mapping(when={"$ref": "#/$defs/condition"}, priority=_number()), 1),
            routes=_by_name(_route(), 1),
            resilience=_resilience(),
            overrides={"anyOf": [_ALLOWED, _mapping(default=_ALLOWED, keys=_by_name(_ALLOWED))]},
            timezone=_TEXT,
            checks=_list(_check()),
        ),
        "anyOf": [{"required": ["include"]}, {"required": ["providers", "targets", "routes"]}],
        "$defs": definitions,
    }


def _providers(types: Mapping[str, type[BaseModel]], definitions: Schema) -> Schema:
    """A schema for each type, chosen by `type`."""
    for name, model in types.items():
        made = model.model_json_schema(ref_template=f"#/$defs/{name}-{{model}}")
        for inner, definition in made.pop("$defs", {}).items():
            definitions[f"{name}-{inner}"] = definition
        properties = {key: {"anyOf": [value, _VARIABLE]} for key, value in made["properties"].items()}
        made["properties"] = {"type": {"const": name}, **properties}
        made["required"] = ["type", *made.get("required", ())]
        definitions[name] = made
    return {
        "type": "object",
        "required": ["type"],
        "properties": {"type": _one_of(types)},
        "allOf": [
            {"if": {"properties": {"type": {"const": name}}}, "then": {"$ref": f"#/$defs/{name}"}} for name in types
        ],
    }


def _target() -> Schema:
    price = _mapping(("input", "output"), input=_number(minimum=0), output=_number(minimum=0))
    return _mapping(
        ("provider",),
        provider=_TEXT,
        model=_TEXT,
        context=_whole(1),
        price={**price, "description": "USD per one million tokens"},
        expect={**_mapping(ttft_ms=_GOAL, tpot_ms=_GOAL), "minProperties": 1},
        capabilities=_list(_one_of(NEEDS)),
        data_collection=_one_of(("allow", "deny")),
        limits=_mapping(concurrency={"anyOf": [_whole(1), {"const": "auto"}]}, queue=_whole(0), quota=_TEXT),
        speed=_mapping(**{field.name: _number(minimum=0) for field in fields(Speed)}),
    )


def _condition() -> Schema:
    inner: Schema = {"$ref": "#/$defs/condition"}
    number = _number(minimum=0)
    texts: dict[str, Schema] = dict.fromkeys(TEXTS, _TEXT)
    texts["weekday"] = _one_of(WEEKDAYS)
    signals: dict[str, Schema] = {}
    for name in SIGNALS:
        if name in NUMBERS:
            signals[name] = _compared(number, ordered=True)
        elif name in KEYED:
            signals[name] = _by_name(_compared(_TEXT), 1)
        elif name in FLAGS:
            signals[name] = _compared(_flag())
        else:
            signals[name] = _compared(_one_of(NEEDS) if name in SETS else texts[name])
    groups: dict[str, Schema] = dict.fromkeys(GROUPS, _list(inner, 1))
    groups["not"] = {"anyOf": [inner, _list(inner, 1)]}
    return {**_mapping(**signals, **groups), "minProperties": 1}


def _compared(value: Schema, *, ordered: bool = False) -> Schema:
    operators = {"eq": value, "in": _list(value, 1)}
    if ordered:
        operators |= dict.fromkeys(("lt", "lte", "gt", "gte"), value)
    return {"anyOf": [value, _list(value, 1), {**_mapping(**operators), "minProperties": 1}]}


def _route() -> Schema:
    rule = _mapping(
        ("candidates", "choose"),
        when={"$ref": "#/$defs/condition"},
        candidates={**_list(_TEXT, 1), "uniqueItems": True},
        choose=_one_of(CHOOSERS),
        slo={**_mapping(ttft_ms=_GOAL, tpot_ms=_GOAL, at=_SHARE), "minProperties": 1},
        weights=_by_name(_number(minimum=0)),
        spill=_mapping(back_at=_SHARE, usd_per_hour=_number(minimum=0)),
        canary=_PART,
        mirror=_PART,
        explore=_number(minimum=0, maximum=100),
    )
    rules = _list(rule, 1)
    return {"anyOf": [rules, _mapping(("rules",), rules=rules, resilience=_resilience())]}


def _resilience() -> Schema:
    limits = {field.name: _whole(0 if field.name == "retries" else 1) for field in fields(Resilience)}
    breaker = {field.name: _whole(0 if field.name == "failures" else 1) for field in fields(BreakerRule)}
    percent = _number(exclusiveMinimum=0, maximum=100)
    special = {
        "after_commit": _one_of(get_args(AfterCommit)),
        "max_cost_usd": _number(exclusiveMinimum=0),
        "hedge": _mapping(("percent",), percent=percent, usd_per_hour=_number(minimum=0)),
        "breaker": _mapping(**{**breaker, "rate": _number(exclusiveMinimum=0, maximum=1)}),
    }
    return _mapping(**{**limits, **special})


def _check() -> Schema:
    kinds: dict[str, Schema] = {
        "model": _TEXT,
        "session": _TEXT,
        "key": _TEXT,
        "stream": _flag(),
        "needs": _list(_one_of(NEEDS)),
        "ttft_ms": _GOAL,
        "tpot_ms": _GOAL,
        "priority": _number(minimum=0),
    }
    asked = _mapping(("model", "prompt_tokens"), **{name: kinds.get(name, _whole(1)) for name in REQUEST_KEYS})
    expected = {**_mapping(target=_TEXT, route=_TEXT, **{"class": _TEXT}), "minProperties": 1}
    return _mapping(("request", "expect"), request=asked, expect=expected)
