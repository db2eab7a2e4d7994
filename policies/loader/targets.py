"""`targets:`: a model at a provider, with its price, context and what it is expected to keep."""

from __future__ import annotations

from collections.abc import Mapping

from policies.loader.language import Entry, Mapping_, Node
from policies.loader.reader import Reader
from policies.model import OWN_HARDWARE, Goals, Price, Provider, Target

_EXAMPLE = "mini: {provider: openai, model: gpt-4o-mini}"
_KEYS = ("provider", "model", "context", "price", "expect")


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
    return Target(entry.key, provider.name, model, context, price, expect or Goals())


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
