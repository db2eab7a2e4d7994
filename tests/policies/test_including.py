"""Files that several policies share."""

from __future__ import annotations

from pathlib import Path

import pytest

import policies
from policies import Policy, PolicyError
from router import Router
from router.chaos import FakeProvider
from tests.policies.test_loading import TYPES
from tests.router.policies import ASK

OWN = """\
version: 1
include: [base/providers.yaml]
targets:
  mini: {provider: api, model: mine}
classes:
  short: {when: {prompt_tokens: {lt: 100}}}
routes:
  chat: [{candidates: [mini, big], choose: in-order}]
resilience: {retries: 5}
"""
BASE = """\
providers:
  api: {type: openai}
targets:
  mini: {provider: api, model: theirs}
  big: {provider: api, model: big, context: 1000}
classes:
  long: {when: {prompt_tokens: {gte: 4000}}}
  default: {}
resilience: {retries: 1, deadline_ms: 7000}
"""


def load(**files: str) -> Policy:
    named = {name.replace("__", "/") + ".yaml": text for name, text in files.items()}

    def read(path: str) -> str:
        if path not in named:
            raise FileNotFoundError(2, "No such file or directory", path)
        return named[path]

    return policies.load(named["own.yaml"], filename="own.yaml", env={}, provider_types=TYPES, read=read)


def problems_of(**files: str) -> list[str]:
    with pytest.raises(PolicyError) as refused:
        load(**files)
    return [str(problem) for problem in refused.value.problems]


def test_what_a_file_says_itself_wins_and_the_rest_is_filled_in() -> None:
    policy = load(own=OWN, base__providers=BASE)
    assert policy.targets["mini"].model == "mine" and policy.targets["big"].context == 1000
    assert [one.name for one in policy.classes] == ["short", "long", "default"]
    assert (policy.resilience.retries, policy.resilience.deadline_ms) == (5, 7000)
    assert policy.included == ("base/providers.yaml",)


def test_a_mistake_in_an_included_file_is_named_with_that_file() -> None:
    found = problems_of(own=OWN, base__providers=BASE.replace("context: 1000", "context: many"))
    assert found == [
        "base/providers.yaml:5:45: 'context' of target 'big' must be a whole number of at least 1, not 'many'"
    ]


def test_included_files_may_include_others_beside_them() -> None:
    policy = load(
        own=OWN,
        base__providers="include: [more.yaml]\n" + BASE.replace("  default: {}\n", ""),
        base__more="classes: {default: {}}",
    )
    assert policy.included == ("base/providers.yaml", "base/more.yaml")
    assert policy.classes[-1].name == "default"


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "own.yaml:2:11: cannot read 'base/providers.yaml': no such file or directory"),
        ({"base__providers": "include: [../own.yaml]\n" + BASE}, "providers.yaml:1:11: 'own.yaml' is included already"),
        ({"base__providers": ""}, "'base/providers.yaml' cannot be included: it is empty"),
        ({"base__providers": "[1, 2]"}, "'base/providers.yaml' cannot be included: it is a list, not a mapping"),
        ({"base__providers": "a: [1"}, "base/providers.yaml:1:6: not valid YAML"),
        ({"base__providers": BASE + "x: 1\n"}, "base/providers.yaml:10:1: unknown key 'x' in a policy"),
    ],
)  # fmt: skip
def test_what_cannot_be_included_is_said(files: dict[str, str], problem: str) -> None:
    found = problems_of(own=OWN, **files)
    assert any(problem in one for one in found), found


def test_two_included_files_must_not_give_the_same_name() -> None:
    own = OWN.replace("[base/providers.yaml]", "[a.yaml, b.yaml]")
    found = problems_of(own=own, a=BASE, b="targets: {big: {provider: api, model: other}}")
    assert any(
        "b.yaml:1:11: 'big' is given in a.yaml:5 too (keep one of them, or say it yourself)" in one for one in found
    )


def test_text_from_nowhere_includes_nothing() -> None:
    with pytest.raises(PolicyError, match="cannot be included here"):
        policies.load(OWN, filename="own.yaml", env={}, provider_types=TYPES)


async def test_a_router_reads_files_beside_its_policy(provider: FakeProvider, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "providers.yaml").write_text(BASE.replace("openai}", f"openai, base_url: '{provider.url}'}}"))
    (tmp_path / "policy.yaml").write_text(OWN.replace("model: mine", "model: ok"))
    async with Router.from_policy(tmp_path / "policy.yaml", env={}) as router:
        assert (await router.chat(**ASK)).target == "mini"
