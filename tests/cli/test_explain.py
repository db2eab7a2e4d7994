"""`splitroute explain` and `policy check`: a decision is shown with its reasons, and nothing is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from router.cli import main

POLICY = """\
version: 1
providers: {api: {type: openai, api_key: sk-secret}}
targets:
  big: {provider: api, model: b, context: 1000, price: {input: 1, output: 2}}
  small: {provider: api, model: s, context: 100}
routes:
  chat: [{candidates: [small, big], choose: in-order}]
checks:
  - {request: {model: chat, prompt_tokens: 500}, expect: {target: big}}
"""


@pytest.fixture
def policy(tmp_path: Path) -> str:
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY)
    return str(file)


def test_every_candidate_has_its_reason(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--policy", policy, "--model", "chat", "--prompt-tokens", "500", "--json"]) == 0
    decision = json.loads(capsys.readouterr().out)
    assert (decision["route"], decision["class"], decision["order"]) == ("chat", "default", ["big"])
    small, big = decision["candidates"]
    assert not small["kept"] and "exceed its context of 100" in small["reason"]
    assert big["kept"] and big["cost_usd"] > 0
    assert main(["explain", "--policy", policy, "--model", "chat", "--prompt-tokens", "500"]) == 0
    assert "exceed its context of 100" in capsys.readouterr().out


def test_a_request_that_nobody_can_take_is_shown_and_fails(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--policy", policy, "--model", "chat", "--prompt-tokens", "5000"]) == 1
    shown = capsys.readouterr().out
    assert "no candidate can take the request" in shown and "exceed its context of 1000" in shown


def test_an_unknown_model_is_one_message(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--policy", policy, "--model", "chatt", "--prompt-tokens", "5"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("splitroute: no route for model 'chatt' (did you mean 'chat'?)")
    assert "--model" in said.splitlines()[1]


def test_checks_are_counted_and_a_failed_one_is_shown(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "check", policy]) == 0
    assert "checks: 1 passed, 0 failed" in capsys.readouterr().out
    Path(policy).write_text(POLICY.replace("expect: {target: big}", "expect: {target: small}"))
    assert main(["policy", "check", policy]) == 1
    shown = capsys.readouterr()
    assert f"{policy}:9: expected target 'small', got target 'big'" in shown.err
    assert "sk-secret" not in shown.out + shown.err
