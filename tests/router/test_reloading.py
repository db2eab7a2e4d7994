"""A policy changes while requests are under way: they keep theirs, and a bad one changes nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from backends.base import BackendError
from router import Router, reloading
from router.chaos import TEXT, FakeProvider
from router.cli.policy import load
from router.reloading import follow
from tests.router.policies import ASK, policy_of


async def text_of(router: Router) -> str:
    return "".join([event.text or "" async for event in router.stream(**ASK)])


def policy_file(folder: Path, text: str) -> Path:
    path = folder / "policy.yaml"
    path.write_text(text)
    return path


@asynccontextmanager
async def following(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Router, Path]]:
    monkeypatch.setattr(reloading, "LOOK_EVERY_S", 0.05)
    path = policy_file(folder, text)
    async with Router(load(str(path))) as router:
        task = asyncio.create_task(follow(router, path, lambda: load(str(path))))
        await asyncio.sleep(0)
        yield router, path
        task.cancel()


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(200):
        if holds():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("not within 4 s")


async def test_requests_under_way_keep_their_policy_and_the_next_one_has_the_new(provider: FakeProvider) -> None:
    async with Router.from_text(policy_of(provider, "paced:100"), env={}) as router:
        before = router.backends["fake"]
        speaking = asyncio.create_task(text_of(router))
        await until(lambda: bool(provider.requests))
        changed = policy_of(provider, "ok").replace("  fake:", "  other:").replace("provider: fake", "provider: other")
        await router.use(Router.from_text(changed, env={}).policy)
        assert list(router.backends) == ["other"]
        assert await text_of(router) == TEXT
        assert not speaking.done(), "the first is still answered by what it began with"
        assert await speaking == TEXT
        await until(lambda: not router._retiring)
        assert before._client is None, "its connections are closed"  # type: ignore[attr-defined]


async def test_what_is_the_same_stays_and_so_does_what_was_observed_of_it(provider: FakeProvider) -> None:
    async with Router.from_text(policy_of(provider, "ok", "paced"), env={}) as router:
        await text_of(router)
        backend, known = router.backends["fake"], router._executor.state["t0"]
        assert known.predict(5) is not None
        await router.use(Router.from_text(policy_of(provider, "ok", "ok", retries=1), env={}).policy)
        assert router.backends["fake"] is backend, "no connection is lost"
        assert router._executor.state["t0"] is known
        assert router._executor.state["t1"].predict(5) is None, "that is another model now"


async def test_a_file_that_changes_is_taken_and_a_bad_one_is_not(
    provider: FakeProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(tmp_path, policy_of(provider, "ok"), monkeypatch) as (router, path):
        path.write_text(policy_of(provider, "ok").replace("  chat:", "  talk:"))
        await until(lambda: "talk" in router.policy.routes)
        assert router.reloading.reloads == 1 and router.reloading.error is None
        path.write_text(policy_of(provider, "ok").replace("choose: in-order", "choose: in-ordr"))
        await until(lambda: router.reloading.error is not None)
        assert "did you mean 'in-order'?" in str(router.reloading.error)
        assert "sk-very-secret-key" not in str(router.reloading.error)
        assert "talk" in router.policy.routes, "the old one stays"
        path.unlink()
        await asyncio.sleep(0.2)
        assert "talk" in router.policy.routes
        path.write_text(policy_of(provider, "ok"))
        await until(lambda: router.reloading.error is None)
        assert await text_of(router) == TEXT


async def test_a_link_pointed_elsewhere_and_a_signal_are_noticed(
    provider: FakeProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes mounts its config maps so."""
    async with following(tmp_path, policy_of(provider, "ok"), monkeypatch) as (router, path):
        other = tmp_path / "other.yaml"
        other.write_text(policy_of(provider, "ok").replace("  chat:", "  talk:"))
        link = tmp_path / "link"
        link.symlink_to(other)
        os.replace(link, path)
        await until(lambda: "talk" in router.policy.routes)
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: router.reloading.reloads == 2)


async def test_a_policy_whose_providers_do_not_start_changes_nothing(provider: FakeProvider) -> None:
    async with Router.from_text(policy_of(provider, "ok"), env={}) as router:
        broken = (
            policy_of(provider, "ok")
            .replace("  fake:", "  own: {type: disagg, model: ./nowhere.gguf}\n  fake:")
            .replace("routes:", "  tiny: {provider: own}\nroutes:")
            .replace("[t0]", "[t0, tiny]")
        )
        with pytest.raises(BackendError, match=r"nowhere\.gguf"):
            await router.use(Router.from_text(broken, env={}).policy)
        assert set(router.policy.targets) == {"t0"}
        assert await text_of(router) == TEXT
