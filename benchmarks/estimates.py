"""How far estimates of prompt lengths are from what tokenizers count, on the project's own texts."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backends.hosted.counting import ENCODINGS, TokenizerMissing, litellm_tables, text_counter
from benchmarks.report import percentile
from policies.tokens import Calibration, Estimate
from policies.tokens.text import text_tokens

_HERE = Path(__file__).parent
_ROOT = _HERE.parent
_REPORTS = 30
"""Answers whose usage has been seen, where an estimate is corrected by it."""

Count = Callable[[str], int]


def _texts() -> dict[str, list[str]]:
    """Files of each kind: as they are in the project, of which nothing went into the estimate's weights."""
    return {
        "english": [path.read_text() for path in [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]],
        "code": [path.read_text() for path in sorted(_ROOT.glob("backends/**/*.py")) if path.stat().st_size > 4000],
        "chinese": [(_HERE / "texts" / "chinese.txt").read_text()],
        "mixed": [(_HERE / "texts" / "mixed.txt").read_text()],
    }


def _excerpts(texts: list[str], count: int) -> list[str]:
    rng, found = random.Random(0), []
    for _ in range(count):
        text = rng.choice(texts)
        length = rng.randint(300, max(600, min(3000, len(text) // 3)))
        at = rng.randrange(len(text) - length + 1)
        found.append(text[at : at + length])
    return found


def _counters() -> dict[str, Count]:
    from backends.models import load_tokenizer, resolve

    smol = load_tokenizer(resolve("smollm2-135m", pull_missing=True))
    counters: dict[str, Count] = {"SmolLM2": lambda text: len(smol.encode(text))}
    names = {name: name for name in ENCODINGS}
    if (tables := litellm_tables()) is not None:
        names |= {
            "Claude 2": str(tables / "anthropic_tokenizer.json"),
            "DeepSeek": str(tables / "deepseek_tokenizer.json"),
        }
    for name, tokenizer in names.items():
        try:
            counters[name] = text_counter(tokenizer)
        except TokenizerMissing as missing:
            print(f"{name} is left out: {missing}")
    return counters


def _errors(excerpts: list[str], count: Count) -> tuple[list[float], list[float]]:
    """Relative errors of estimates as they are, and of corrected ones."""
    calibration, plain, corrected = Calibration(), [], []
    for number, excerpt in enumerate(excerpts):
        estimate, counted = text_tokens(excerpt), count(excerpt)
        if number >= _REPORTS:
            plain.append(abs(estimate.tokens / counted - 1))
            corrected.append(abs(calibration.corrected(estimate) / counted - 1))
        calibration.learn(Estimate(estimate.tokens, estimate.kind), counted)
    return plain, corrected


def run_tokens(quick: bool) -> dict[str, Any]:
    count = 60 if quick else 200
    results: dict[str, Any] = {}
    texts = {kind: _excerpts(found, count) for kind, found in _texts().items()}
    for name, counter in _counters().items():
        for kind, excerpts in texts.items():
            plain, corrected = _errors(excerpts, counter)
            results[f"{name}, {kind}"] = {
                "p50": round(percentile(plain, 0.5), 3),
                "p90": round(percentile(plain, 0.9), 3),
                "corrected_p50": round(percentile(corrected, 0.5), 3),
                "corrected_p90": round(percentile(corrected, 0.9), 3),
            }
    return results
