"""What each KV codec makes of a prompt's KV, and what becomes of the answer.

Windows of 512 tokens of the project's own texts are prefilled; their KV is coded, in frames as the transfer sends them,
and put back. The 64 tokens that follow are then computed from it: along the undisturbed greedy answer (agreement of the
likeliest token, position by position, and KL divergence), freely (answers that stay the same to the end), and along
the text itself (perplexity).
"""

from __future__ import annotations

import math
import time
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

import torch

from backends.disagg.engine.engine import Engine
from backends.disagg.engine.scheduler import Chunk, Step
from backends.disagg.engine.sequence import SamplingParams, Sequence
from backends.disagg.transfer.codecs import Codec, available, decode, encode
from backends.models import load_tokenizer, resolve
from benchmarks.engines.load import Parameters
from benchmarks.engines.ours import make_engine
from benchmarks.report import progress

PROMPT = 512
ANSWER = 64
_FRAME_BLOCKS = 11
"""4 MiB of SmolLM2's KV in bfloat16, as the transfer cuts it."""


def windows(model: str, count: int) -> list[list[int]]:
    """Texts of PROMPT + ANSWER tokens each."""
    root = Path(__file__).parents[2]
    texts = [resources("router.cli").joinpath("data/two-kitchens.txt").read_text()]
    texts += [path.read_text() for path in (*sorted((root / "docs").glob("*.md")), root / "README.md")]
    tokenizer = load_tokenizer(resolve(model, pull_missing=True))
    cut = []
    for text in texts:
        ids = tokenizer.encode(text)
        cut += [ids[at : at + PROMPT + ANSWER] for at in range(0, len(ids) - PROMPT - ANSWER, 400)]
    return cut[:count]


class Judge:
    def __init__(self, model: str, count: int) -> None:
        self.engine: Engine
        self.engine, _ = make_engine(model, Parameters(), 2048)
        pool = self.engine.scheduler.pool
        self.blocks = pool.take(pool.blocks_for(PROMPT + ANSWER + 1)) or []
        self.prompt_blocks = self.blocks[: PROMPT // pool.block_size]
        self.cases = [self._undisturbed(text) for text in progress(windows(model, count), "undisturbed answers")]

    def _logits(self, tokens: list[int], start: int, end: int) -> torch.Tensor:
        """float32 [end - start, vocabulary]: after each of those tokens."""
        step = Step()
        for at in range(start, end):
            prefix = Sequence(at, tokens[: at + 1], SamplingParams(max_tokens=1), blocks=self.blocks)
            step.prefill.append(Chunk(prefix, at, 1))
        return self.engine.runner.run(step)[0]

    @torch.inference_mode()
    def _undisturbed(self, text: list[int]) -> tuple[torch.Tensor, list[int], torch.Tensor, list[int], torch.Tensor]:
        """(the prompt's KV, prompt and greedy answer, its logits, the text, its logits)."""
        prompt = Sequence(0, text[:PROMPT], SamplingParams(max_tokens=1), blocks=self.blocks)
        step = Step()
        step.prefill.append(Chunk(prompt, 0, PROMPT))
        first = self.engine.runner.run(step)[0]
        kv = self.engine.cache.save(self.prompt_blocks)
        answer = self._greedy(text[:PROMPT], int(first[-1].argmax()))
        along_answer = self._logits(answer, PROMPT, PROMPT + ANSWER)
        return kv, answer, along_answer, text, self._logits(text, PROMPT, PROMPT + ANSWER)

    def _greedy(self, prompt: list[int], first: int) -> list[int]:
        tokens = [*prompt, first]
        for _ in range(ANSWER):
            tokens.append(int(self._logits(tokens, len(tokens) - 1, len(tokens))[0].argmax()))
        return tokens

    @torch.inference_mode()
    def judge(self, codec: Codec) -> dict[str, Any]:
        agree = same = 0
        divergence = loss = plain_loss = encode_s = decode_s = 0.0
        coded = 0
        for kv, answer, reference, text, text_reference in self.cases:
            size, took, back, got = there_and_back(codec, self.engine, kv)
            coded, encode_s, decode_s = coded + size, encode_s + took, decode_s + back
            self.engine.cache.restore(self.prompt_blocks, got)
            logits = self._logits(answer, PROMPT, PROMPT + ANSWER)
            agree += int((logits.argmax(-1) == reference.argmax(-1)).sum())
            divergence += float(
                torch.nn.functional.kl_div(
                    logits.log_softmax(-1), reference.log_softmax(-1), log_target=True, reduction="sum"
                )
            )
            along_text = self._logits(text, PROMPT, PROMPT + ANSWER)[:-1]
            following = torch.tensor(text[PROMPT + 1 : PROMPT + ANSWER])
            loss += float(torch.nn.functional.cross_entropy(along_text, following))
            plain_loss += float(torch.nn.functional.cross_entropy(text_reference[:-1], following))
            same += self._greedy(answer[:PROMPT], answer[PROMPT]) == answer
        count, plain = len(self.cases), sum(kv.numel() * kv.element_size() for kv, *_ in self.cases)
        return {
            "ratio": round(plain / coded, 3),
            "encode_GB_per_s": round(plain / encode_s / 1e9, 2),
            "decode_GB_per_s": round(plain / decode_s / 1e9, 2),
            "greedy_agreement": round(agree / count / ANSWER, 4),
            "same_answers": f"{same}/{count}",
            "kl_divergence": round(divergence / count / ANSWER, 6),
            "perplexity": round(math.exp(loss / count), 4),
            "perplexity_increase": round(math.exp((loss - plain_loss) / count) - 1, 5),
        }


def there_and_back(codec: Codec, engine: Engine, kv: torch.Tensor) -> tuple[int, float, float, torch.Tensor]:
    """(coded bytes, seconds to encode, seconds to decode, the KV as it arrives)."""
    geometry, got = engine.geometry, torch.empty_like(kv)
    ours, theirs = ([row.data for row in t.view(torch.uint8).numpy().reshape(kv.shape[0], -1)] for t in (kv, got))
    size, encode_s, decode_s = 0, 0.0, 0.0
    for at in range(0, len(ours), _FRAME_BLOCKS):
        begun = time.perf_counter()
        frame = ours[at : at + _FRAME_BLOCKS]
        made = memoryview(b"".join(frame)) if codec is Codec.RAW else encode(codec, geometry, frame, first=at == 0)
        encoded = time.perf_counter()
        if made is None:
            raise RuntimeError(f"{codec.name} made this KV no smaller")
        to = theirs[at : at + _FRAME_BLOCKS]
        if codec is Codec.RAW:
            for index, block in enumerate(to):
                block[:] = made[index * len(block) : (index + 1) * len(block)]
        else:
            assert decode(codec, geometry, made, to, first=at == 0)
        size, encode_s, decode_s = (
            size + len(made),
            encode_s + encoded - begun,
            decode_s + time.perf_counter() - encoded,
        )
    return size, encode_s, decode_s, got


def run(model: str, quick: bool) -> dict[str, Any]:
    judge = Judge(model, 4 if quick else 24)
    codecs = available(judge.engine.geometry)
    return {codec.name.lower(): judge.judge(codec) for codec in progress(codecs, "codecs")}
