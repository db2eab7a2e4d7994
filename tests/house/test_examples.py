"""Every example runs as it stands, against the real cluster and, where it names a hosted API, a scripted one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from backends.models import ModelFiles
from router.chaos import FakeProvider
from tests.cli.serving import COMMAND, up

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

pytestmark = [pytest.mark.model, pytest.mark.slow]


def run(*arguments: str, env: dict[str, str] | None = None) -> str:
    ran = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, **(env or {})},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_sdk_script(smollm2: ModelFiles) -> None:
    said = run("examples/sdk.py")
    assert "Paris" in said.split("from:")[0]
    assert "from:   tiny, because" in said
    streamed = next(line for line in said.splitlines() if line.startswith("stream: "))
    assert "Paris" in streamed
    assert "explain: tiny kept: " in said


def test_the_rag_length_prompt(smollm2: ModelFiles) -> None:
    said = run("examples/rag.py")
    assert "without context: class interactive" in said
    assert "with context: class long" in said
    assert said.count("bytes of KV: process") == 2


def test_the_gateway_policy_and_its_client(smollm2: ModelFiles) -> None:
    with FakeProvider() as provider:
        provider.alias = "ok"
        env = {"HOSTED_URL": provider.url, "HOSTED_API_KEY": "sk-not-a-real-key"}
        with up("--policy", "examples/gateway/policy.yaml", env={**os.environ, **env}) as gateway:
            said = run("examples/gateway/client.py", f"{gateway.url}/v1")
            picture = {"type": "image_url", "image_url": {"url": "https://example.com/x.png"}}
            seen = httpx.post(
                f"{gateway.url}/v1/chat/completions",
                json={"model": "chat", "messages": [{"role": "user", "content": [picture]}]},
                headers={"x-slo-ttft-ms": "500"},
                timeout=60,
            )
        assert "interactive: " in said and "target tiny" in said
        assert "no goal: One two three" in said and "target mini" in said
        assert "streamed: " in said
        # The cluster reads no pictures, and so is not asked: the route's other candidate is.
        assert (seen.status_code, seen.headers["x-splitroute-target"]) == (200, "mini"), seen.text
        assert seen.headers["x-splitroute-attempts"] == "1"
        assert "sk-not-a-real-key" not in "".join(gateway.output)


@pytest.mark.parametrize("policy", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_policy_passes_its_own_checks(policy: Path) -> None:
    env = {**os.environ, "HOSTED_URL": "http://127.0.0.1:9/v1", "HOSTED_API_KEY": "k"}
    checked = subprocess.run([COMMAND, "policy", "check", str(policy)], capture_output=True, text=True, env=env)
    assert checked.returncode == 0, checked.stderr
    assert " 0 failed" in checked.stdout and "checks: 0 passed" not in checked.stdout


def test_every_example_is_run_by_a_test() -> None:
    scripts = {str(path.relative_to(ROOT)) for path in EXAMPLES.rglob("*.py")}
    assert scripts == {"examples/sdk.py", "examples/rag.py", "examples/gateway/client.py"}
