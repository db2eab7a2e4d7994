"""A RAG-length prompt: retrieve passages, ask with about 1,500 tokens of context, see what length changes.

    python examples/rag.py [QUESTION]

Retrieval is word overlap, weighted by rarity: enough to build a prompt of the right size from real text.
"""

import math
import re
import sys
from collections import Counter
from pathlib import Path

from router import SyncRouter

HERE = Path(__file__).parent
QUESTION = "When does the last ferry leave on a Sunday, and what does a single ticket cost?"
CONTEXT_PASSAGES = 12
"""Of about a hundred tokens each."""


def passages() -> list[str]:
    return [
        f"[{file.stem}] {' '.join(paragraph.split())}"
        for file in sorted((HERE / "data").glob("*.txt"))
        for paragraph in file.read_text().split("\n\n")[1:]
    ]


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))


def retrieve(question: str, count: int) -> list[str]:
    """The `count` passages that share the rarest words with `question`, best first."""
    texts = passages()
    seen_in = Counter(word for text in texts for word in words(text))

    def score(text: str) -> float:
        return sum(math.log(len(texts) / seen_in[word]) for word in words(text) & words(question))

    return sorted(texts, key=score, reverse=True)[:count]


def main(question: str) -> None:
    context = "\n\n".join(retrieve(question, CONTEXT_PASSAGES))
    prompts = {
        "without context": question,
        "with context": f"{context}\n\nAnswer from the passages above: {question}",
    }
    with SyncRouter.from_policy(str(HERE / "policy.yaml")) as router:
        for name, prompt in prompts.items():
            messages = [{"role": "user", "content": prompt}]
            result = router.chat(model="chat", messages=messages, ttft_ms=900, max_tokens=60, temperature=0)
            print(f"{name}: class {result.decision.class_name}, {result.usage.prompt_tokens} prompt tokens")
            print(f"  {result.decision.reason}")
            if result.transfer:
                moved = result.transfer
                print(f"  {moved.bytes:,} bytes of KV: process {moved.prefill_pid} to {moved.decode_pid}")
            print(f"  {result.text.strip()}")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or QUESTION)
