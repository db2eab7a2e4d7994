"""`splitroute policy simulate` and `diff`: figures for people and for programs, and mistakes with a remedy."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.cli.serving import COMMAND

POLICY = """\
version: 1
providers:
  api: {type: openai, base_url: "http://127.0.0.1:9/v1"}
targets:
  mini: {provider: api, model: m, price: {input: 1, output: 2}, speed: {ttft_ms: 400, tpot_ms: 10, spread: 0.1}}
  large: {provider: api, model: l, price: {input: 9, output: 9}, expect: {ttft_ms: 200}}
classes:
  long: {when: {prompt_tokens: {gte: 1000}}}
  default: {}
routes:
  chat:
    - {when: {class: long}, candidates: [large], choose: in-order}
    - {candidates: [mini, large], choose: in-order}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "old.yaml").write_text(POLICY)
    (tmp_path / "new.yaml").write_text(POLICY.replace("gte: 1000", "gte: 2000"))
    rows = [f"2023-11-16 18:17:{number:02}.0000000,{number * 50},20" for number in range(60)]
    (tmp_path / "trace.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    return tmp_path


def policy(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [COMMAND, "policy", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=folder)


def test_a_simulation_says_who_is_served_how_fast_by_whom(folder: Path) -> None:
    shown = policy(folder, "simulate", "old.yaml", "trace.csv", "--ttft-ms", "300")
    assert shown.returncode == 0, shown.stderr
    assert "60 requests in 59 s" in shown.stdout
    assert "mini" in shown.stdout and "behaviour declared" in shown.stdout and "behaviour expected" in shown.stdout
    as_json = policy(folder, "simulate", "old.yaml", "trace.csv", "--ttft-ms", "300", "--json")
    found = json.loads(as_json.stdout)
    assert found["classes"]["long"]["targets"] == {"large": 1.0} and found["classes"]["long"]["requests"] == 40
    assert found["total"]["targets"]["mini"] == pytest.approx(1 / 3)
    assert found["classes"]["default"]["attainment"] < 0.1, "mini takes 400 ms"
    again = policy(folder, "simulate", "old.yaml", "trace.csv", "--ttft-ms", "300", "--json")
    assert again.stdout == as_json.stdout


def test_a_limit_and_a_pace(folder: Path) -> None:
    found = json.loads(
        policy(folder, "simulate", "old.yaml", "trace.csv", "--limit", "11", "--pace", "2", "--json").stdout
    )
    assert found["total"]["requests"] == 11 and found["seconds"] == pytest.approx(5)


def test_a_diff_says_what_changes_and_for_whom(folder: Path) -> None:
    shown = policy(folder, "diff", "old.yaml", "new.yaml", "trace.csv")
    assert shown.returncode == 0, shown.stderr
    assert "20 of 60 requests are decided otherwise" in shown.stdout
    assert "long → default" in shown.stdout and "goals met" in shown.stdout
    found = json.loads(policy(folder, "diff", "old.yaml", "new.yaml", "trace.csv", "--json").stdout)
    assert found["moves"] == [
        {"old_class": "long", "new_class": "default", "old_target": "large", "new_target": "mini", "requests": 20}
    ]
    assert found["new"]["total"]["cost_usd"] < found["old"]["total"]["cost_usd"]
    same = policy(folder, "diff", "old.yaml", "old.yaml", "trace.csv")
    assert "0 of 60 requests are decided otherwise" in same.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("simulate", "old.yaml", "old.yaml"), "no column 'TIMESTAMP'"),
        (("simulate", "old.yaml", "nowhere.csv"), "nowhere.csv"),
        (("simulate", "old.yaml", "trace.csv", "--route", "talk"), "has no route 'talk'; there are chat"),
        (("simulate", "old.yaml", "trace.csv", "--pace", "0"), "must be above 0"),
        (("diff", "old.yaml", "trace.csv", "trace.csv"), "trace.csv:"),
    ],
)
def test_mistakes_are_one_message_and_no_traceback(folder: Path, words: tuple[str, ...], said: str) -> None:
    failed = policy(folder, *words)
    assert failed.returncode == 1
    assert said in failed.stderr and "Traceback" not in failed.stderr
