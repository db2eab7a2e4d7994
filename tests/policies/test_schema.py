"""The JSON Schema for editors takes every policy that the loader takes, and marks what it refuses by name or type."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

import policies
from backends.options import PROVIDER_OPTIONS
from policies.schema import schema
from tests.policies.test_loading import POLICY, problems_of

_SCHEMA = schema(PROVIDER_OPTIONS)
_ROOT = Path(__file__).parents[2]


def _errors(text: str) -> list[str]:
    quoted = re.sub(r"(?<![\"'])(\$\{[^}]*\})", r'"\1"', text)
    read = YAML(typ="safe", pure=True).load(quoted)
    return [error.message for error in Draft202012Validator(_SCHEMA).iter_errors(read)]


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(_SCHEMA)


@pytest.mark.parametrize("name", policies.PRESETS)
def test_presets_are_valid(name: str) -> None:
    assert _errors(policies.preset(name)) == []


@pytest.mark.parametrize("path", sorted(_ROOT.glob("examples/**/*.yaml")), ids=lambda path: path.name)
def test_examples_are_valid(path: Path) -> None:
    text = path.read_text()
    if "version: 1" in text:
        assert _errors(text) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("version: 1", "version: 2"),
        ("version: 1", "versoin: 1"),
        ("type: disagg", "type: disag"),
        ("model: tiny-llm", "model: tiny-llm, decoed: 1"),
        ("context: 1000", "contxt: 1000"),
        ("context: 1000", "context: true"),
        ("output: 0.60", "output: -1"),
        ("{lte: 500}", "{less: 500}"),
        ("choose: in-order", "choose: inorder"),
        ("[mini, tiny]", "mini"),
        ("[mini, tiny]", "[mini, mini]"),
        ("at: p95", "at: 95"),
        ("retries: 1", "retires: 1"),
        ("expect: {target: mini,", "expect: {taget: mini,"),
        ("choose: in-order", "choose: in-order, canary: {target: mini, percent: 200}"),
    ],
)
def test_what_the_loader_refuses_by_name_or_type_is_marked(old: str, new: str) -> None:
    assert old in POLICY and _errors(POLICY) == []
    assert problems_of(POLICY.replace(old, new))
    assert _errors(POLICY.replace(old, new))


def test_options_of_providers_are_checked_by_their_type() -> None:
    def with_provider(options: str) -> Any:
        return _errors(POLICY.replace("{type: disagg, model: tiny-llm}", options))

    assert not with_provider("{type: disagg, model: m, workers: [{role: decode, address: 'h:1'}], kv_tokens: ${N}}")
    assert with_provider("{type: disagg, model: m, workers: [{role: cook, address: 'h:1'}]}")
    assert with_provider("{type: openai, prefill: 1}")
    assert with_provider("{type: disagg}")
