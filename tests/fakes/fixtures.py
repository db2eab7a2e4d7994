"""Fixtures of the fakes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from router.chaos import FakeProvider


@pytest.fixture
def provider() -> Iterator[FakeProvider]:
    """A scripted hosted API, one a test."""
    with FakeProvider() as running:
        yield running
