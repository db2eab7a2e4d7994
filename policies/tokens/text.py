"""Tokens of plain text, counted by what byte-pair vocabularies make tokens of.

They cut text at words, runs of punctuation, groups of up to three digits and line ends before anything else, and rare
words and other scripts into more pieces. The weight of each is a non-negative least-absolute-error fit to o200k_base
(GPT-4o and later) over 3,900 excerpts of documentation, program code, Chinese news and reviews, and mixtures of them,
none of which is in this project; scripts that these hardly have weigh what sentences in them have. How far off this
is on the project's own texts, `python -m benchmarks.policy --only tokens` tells.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Kind = Literal["text", "code", "dense"]
"""What a vocabulary's sense of economy goes by: prose, program code and markup, or scripts without spaces."""


class Estimate(NamedTuple):
    tokens: int
    kind: Kind = "text"


_RUNS = (
    (re.compile(rb"[A-Za-z]+"), 0.87),
    (re.compile(rb"[A-Za-z]{8,}"), 0.57),
    (re.compile(rb"[A-Za-z]{13,}"), 0.22),
    (re.compile(rb"[a-z][A-Z]"), 0.73),  # camelCase
    (re.compile(rb"[!-/:-@\[-`{-~]+"), 0.49),
    (re.compile(rb"[0-9]{1,3}"), 1.64),
)
_PUNCTUATION = b"!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_SCRIPTS = (
    (0xC2, 0xCE, 1.0),  # accents: they cut a word in two
    (0xCE, 0xD0, 0.38),  # Greek
    (0xD0, 0xD4, 0.28),  # Cyrillic
    (0xD4, 0xE0, 0.42),  # Hebrew, Arabic
    (0xE0, 0xE2, 0.37),  # the scripts of India, Thai
    (0xE2, 0xE3, 0.67),  # typographic signs
    (0xE3, 0xE4, 0.9),  # kana
    (0xE4, 0xEA, 0.78),  # Han
    (0xEA, 0xEE, 0.72),  # Hangul
    (0xEE, 0xF0, 0.83),  # full-width forms
    (0xF0, 0xF8, 1.5),  # emoji
)
"""Tokens of a character, by the first byte of its UTF-8."""
_BY_SCRIPT = tuple((bytes(range(low, high)), weight, 0xE3 <= low < 0xEE) for low, high, weight in _SCRIPTS)
_DENSE_SHARE = 0.15
_CODE_SHARE = 0.08

_SAMPLE = 1024
_MOST = 4 * _SAMPLE
"""Of a longer text four samples are counted, so that a long prompt costs no more than a short one."""


def text_tokens(text: str) -> Estimate:
    if len(text) <= _MOST:
        tokens, kind = _count(text)
        return Estimate(max(1, round(tokens)) if text else 0, kind)
    step = (len(text) - _SAMPLE) // 3
    sampled = "\n".join(text[at : at + _SAMPLE] for at in range(0, 3 * step + 1, step))
    tokens, kind = _count(sampled)
    return Estimate(round(tokens * len(text) / len(sampled)), kind)


def _count(text: str) -> tuple[float, Kind]:
    data = text.encode("utf-8", "replace")
    tokens = sum([weight * len(run.findall(data)) for run, weight in _RUNS])
    punctuation = _among(data, _PUNCTUATION)
    tokens += 0.2 * punctuation + 0.69 * data.count(b"\n") + 0.5 * data.count(b"\n ")
    dense = 0
    if len(data) > len(text):
        for leads, weight, is_dense in _BY_SCRIPT:
            characters = _among(data, leads)
            tokens += weight * characters
            dense += characters * is_dense
    if dense > _DENSE_SHARE * len(text):
        return tokens, "dense"
    return tokens, "code" if punctuation > _CODE_SHARE * len(text) else "text"


def _among(data: bytes, these: bytes) -> int:
    return len(data) - len(data.translate(None, these))
