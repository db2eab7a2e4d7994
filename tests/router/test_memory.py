"""What was learned is known after a restart; what cannot be used is said and nothing worse."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import Goals
from policies.predict import Predictor
from router import Router
from router.chaos import FakeProvider
from router.memory import keep_saving, recall, save
from tests.router.policies import policy_of


def router_of(provider: FakeProvider, *models: str) -> Router:
    return Router.from_text(policy_of(provider, *models), env={})


def test_what_was_learned_is_known_again(provider: FakeProvider, tmp_path: Path) -> None:
    before, path = router_of(provider, "ok", "paced"), tmp_path / "deep" / "state.json"
    rng = random.Random(0)
    for number in range(100):
        before.state["t0"].observe(number * 10, rng.uniform(0.1, 0.5), rng.choice([None, 0.02]), number % 3)
    save(before, path)
    after = router_of(provider, "ok", "ok")
    assert recall(after, path) == ["t0"], "the other is another model now, and nothing was seen of it"
    old, new = before.state["t0"].predict(700), after.state["t0"].predict(700)
    assert old is not None and new is not None
    assert (new.ttft_ms, new.tpot_ms, new.samples) == (old.ttft_ms, old.tpot_ms, old.samples)
    for goals in (Goals(300), Goals(300, 30)):
        assert new.p_meet(goals) == old.p_meet(goals)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version": 2, "targets": {}}',
        '{"version": 1, "targets": 3}',
        '{"version": 1, "targets": {"t0": {"provider": "fake", "model": "ok"}}}',
        '{"version": 1, "targets": {"t0": {"provider": "fake", "model": "ok", "learned": {"n": 5}}}}',
    ],
)
def test_a_file_that_cannot_be_used_is_a_line_in_the_log(
    provider: FakeProvider, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    router = router_of(provider, "ok")
    assert recall(router, path) == []
    assert "what was learned before is not used" in caplog.text
    assert router.state["t0"].predict(5) is None
    assert recall(router, tmp_path / "none.json") == []


async def test_it_is_written_when_the_router_stops_and_a_full_disk_stops_nobody(
    provider: FakeProvider, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    router = router_of(provider, "ok")
    router.state["t0"].observe(5, 0.1)
    for path in (tmp_path / "state.json", tmp_path / "state.json" / "below a file"):
        task = asyncio.create_task(keep_saving(router, path))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert json.loads((tmp_path / "state.json").read_text())["targets"]["t0"]["learned"]["n"] == 1
    assert "what was learned is not kept" in caplog.text
    assert [one.name for one in tmp_path.iterdir()] == ["state.json"]


@given(
    st.dictionaries(
        st.sampled_from(["n", "tpots", "ttft", "tpot", "ratios"]),
        st.recursive(
            st.one_of(st.none(), st.booleans(), st.floats(), st.integers(-5, 5), st.text(max_size=3)),
            lambda inner: st.lists(inner, max_size=10),
            max_leaves=12,
        ),
    )
)
def test_a_malformed_memory_is_refused_and_changes_nothing(saved: dict[str, Any]) -> None:
    predictor = Predictor()
    predictor.observe(10, 0.5, 0.02)
    before = predictor.saved()
    try:
        predictor.restore(saved)
    except ValueError:
        assert predictor.saved() == before
    else:
        assert predictor.predict(5) is not None
