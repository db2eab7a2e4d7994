"""From a policy's text to a `Policy`, or to everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from policies.loader.conditions import read_classes
from policies.loader.including import Including, Read
from policies.loader.language import Mapping_, Node, Scalar
from policies.loader.problems import Problems
from policies.loader.providers import read_providers
from policies.loader.reader import Reader, kind_of, shown
from policies.loader.rest import read_checks, read_overrides, read_resilience, read_timezone
from policies.loader.routes import read_routes
from policies.loader.targets import read_targets
from policies.model import Policy, Resilience
from policies.overrides import OVERRIDES

if TYPE_CHECKING:
    from pydantic import BaseModel

VERSION = 1
_SECTIONS = (
    "version",
    "include",
    "providers",
    "targets",
    "classes",
    "routes",
    "resilience",
    "overrides",
    "timezone",
    "checks",
)
_NEEDED = ("version", "providers", "targets", "routes")


def load(
    text: str,
    *,
    filename: str,
    env: Mapping[str, str],
    provider_types: Mapping[str, type[BaseModel]],
    read: Read | None = None,
) -> Policy:
    """Read a policy.

    `env` fills in `${NAME}`; `provider_types` has the options model of each provider type; `read` gives the text of a
    file that is included, by its path. Raises PolicyError with every problem that was found, each with its place and
    what to write instead.
    """
    problems = Problems(filename)
    reader = Reader(problems)
    including = Including(reader, env, read)
    root = including.root(text, filename)
    if not isinstance(root, Mapping_):
        found = "the file is empty" if root is None else f"a policy must be a mapping, not {kind_of(root)}"
        problems.add_at(1, 1, found, "see docs/policies.md; `version: 1` comes first")
        problems.raise_if_any()
        raise AssertionError
    sections = reader.entries(root, "a policy", "version: 1 …", _SECTIONS)
    for name in _NEEDED:
        if name not in sections:
            problems.add_at(1, 1, f"the policy has no {name!r}", f"add {name}:" + (" 1" if name == "version" else ""))
    nodes = {name: entry.value for name, entry in sections.items()}
    if "version" in nodes:
        _check_version(reader, nodes["version"])
    empty = Mapping_(1, 1, ())
    providers = read_providers(reader, nodes["providers"], provider_types) if "providers" in nodes else {}
    targets = read_targets(reader, nodes["targets"], providers) if "targets" in nodes else {}
    routes_node: Node = nodes.get("routes", empty)
    route_names = [entry.key for entry in routes_node] if isinstance(routes_node, Mapping_) else []
    classes = read_classes(reader, nodes.get("classes"), route_names)
    class_names = [one.name for one in classes]
    resilience = Resilience()
    if "resilience" in nodes:
        resilience = read_resilience(reader, nodes["resilience"], resilience)
    routes, resilience_by_route = (
        read_routes(reader, routes_node, targets, class_names, resilience) if "routes" in nodes else ({}, {})
    )
    checks = read_checks(reader, nodes["checks"], route_names, targets, class_names) if "checks" in nodes else ()
    overrides, overrides_by_key = (
        read_overrides(reader, nodes["overrides"]) if "overrides" in nodes else (frozenset(OVERRIDES), {})
    )
    timezone = read_timezone(reader, nodes["timezone"]) if "timezone" in nodes else "UTC"
    problems.raise_if_any()
    return Policy(
        filename=filename,
        included=tuple(including.files[1:]),
        providers={name: provider for name, provider in providers.items() if provider is not None},
        targets={name: target for name, target in targets.items() if target is not None},
        classes=classes,
        routes=routes,
        resilience=resilience,
        resilience_by_route=resilience_by_route,
        overrides=overrides,
        overrides_by_key=overrides_by_key,
        timezone=timezone,
        checks=checks,
    )


def _check_version(reader: Reader, node: Node) -> None:
    if not (isinstance(node, Scalar) and type(node.value) is int and node.value == VERSION) and not (
        isinstance(node, Scalar) and node.broken
    ):
        reader.problems.add(node, f"'version' must be {VERSION}, not {shown(node)}", f"write version: {VERSION}")
