"""The `openai` client against the gateway that `splitroute up --policy examples/gateway/policy.yaml` starts.

python examples/gateway/client.py [BASE_URL]
"""

import sys

from openai import OpenAI


def main(base_url: str) -> None:
    client = OpenAI(base_url=base_url, api_key="unused")
    question = [{"role": "user", "content": "Name three rivers."}]

    # A goal of 500 ms to the first token makes the request interactive; without one it is not.
    for name, goals in (("interactive", {"x-slo-ttft-ms": "500"}), ("no goal", {})):
        raw = client.chat.completions.with_raw_response.create(
            model="chat", messages=question, max_tokens=40, extra_headers=goals
        )
        print(f"{name}: {raw.parse().choices[0].message.content}")
        print(f"  target {raw.headers['x-splitroute-target']}")

    stream = client.chat.completions.create(
        model="chat",
        messages=question,
        max_tokens=40,
        stream=True,
        extra_headers={"x-slo-ttft-ms": "500"},
    )
    print("streamed: ", end="")
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1")
