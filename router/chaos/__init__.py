"""A provider that fails in every way there is, for tests of routing policies: `splitroute chaos`, and our own tests."""

from router.chaos.provider import FakeProvider
from router.chaos.scripts import CALLS, SCRIPTS, TEXT, WORDS, Seen, model_for_words

__all__ = ["CALLS", "SCRIPTS", "TEXT", "WORDS", "FakeProvider", "Seen", "model_for_words"]
