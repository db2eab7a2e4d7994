"""A request's `provider` object, in OpenRouter's words: what it may change of its rule. Never sent on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from policies import OVERRIDES, UNCHANGED, Overrides, Policy, Price
from router.errors import RouterError, invalid

FIELD = "provider"
_SORTS = ("price", "latency", "throughput")


def read_overrides(value: Any) -> Overrides:
    """Raises RouterError (400) that names the field, the value and the remedy."""
    if not value and (value is None or isinstance(value, Mapping)):
        return UNCHANGED
    if not isinstance(value, Mapping):
        raise invalid(FIELD, value, 'use an object such as {"order": ["mini"], "allow_fallbacks": false}')
    for name in value:
        if name not in OVERRIDES:
            raise invalid(f"{FIELD}.{name}", value[name], f"there are {', '.join(OVERRIDES)}")
    sort = value.get("sort")
    if sort is not None and sort not in _SORTS:
        raise invalid(f"{FIELD}.sort", sort, f"use one of {', '.join(_SORTS)}")
    collection = value.get("data_collection")
    if collection not in (None, "allow", "deny"):
        raise invalid(f"{FIELD}.data_collection", collection, "use allow or deny")
    latency = _number(value, "preferred_max_latency")
    return Overrides(
        order=_names(value, "order"),
        only=_names(value, "only"),
        ignore=_names(value, "ignore"),
        sort=sort,
        max_price=_price(value.get("max_price")),
        preferred_max_latency_ms=None if latency is None else latency * 1000,
        preferred_min_throughput=_number(value, "preferred_min_throughput"),
        allow_fallbacks=_flag(value, "allow_fallbacks", default=True),
        require_parameters=_flag(value, "require_parameters", default=False),
        deny_data_collection=collection == "deny",
    )


def check_allowed(value: Any, overrides: Overrides, policy: Policy, key: str | None) -> None:
    """Refuse what the policy does not let a request change, and names that it does not have. Raises RouterError."""
    if overrides is UNCHANGED:
        return
    allowed = policy.overrides_of(key)
    for name in value:
        if name not in allowed:
            raise RouterError(
                f"{FIELD}.{name} is not for requests{'' if key is None else f' by the key {key!r}'} to say under "
                f"this policy; allowed: {', '.join(sorted(allowed)) or 'none'}",
                status=403,
                param=f"{FIELD}.{name}",
                code="override_not_allowed",
            )
    known = {*policy.targets, *policy.providers}
    for field in ("order", "only", "ignore"):
        for name in getattr(overrides, field):
            if name not in known:
                raise invalid(f"{FIELD}.{field}", name, f"targets and providers are {', '.join(sorted(known))}")


def _names(value: Mapping[str, Any], field: str) -> tuple[str, ...]:
    names = value.get(field)
    if names is None:
        return ()
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise invalid(f"{FIELD}.{field}", names, "use a list of names of targets or providers")
    return tuple(cast(list[str], names))


def _number(value: Mapping[str, Any], field: str) -> float | None:
    """Above 0."""
    number = value.get(field)
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < float("inf"):
        raise invalid(f"{FIELD}.{field}", number, "use a number above 0")
    return float(number)


def _flag(value: Mapping[str, Any], field: str, *, default: bool) -> bool:
    flag = value.get(field)
    if flag is None:
        return default
    if not isinstance(flag, bool):
        raise invalid(f"{FIELD}.{field}", flag, "use true or false")
    return flag


def _price(value: Any) -> Price | None:
    """USD per million tokens; what is not said may cost anything."""
    if value is None:
        return None
    amounts = {}
    for part in ("prompt", "completion"):
        amount = value.get(part, float("inf")) if isinstance(value, Mapping) else None
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not amount >= 0:
            raise invalid(f"{FIELD}.max_price", value, 'use an object such as {"prompt": 1, "completion": 2}')
        amounts[part] = float(amount)
    return Price(amounts["prompt"], amounts["completion"])
