"""The demo's hosted API, by the real client."""

from __future__ import annotations

import openai
import pytest

from router.demo_provider import MODEL, DemoProvider


async def test_the_real_client_gets_answers_that_say_what_they_are() -> None:
    provider = DemoProvider()
    client = openai.AsyncOpenAI(base_url=await provider.start(), api_key="unused")
    whole = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hello"}])
    text = whole.choices[0].message.content or ""
    assert "demo provider" in text and "stands in for a hosted API" in text
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    completion = await client.completions.create(model=MODEL, prompt="Once", max_tokens=3)
    assert completion.choices[0].text == "This answer comes"
    assert completion.choices[0].finish_reason == "length"
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model=MODEL, input="x")
    await client.close()
    await provider.aclose()
    await provider.aclose()
