"""The SDK in a script: ask, stream, and explain without asking.

    python examples/sdk.py [POLICY]

The policy starts the bundled cluster in processes of its own; they end with the `async with` block.
"""

import asyncio
import sys
from pathlib import Path

from router import Router

POLICY = Path(__file__).with_name("policy.yaml")


async def main(policy: str) -> None:
    async with Router.from_policy(policy) as router:
        question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]

        result = await router.chat(model="chat", messages=question, ttft_ms=500, max_tokens=40, temperature=0)
        print(f"answer: {result.text}")
        print(f"from:   {result.target}, because {result.decision.reason}")

        print("stream: ", end="")
        async for event in router.stream(model="chat", messages=question, max_tokens=40, temperature=0):
            print(event.text or "", end="", flush=True)
        print()

        decision = await router.explain(model="chat", messages=question, ttft_ms=500)
        for candidate in decision.candidates:
            kept = "kept" if candidate.kept else "dropped"
            print(f"explain: {candidate.target} {kept}: {candidate.reason}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else str(POLICY)))
