"""`targets:`: a model at a provider, with its price, context and what it is expected to keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from policies.loader.language import Entry, Mapping_, Node, Scalar
from policies.loader.reader import Reader
from policies.model import OWN_CAPABILITIES, OWN_HARDWARE, Goals, Price, Provider, Speed, Target
from policies.needs import NEEDS

_EXAMPLE = "mini: {provider: openai, model: gpt-4o-mini}"
_KEYS = ("provider", "model", "context", "price", "expect", "capabilities", "data_collection", "speed", "limits")


def read_targets(reader: Reader, node: Node, providers: Mapping[str, Provider | None]) -> dict[str, Target | None]:
    """By name; None for one that has been reported."""
    targets: dict[str, Target | None] = {}
    for entry in reader.mapping(node, "'targets'", _EXAMPLE) or ():
        targets[entry.key] = _target(reader, entry, providers)
    if isinstance(node, Mapping_) and not targets:
        reader.problems.add(node, "'targets' is empty", f"name at least one, such as {_EXAMPLE}")
    return targets


def _target(reader: Reader, entry: Entry, providers: Mapping[str, Provider | None]) -> Target | None:
    what = f"target {entry.key!r}"
    found = reader.entries(entry.value, what, _EXAMPLE, _KEYS)
    if not isinstance(entry.value, Mapping_):
        return None
    context = reader.whole(found["context"].value, f"'context' of {what}", 1) if "context" in found else None
    price = _price(reader, what, found.get("price"))
    expect = read_goals(reader, f"'expect' of {what}", found["expect"].value) if "expect" in found else Goals()
    if "provider" not in found:
        reader.problems.add(entry, f"{what} has no 'provider'", f"write it as {_EXAMPLE}")
        return None
    name = reader.one_of(found["provider"].value, "provider", providers)
    provider = providers[name] if name is not None else None
    model = reader.text(found["model"].value, f"'model' of {what}") if "model" in found else None
    if provider is None:
        return None
    if model is None and "model" not in found:
        model = getattr(provider.options, "model", None)
        if model is None:
            reader.problems.add(entry, f"{what} has no 'model'", f"name the model that {name!r} knows it by")
    if model is None:
        return None
    if price is None and provider.type in OWN_HARDWARE:
        price = Price(0.0, 0.0)
    own = provider.type in OWN_HARDWARE
    keeps = (
        reader.one_of(found["data_collection"].value, "'data_collection'", ("allow", "deny"))
        if ("data_collection" in found)
        else None
    )
    return Target(
        name=entry.key,
        provider=provider.name,
        model=model,
        context=context,
        price=price,
        expect=expect or Goals(),
        capabilities=_capabilities(reader, what, found.get("capabilities"), own=own),
        speed=_speed(reader, what, found["speed"].value) if "speed" in found else None,
        **(_limits(reader, what, found["limits"].value) if "limits" in found else {}),
        keeps_no_data=own if keeps is None else keeps == "deny",
    )


_LIMITS = ("concurrency", "queue", "quota")


def _limits(reader: Reader, what: str, node: Node) -> dict[str, Any]:
    found = reader.entries(
        node, f"'limits' of {what}", "{concurrency: 8, queue: 100}", ("concurrency", "queue", "quota")
    )
    limits: dict[str, Any] = {}
    if "concurrency" in found:
        value: Node = found["concurrency"].value
        auto = isinstance(value, Scalar) and value.value == "auto"
        limits["concurrency"] = 0 if auto else reader.whole(value, "'concurrency'", 1)
    if "queue" in found:
        limits["queue"] = reader.whole(found["queue"].value, "'queue'", 0) or 0
        if "concurrency" not in found:
            reader.problems.add(found["queue"], f"'queue' of {what} is for nothing without a 'concurrency'", "add one")
    if "quota" in found:
        limits["quota"] = reader.text(found["quota"].value, "'quota'")
    return limits


def _speed(reader: Reader, what: str, node: Node) -> Speed:
    names = [field.name for field in fields(Speed)]
    found = reader.entries(node, f"'speed' of {what}", "{ttft_ms: 300, tpot_ms: 15, spread: 0.3}", names)
    read = {name: reader.amount(entry.value, repr(name), low=0.0) for name, entry in found.items()}
    return Speed(**{name: value for name, value in read.items() if value is not None})


def _capabilities(reader: Reader, what: str, entry: Entry | None, *, own: bool) -> frozenset[str] | None:
    if entry is None:
        return OWN_CAPABILITIES if own else None
    items = reader.sequence(entry.value, f"'capabilities' of {what}", "[tools, json-schema]")
    read = [reader.one_of(item, "capability", NEEDS) for item in items or ()]
    return frozenset(name for name in read if name is not None)


def _price(reader: Reader, what: str, entry: Entry | None) -> Price | None:
    if entry is None:
        return None
    example = "{input: 0.15, output: 0.60}, in USD per one million tokens"
    found = reader.entries(entry.value, f"'price' of {what}", example, ("input", "output"))
    if not isinstance(entry.value, Mapping_):
        return None
    amounts = {}
    for part in ("input", "output"):
        if part not in found:
            reader.problems.add(entry, f"'price' of {what} has no {part!r}", f"write it as {example}")
        elif (amount := reader.amount(found[part].value, f"{part!r} of the price of {what}", low=0.0)) is not None:
            amounts[part] = amount
    return Price(amounts["input"], amounts["output"]) if len(amounts) == 2 else None


def read_goals(reader: Reader, what: str, node: Node) -> Goals | None:
    """`{ttft_ms: …, tpot_ms: …}`, both optional, at least one given."""
    example = "{ttft_ms: 500, tpot_ms: 50}"
    found = reader.entries(node, what, example, ("ttft_ms", "tpot_ms"))
    if isinstance(node, Mapping_) and not node.entries:
        reader.problems.add(node, f"{what} is empty", f"write it as {example}")
    return goals_of(reader, found)


def goals_of(reader: Reader, found: Mapping[str, Entry]) -> Goals:
    """The goals among the entries of a mapping, in milliseconds."""
    values = {
        name: reader.amount(found[name].value, repr(name), above=0.0) if name in found else None
        for name in ("ttft_ms", "tpot_ms")
    }
    return Goals(values["ttft_ms"], values["tpot_ms"])
