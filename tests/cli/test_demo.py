"""`splitroute demo`: what `make run` shows."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from backends.base import KVTransfer
from backends.models import ModelFiles
from router.cli.demo_report import Row, missing_handover
from tests.cli.serving import COMMAND

pytestmark = pytest.mark.model


@pytest.mark.slow
def test_three_requests_take_three_routes(smollm2: ModelFiles, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    ran = subprocess.run([COMMAND, "demo", "--json", str(file)], capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    short, long, hosted = json.loads(file.read_text())["requests"]
    assert (short["class"], short["target"]) == ("interactive", "own")
    assert (long["class"], long["target"]) == ("long", "own")
    assert (hosted["class"], hosted["target"], hosted["kv_bytes"]) == ("default", "hosted", 0)
    assert 1400 <= long["prompt_tokens"] <= 1600
    assert long["kv_bytes"] > 0 and long["kv_ms"] > 0
    assert long["kv"]["prefill_pid"] != long["kv"]["decode_pid"]
    assert f"{long['kv_bytes']:,}" in ran.stdout
    assert f"{long['kv']['prefill_pid']} → {long['kv']['decode_pid']}" in ran.stdout
    for row in (short, long, hosted):
        assert row["ttft_ms"] > 0 and row["completion_tokens"] > 0 and row["why"]
    assert "stands in for a hosted API" in ran.stdout
    assert "Traceback" not in ran.stderr


def test_a_folder_that_is_not_there_is_said_before_anything_starts() -> None:
    ran = subprocess.run([COMMAND, "demo", "--json", "/nowhere/x.json"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert "--json /nowhere/x.json: no such folder" in ran.stderr


def row(transfer: KVTransfer | None) -> Row:
    return Row("long", "long", "own", "cluster", "why", 1500, 3, 1.0, 1.0, transfer)


def moved(size: int, prefill: int, decode: int) -> KVTransfer:
    return KVTransfer("prefill-0", "decode-0", "shm", "raw", size, prefill, decode, 0.0, 0.0, 0.0, 0.0, 0.0)


def test_the_demo_fails_where_nothing_was_handed_over() -> None:
    assert missing_handover(row(moved(100, 1, 2))) is None
    assert "without a KV hand-over" in (missing_handover(row(None)) or "")
    assert "no bytes" in (missing_handover(row(moved(0, 1, 2))) or "")
    assert "one process, 5" in (missing_handover(row(moved(100, 5, 5))) or "")
