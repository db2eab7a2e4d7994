"""Answers that must have a form: which tokens may come next, by llguidance (Rust, Earley parser and lexer in one).

The rest of the engine knows a grammar by three words: `mask`, `advance`, `finished`.
"""

from __future__ import annotations

from collections.abc import Iterable

import llguidance
import numpy as np
import torch


class GrammarError(ValueError):
    """A grammar that cannot be compiled; the message is for who wrote it."""


class Grammar:
    """One answer's place in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def mask(self, vocabulary: int) -> torch.Tensor:
        """bool [vocabulary]: the tokens that may come next."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, count=min(vocabulary, len(bits) * 8), bitorder="little").astype(bool)
        return torch.from_numpy(np.pad(allowed, (0, vocabulary - len(allowed))))

    def advance(self, token: int) -> None:
        """`token` has been said."""
        self._matcher.consume_token(token)

    @property
    def finished(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_stopped()

    @property
    def error(self) -> str:
        """Why the answer cannot go on, where the parser gave up; else empty."""
        return self._matcher.get_error().partition("\n")[0]


class Grammars:
    """Compiles grammars for one vocabulary."""

    def __init__(self, tokenizer_json: str, vocabulary: int, eos_token_ids: Iterable[int]) -> None:
        ends = sorted(eos_token_ids)
        self._tokenizer = llguidance.LLTokenizer(tokenizer_json, n_vocab=vocabulary, eos_token=ends or None)

    def compile(self, grammar: str) -> Grammar:
        """Raises GrammarError."""
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(matcher.get_error().partition("\n")[0])
        return Grammar(matcher)
