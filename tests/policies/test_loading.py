"""A policy is used as it is written, or refused with everything that is wrong in it."""

from __future__ import annotations

import contextlib
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, SecretStr

import policies
from policies import Policy, PolicyError


class Hosted(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    base_url: str = "https://example.com"
    api_key: SecretStr | None = None
    headers: dict[str, str] = Field(default_factory=dict)


class Own(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    model: str
    decode: int = Field(1, ge=1)
    transport: Literal["shm", "tcp"] = "shm"


TYPES: dict[str, type[BaseModel]] = {"openai": Hosted, "disagg": Own}

POLICY = """\
version: 1
providers:
  openai: {type: openai, api_key: "${KEY}"}
  own: {type: disagg, model: tiny-llm}
targets:
  mini: {provider: openai, model: gpt, context: 1000, price: {input: 0.15, output: 0.60}}
  tiny: {provider: own, expect: {ttft_ms: 300}}
classes:
  interactive: {when: {ttft_ms: {lte: 500}}}
  default: {}
routes:
  chat:
    - {when: {class: interactive}, candidates: [tiny, mini], choose: cheapest-meeting-slo, slo: {ttft_ms: 500, at: p95}}
    - {candidates: [mini, tiny], choose: in-order}
resilience: {retries: 1, deadline_ms: 5000}
checks:
  - {request: {model: chat, prompt_tokens: 60}, expect: {target: mini, class: default}}
"""


def load(text: str, **env: str) -> Policy:
    return policies.load(text, filename="p.yaml", env={"KEY": "sk-secret", **env}, provider_types=TYPES)


def problems_of(text: str, **env: str) -> list[str]:
    with pytest.raises(PolicyError) as refused:
        load(text, **env)
    assert "sk-secret" not in str(refused.value)
    return [str(problem) for problem in refused.value.problems]


def test_everything_that_is_written_is_read() -> None:
    policy = load(POLICY)
    assert policy.providers["openai"].type == "openai"
    options = policy.providers["openai"].options
    assert isinstance(options, Hosted) and options.api_key is not None
    assert options.api_key.get_secret_value() == "sk-secret"
    mini, tiny = policy.targets["mini"], policy.targets["tiny"]
    assert (mini.model, mini.context) == ("gpt", 1000)
    assert mini.price is not None and (mini.price.input, mini.price.output) == (0.15, 0.6)
    assert tiny.model == "tiny-llm", "the provider's own model, where the target names none"
    assert tiny.price is not None and tiny.price.input == 0, "own hardware without a price costs nothing"
    assert tiny.expect.ttft_ms == 300
    assert [one.name for one in policy.classes] == ["interactive", "default"]
    first, last = policy.routes["chat"]
    assert first.slo is not None and (first.slo.goals.ttft_ms, first.slo.at) == (500, 0.95)
    assert (first.line, last.line) == (13, 14)
    assert last.candidates == ("mini", "tiny") and not last.when
    assert (policy.resilience.retries, policy.resilience.deadline_ms) == (1, 5000)
    assert policy.resilience.idle_timeout_ms == 10000
    assert policies.check(policy) == ()


def test_without_classes_every_request_is_default() -> None:
    text = POLICY.replace("classes:\n  interactive: {when: {ttft_ms: {lte: 500}}}\n  default: {}\n", "")
    text = text.replace("{when: {class: interactive}, ", "{when: {ttft_ms: {lte: 500}}, ")
    assert [one.name for one in load(text).classes] == ["default"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("version: 1", "version: 2"), "p.yaml:1:10: 'version' must be 1, not 2"),
        (("version: 1\n", ""), "p.yaml:1:1: the policy has no 'version' (add version: 1)"),
        (("version: 1", "versoin: 1"), "unknown key 'versoin' in a policy (did you mean 'version'?)"),
        (("[mini, tiny]", "[mini, tiyn]"), "p.yaml:14:27: unknown target 'tiyn' (did you mean 'tiny'?)"),
        (("provider: own,", "provider: won,"), "p.yaml:7:20: unknown provider 'won' (did you mean 'own'?)"),
        (("type: disagg", "type: disag"), "p.yaml:4:15: unknown provider type 'disag' (did you mean 'disagg'?)"),
        (("type: disagg, ", ""), "provider 'own' has no 'type' (known: openai, disagg)"),
        ((", model: tiny-llm", ""), "provider 'own' has no 'model', which its type needs"),
        (("tiny-llm}", "tiny-llm, decoed: 1}"), "unknown key 'decoed' in provider 'own' (did you mean 'decode'?)"),
        (("tiny-llm}", "tiny-llm, decode: 0}"), "'decode' of provider 'own': input should be greater than or equal to 1, not 0"),
        (("tiny-llm}", "tiny-llm, transport: udp}"), "'transport' of provider 'own'"),
        (("provider: openai, model: gpt,", "provider: openai,"), "target 'mini' has no 'model'"),
        (("context: 1000", "context: many"), "'context' of target 'mini' must be a whole number of at least 1, not 'many'"),
        (("context: 1000", "context: true"), "'context' of target 'mini' must be a whole number of at least 1, not true"),
        (("context: 1000", "contxt: 1000"), "unknown key 'contxt' in target 'mini' (did you mean 'context'?)"),
        (("output: 0.60", "outptu: 0.60"), "unknown key 'outptu'"),
        (("output: 0.60", "output: -1"), "must be a number of at least 0, not -1"),
        (("expect: {ttft_ms: 300}", "expect: {}"), "'expect' of target 'tiny' is empty"),
        (("{when: {class: interactive}", "{when: {class: interactiv}"), "unknown class 'interactiv'"),
        (("{lte: 500}}}", "{lte: 500, gte: 600}}}"), "the condition on 'ttft_ms' can never hold"),
        (("{lte: 500}}}", "{less: 500}}}"), "unknown key 'less' in the condition on 'ttft_ms'"),
        (("ttft_ms: {lte", "ttft: {lte"), "unknown key 'ttft' in 'when' of class 'interactive' (did you mean 'ttft_ms'?)"),
        (("  default: {}\n", ""), "the last class must take every request that is left"),
        (("  interactive: {when: {ttft_ms: {lte: 500}}}\n  default: {}\n", "  default: {}\n  interactive: {when: {stream: true}}\n"), "class 'interactive' is never reached"),
        (("choose: in-order", "choose: inorder"), "unknown way to choose 'inorder' (did you mean 'in-order'?)"),
        ((", choose: in-order", ""), "has no 'choose' (known: in-order, cheapest-meeting-slo, "),
        (("candidates: [mini, tiny], ", ""), "has no 'candidates'"),
        (("[mini, tiny]", "[]"), "is empty (name a target)"),
        (("[mini, tiny]", "[mini, mini]"), "'mini' is a candidate twice"),
        (("[mini, tiny]", "mini"), "must be a list, not 'mini'"),
        (("    - {candidates: [mini, tiny], choose: in-order}\n", ""), "the last rule of route 'chat' must take every request"),
        (("at: p95", "at: p100"), "'at' must be a share such as p90 or 0.9, not 'p100'"),
        (("at: p95", "at: 95"), "'at' must be a share"),
        (("ttft_ms: 500, at", "ttft_ms: 0, at"), "'ttft_ms' must be a number above 0, not 0"),
        (("retries: 1", "retires: 1"), "unknown key 'retires' in 'resilience' (did you mean 'retries'?)"),
        (("retries: 1", "retries: -1"), "'retries' must be a whole number of at least 0, not -1"),
        (("deadline_ms: 5000", "deadline_ms: 5s"), "'deadline_ms' must be a whole number of at least 1, not '5s'"),
        (("deadline_ms: 5000", "after_commit: resume"), "unknown 'after_commit' 'resume'"),
        (("expect: {target: mini,", "expect: {target: mnii,"), "unknown target 'mnii' (did you mean 'mini'?)"),
        (("model: chat, prompt_tokens: 60", "model: chat"), "'request' of a check has no 'prompt_tokens'"),
        (("${KEY}", "${NOPE}"), "environment variable NOPE is not set or empty"),
        (("retries: 1,", "retries: 1, retries: 2,"), "duplicate key 'retries'"),
        (("version: 1", "version: !!int 1\nx: !python/object:os.system y"), "is not part of the policy language"),
        (("version: 1", "\tversion: 1"), "not valid YAML"),
        (("version: 1", "[1]"), "not valid YAML"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_place_and_remedy(change: tuple[str, str], problem: str) -> None:
    assert change[0] in POLICY
    found = problems_of(POLICY.replace(*change))
    assert any(problem in one for one in found), found


def test_all_mistakes_are_reported_at_once() -> None:
    text = (
        POLICY.replace("[mini, tiny]", "[mini, tiyn]").replace("retries: 1", "retires: 1").replace("at: p95", "at: x")
    )
    assert len(problems_of(text)) == 3


def test_one_mistake_is_reported_once() -> None:
    """What hangs on a broken provider or condition is not reported too."""
    assert len(problems_of(POLICY.replace("type: disagg", "type: disag"))) == 1
    assert len(problems_of(POLICY.replace("{lte: 500}", "{less: 500}"))) == 1
    assert len(problems_of(POLICY.replace("${KEY}", "${NOPE}"))) == 1


def test_an_unreachable_rule_is_a_mistake() -> None:
    text = POLICY + "\n"
    text = text.replace(
        "    - {candidates: [mini, tiny], choose: in-order}\n",
        "    - {candidates: [mini], choose: in-order}\n    - {candidates: [tiny], choose: in-order}\n",
    )
    assert any("is never reached: the one in line 14 takes every request" in one for one in problems_of(text))


@pytest.mark.parametrize("text", ["", "# nothing", "5", "- a", "version: 1\n---\nversion: 1"])
def test_what_is_no_policy_is_said(text: str) -> None:
    assert problems_of(text)


def test_secrets_never_show(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load(POLICY)
    assert "sk-secret" not in repr(policy)
    assert problems_of(POLICY.replace('api_key: "${KEY}"', 'api_key: ["${KEY}"]'))
    assert problems_of(POLICY.replace('api_key: "${KEY}"', 'headers: {a: ["${KEY}"]}'))
    assert problems_of(POLICY.replace("provider: openai", 'provider: "${KEY}"'))
    assert problems_of(POLICY.replace("context: 1000", 'context: "${KEY}"'))
    literal = problems_of(POLICY.replace('api_key: "${KEY}"', "api_key: {x: sk-literal}"))
    assert "sk-literal" not in str(literal)


def test_a_variable_may_have_a_default_and_be_a_number() -> None:
    policy = load(POLICY.replace("context: 1000", "context: ${LIMIT:-2000}"))
    assert policy.targets["mini"].context == 2000
    assert load(POLICY.replace("context: 1000", "context: ${LIMIT}"), LIMIT="3000").targets["mini"].context == 3000


@settings(deadline=None, max_examples=150)
@given(text=st.text(alphabet="ab:-{}[]\n #&*!|>'\"%@`,?0123.${}\t", max_size=80))
def test_any_text_is_a_policy_or_a_policy_error(text: str) -> None:
    with contextlib.suppress(PolicyError):
        load(text)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_any_edit_of_a_policy_is_a_policy_or_a_policy_error(data: st.DataObject) -> None:
    text = POLICY
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 6))
        text = text[:at] + data.draw(st.text(alphabet="a1:-{}[] \n,&*'\"", max_size=3)) + text[at + cut :]
    try:
        policy = load(text)
    except PolicyError as error:
        assert error.problems
        assert all(problem.line >= 1 and problem.column >= 1 for problem in error.problems)
        return
    assert policy.routes and all(not rules[-1].when for rules in policy.routes.values())


@pytest.mark.parametrize("name", policies.PRESETS)
def test_presets_load_and_pass_their_own_checks(name: str) -> None:
    from backends.options import PROVIDER_OPTIONS

    env = {"SPLITROUTE_DEMO_URL": "http://127.0.0.1:1/v1", "OPENAI_API_KEY": "k"}
    policy = policies.load(policies.preset(name), filename=name, env=env, provider_types=PROVIDER_OPTIONS)
    assert policy.checks
    assert policies.check(policy) == ()


def test_an_unknown_preset_suggests_one() -> None:
    with pytest.raises(ValueError, match="did you mean 'local'"):
        policies.preset("locla")
