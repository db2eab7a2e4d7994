"""`splitroute up`: real clients are served, and no end of it leaves anything behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import openai
import psutil
import pydantic
import pytest

from backends.models import ModelFiles
from tests.cli.serving import COMMAND, Running, up

pytestmark = [pytest.mark.model, pytest.mark.slow]


def segments() -> set[str]:
    """Named shared memory and sockets on this machine: what a careless server leaves behind."""
    named = {str(path) for path in Path("/dev/shm").glob("*")} if Path("/dev/shm").is_dir() else set()
    try:
        sockets = Path("/proc/net/unix").read_text().split()
    except OSError:
        sockets = []
    return named | {name for name in sockets if "splitroute" in name}


@pytest.fixture(scope="module")
def gateway(smollm2: ModelFiles) -> Iterator[Running]:
    with up() as running:
        yield running


def test_the_real_client_streams(gateway: Running) -> None:
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0)
    stream = client.chat.completions.create(
        model="chat",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]) > 3, "token by token"
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == 37
    raw = client.chat.completions.with_raw_response.create(
        model="smollm2-135m", messages=[{"role": "user", "content": "Hi"}], max_tokens=4
    )
    assert raw.headers["x-splitroute-target"] == "own"
    assert {model.id for model in client.models.list()} == {"chat", "smollm2-135m"}


class River(pydantic.BaseModel):
    name: Literal["Danube", "Rhine", "Nile"]
    in_europe: bool


def test_the_real_client_parses_answers_of_its_own_schema(gateway: Running) -> None:
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0)
    answer = client.chat.completions.parse(
        model="chat",
        messages=[{"role": "user", "content": "Name a river."}],
        response_format=River,
        temperature=0.8,
        seed=1,
        max_tokens=200,
        n=2,
        logprobs=True,
        top_logprobs=2,
    )
    assert answer.usage is not None
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, River)
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert len(choice.logprobs.content[0].top_logprobs) == 2
        assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content


async def test_sixteen_clients_get_what_one_gets(gateway: Running) -> None:
    async def ask(index: int) -> str:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="chat",
                messages=[
                    {"role": "user", "content": f"Name {index + 2} rivers in {'Europe' if index % 2 else 'Asia'}."}
                ],
                temperature=0,
                max_tokens=8,
                stream=True,
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    together = await asyncio.gather(*map(ask, range(16)))
    alone = [await ask(index) for index in range(16)]
    assert list(together) == alone
    assert all(alone)


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"model": "nope"}, 404, "known: chat, smollm2-135m"),
        ({"messages": []}, 400, "at least one message"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400, "8192"),
        ({"temperature": "hot"}, 400, "temperature: 'hot'"),
        ({"stop": 5}, 400, "stop: 5"),
        ({"n": 129}, 400, "from 1 to 128"),
        ({"tools": [{"type": "function"}]}, 400, "not supported by the bundled cluster"),
    ],
)
def test_a_wrong_request_is_a_clear_error(gateway: Running, changes: dict[str, object], status: int, said: str) -> None:
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0)
    body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], **changes}
    with pytest.raises(openai.APIStatusError) as refused:
        client.post("/chat/completions", body=body, cast_to=object)
    assert refused.value.status_code == status
    assert said in refused.value.message
    assert "Traceback" not in refused.value.message


def test_a_port_in_use_is_one_message_before_anything_starts(gateway: Running) -> None:
    port = gateway.url.rpartition(":")[2]
    refused = subprocess.run([COMMAND, "up", "--port", port], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"splitroute: port {port} on 127.0.0.1 is in use")
    assert "--port 0" in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_end_leaves_a_process_or_memory(smollm2: ModelFiles, how: signal.Signals) -> None:
    before = segments()
    with up() as running:
        workers = running.workers()
        assert len(workers) == 2
        # One answer is under way: a stop waits for it, a kill does not.
        with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as client:
            body = b'{"model": "chat", "messages": [{"role": "user", "content": "Name a river."}], "max_tokens": 30}'
            client.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
            )
            assert any(process.memory_maps() for process in workers)
            os.kill(running.process.pid, how)
            running.process.wait(60)
        gone, alive = psutil.wait_procs(workers, timeout=15)
        assert not alive, f"left after {how.name}: {alive}"
        assert len(gone) == 2
    assert segments() <= before
    expected = {signal.SIGINT: (130,), signal.SIGTERM: (-signal.SIGTERM, 143), signal.SIGKILL: (-signal.SIGKILL,)}
    assert running.process.returncode in expected[how]
    assert "Traceback" not in "".join(running.output)


def test_ctrl_c_while_it_starts_leaves_nothing(smollm2: ModelFiles) -> None:
    process = subprocess.Popen(
        [COMMAND, "up", "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    parent = psutil.Process(process.pid)
    workers: list[psutil.Process] = []
    while len(workers) < 2:
        workers = [child for child in parent.children() if "backends.disagg.process" in child.cmdline()]
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in output
    _, alive = psutil.wait_procs(workers, timeout=15)
    assert not alive


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("version: 1\n", "the policy has no 'routes'"),
        (
            "version: 1\nproviders: {own: {type: disagg, model: smollm2-135}}\ntargets: {t: {provider: own}}\n"
            "routes: {chat: [{candidates: [t], choose: in-order}]}\n",
            "did you mean 'smollm2-135m'",
        ),
        (
            "version: 1\nproviders: {own: {type: disagg, model: smollm2-135m}}\ntargets: {t: {provider: own}}\n"
            "routes: {chat: [{candidates: [tt], choose: in-order}]}\n",
            "unknown target 'tt' (did you mean 't'?)",
        ),
        (
            "version: 1\nproviders: {own: {type: disagg, model: smollm2-135m, device: cuda}}\n"
            "targets: {t: {provider: own}}\nroutes: {chat: [{candidates: [t], choose: in-order}]}\n",
            "could not start: device 'cuda'",
        ),
    ],
)
def test_what_cannot_be_served_is_one_message(tmp_path: Path, policy: str, said: str, smollm2: ModelFiles) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(policy)
    if "cuda" in policy:
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("this machine has a CUDA device, so the policy can be served")
    refused = subprocess.run(
        [COMMAND, "up", "--port", "0", "--policy", str(file)], capture_output=True, text=True, timeout=120
    )
    assert refused.returncode == 1
    assert said in refused.stderr
    assert "  try: " in refused.stderr
    assert "Traceback" not in refused.stderr
