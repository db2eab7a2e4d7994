"""`providers:`: a type, and options that the type's own model validates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from policies.errors import did_you_mean
from policies.loader.language import Mapping_, Node, Scalar, Sequence
from policies.loader.reader import Reader, shown
from policies.model import Provider

if TYPE_CHECKING:
    from pydantic import BaseModel

_EXAMPLE = "own: {type: disagg, model: smollm2-135m}"


def read_providers(reader: Reader, node: Node, types: Mapping[str, type[BaseModel]]) -> dict[str, Provider | None]:
    """By name; None for one that has been reported, so that its users are not reported too."""
    providers: dict[str, Provider | None] = {}
    for entry in reader.mapping(node, "'providers'", _EXAMPLE) or ():
        providers[entry.key] = _provider(reader, entry.key, entry.value, types)
    if isinstance(node, Mapping_) and not providers:
        reader.problems.add(node, "'providers' is empty", f"name at least one, such as {_EXAMPLE}")
    return providers


def _provider(reader: Reader, name: str, node: Node, types: Mapping[str, type[BaseModel]]) -> Provider | None:
    from pydantic import ValidationError

    mapping = reader.mapping(node, f"provider {name!r}", _EXAMPLE)
    if mapping is None:
        return None
    type_node = mapping.get("type")
    if type_node is None:
        reader.problems.add(node, f"provider {name!r} has no 'type'", f"known: {', '.join(types)}")
        return None
    kind = reader.one_of(type_node, "provider type", types)
    if kind is None:
        return None
    if _has_broken(mapping):
        return None
    values = {entry.key: _plain(entry.value) for entry in mapping if entry.key != "type"}
    try:
        return Provider(name, kind, types[kind].model_validate(values))
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_input=False):
            _report(reader, name, mapping, types[kind], problem)
        return None


def _report(reader: Reader, name: str, mapping: Mapping_, model: type[BaseModel], problem: Any) -> None:
    path = [str(part) for part in problem["loc"]]
    key = path[0] if path else ""
    entry = next((entry for entry in mapping if entry.key == key), None)
    if problem["type"] == "extra_forbidden" and entry is not None:
        reader.problems.add(
            entry, f"unknown key {key!r} in provider {name!r}", did_you_mean(key, ["type", *model.model_fields])
        )
    elif problem["type"] == "missing" and len(path) == 1:
        reader.problems.add(mapping, f"provider {name!r} has no {key!r}, which its type needs")
    elif entry is None:
        reader.problems.add(mapping, f"provider {name!r}: {problem['msg']}")
    else:
        # What was given is shown as the file has it, and pydantic's message never repeats it.
        given = "" if _is_secret(model, key) else f", not {shown(entry.value)}"
        said = problem["msg"][0].lower() + problem["msg"][1:]
        reader.problems.add(entry.value, f"{'.'.join(path)!r} of provider {name!r}: {said}{given}")


def _is_secret(model: type[BaseModel], key: str) -> bool:
    """Whether a value is never shown, even one that is written into the file."""
    field = model.model_fields.get(key)
    return field is None or "Secret" in str(field.annotation) or key == "headers"


def _has_broken(node: Node) -> bool:
    if isinstance(node, Scalar):
        return node.broken
    return any(_has_broken(one) for one in _children(node))


def _children(node: Mapping_ | Sequence) -> list[Node]:
    return [entry.value for entry in node] if isinstance(node, Mapping_) else list(node.items)


def _plain(node: Node) -> Any:
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, Sequence):
        return [_plain(item) for item in node.items]
    return {entry.key: _plain(entry.value) for entry in node}
