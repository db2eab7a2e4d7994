"""`splitroute chaos`, as somebody uses it who wants to know what a policy does on a bad day."""

from __future__ import annotations

import socket
import subprocess

import openai
import pytest

from router.chaos import SCRIPTS, TEXT
from tests.cli.serving import COMMAND, chaos


def test_it_serves_its_scripts_to_a_real_client_and_lists_them() -> None:
    with chaos() as provider:
        client = openai.OpenAI(base_url=provider.url, api_key="unused", max_retries=0)
        assert [model.id for model in client.models.list()] == list(SCRIPTS)
        messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
        answer = client.chat.completions.create(model="ok", messages=messages)
        assert answer.choices[0].message.content == TEXT
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="once:503", messages=messages)
        assert client.chat.completions.create(model="once:503", messages=messages).choices
        with pytest.raises(openai.NotFoundError, match="known: ok"):
            client.chat.completions.create(model="nope", messages=messages)
        client.close()
        provider.process.terminate()
        assert provider.process.wait(10) == 0


def test_every_script_says_what_it_does() -> None:
    listed = subprocess.run([COMMAND, "chaos", "--list"], capture_output=True, text=True, timeout=60)
    assert listed.returncode == 0 and all(f" {name} " in listed.stdout for name in SCRIPTS)
    assert all(len(row.split("│")[2].split()) > 2 for row in listed.stdout.splitlines() if row.startswith("│"))


def test_a_port_that_is_taken_is_named_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused = subprocess.run([COMMAND, "chaos", "--port", port], capture_output=True, text=True, timeout=60)
    assert refused.returncode != 0 and f"port {port}" in refused.stderr and "--port 9101" in refused.stderr
    assert "Traceback" not in refused.stderr
