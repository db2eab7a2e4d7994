"""Gateways as processes, each told to do the same: a target, and perhaps one to fall back to."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import httpx

ATTEMPT_MS = 1500
"""How long an attempt may be silent, at every gateway."""
RETRIES = 2


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


@contextlib.contextmanager
def running(command: Sequence[str], url: str, ready: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """`command`, once `url + ready` answers with 200."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **env})
        try:
            until = time.monotonic() + 120
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(url + ready, timeout=2).status_code == 200:
                        break
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise SystemExit(f"{command[0]} did not start:\n{log.read().decode(errors='replace')[-2000:]}")
                time.sleep(0.2)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def splitroute(policy: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address of our gateway under `policy`, and its process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "policy.yaml")
        path.write_text(policy)
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "router.cli", "up", "--policy", str(path), "--port", str(port)]
        with running(command, url, "/v1/models") as process:
            yield url, process


@contextlib.contextmanager
def chaos() -> Iterator[str]:
    """The address of a provider that fails as its models' names say, as a process."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1"
    with running([sys.executable, "-m", "router.cli", "chaos", "--port", str(port)], url, "/models"):
        yield url


class Gateway(Protocol):
    name: str

    def serving(
        self, provider: str, faults: Sequence[str], columns: Sequence[str]
    ) -> contextlib.AbstractContextManager[str]:
        """The address, while every fault can be asked for in every column."""

    def asked(self, provider: str, fault: str, column: str) -> tuple[str, dict[str, str]]:
        """The model and the headers to ask with."""


class Splitroute:
    name = "splitroute"

    @contextlib.contextmanager
    def serving(self, provider: str, faults: Sequence[str], columns: Sequence[str]) -> Iterator[str]:
        targets, routes = [], []
        for at, fault in enumerate(faults):
            for column in columns:
                name = f"{column}-{at}"
                targets.append(f"  {name}: {{provider: chaos, model: {json.dumps(fault)}}}")
                others = ", well" if column.endswith("fallback") else ""
                routes.append(f"  {name}: [{{candidates: [{name}{others}], choose: in-order}}]")
        policy = "\n".join(
            [
                "version: 1",
                f"providers: {{chaos: {{type: openai, base_url: {json.dumps(provider)}, api_key: k}}}}",
                "targets:",
                "  well: {provider: chaos, model: ok}",
                *targets,
                "routes:",
                *routes,
                f"resilience: {{retries: {RETRIES}, ttft_timeout_ms: {ATTEMPT_MS}, attempt_timeout_ms: {ATTEMPT_MS},"
                f" idle_timeout_ms: {ATTEMPT_MS}, deadline_ms: {ATTEMPT_MS * 3}}}",
            ]
        )
        self._names = {fault: at for at, fault in enumerate(faults)}
        with splitroute(policy) as (url, _):
            yield url

    def asked(self, provider: str, fault: str, column: str) -> tuple[str, dict[str, str]]:
        return f"{column}-{self._names[fault]}", {}


class LiteLLM:
    name = "LiteLLM"

    def __init__(self, command: str) -> None:
        self._command = command

    @contextlib.contextmanager
    def serving(self, provider: str, faults: Sequence[str], columns: Sequence[str]) -> Iterator[str]:
        self._names = {fault: at for at, fault in enumerate(faults)}
        names = {f"{column}-{at}": fault for fault, at in self._names.items() for column in columns}
        seconds = ATTEMPT_MS / 1000
        models = [
            {
                "model_name": name,
                "litellm_params": {
                    "model": f"openai/{fault}",
                    "api_base": provider,
                    "api_key": "k",
                    "timeout": seconds,
                    "stream_timeout": seconds,
                },
            }
            for name, fault in {**names, "well": "ok"}.items()
        ]
        config = {
            "model_list": models,
            "router_settings": {
                "num_retries": RETRIES,
                "fallbacks": [
                    {name: ["well"]} for name in names if name.endswith(tuple("0123456789")) and "fallback" in name
                ],
            },
            "litellm_settings": {"request_timeout": seconds, "telemetry": False},
        }
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "config.json.yaml")
            path.write_text(json.dumps(config))  # JSON is YAML
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            command = [self._command, "--config", str(path), "--host", "127.0.0.1", "--port", str(port)]
            env = {
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # it is asked without one, here alone
            }
            with running(command, url, "/health/liveliness", **env):
                yield url

    def asked(self, provider: str, fault: str, column: str) -> tuple[str, dict[str, str]]:
        return f"{column}-{self._names[fault]}", {}


class Portkey:
    name = "Portkey"

    def __init__(self, script: str) -> None:
        self._script = script

    @contextlib.contextmanager
    def serving(self, provider: str, faults: Sequence[str], columns: Sequence[str]) -> Iterator[str]:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        with running(["node", self._script, f"--port={port}", "--headless"], url, "/"):
            yield url

    def asked(self, provider: str, fault: str, column: str) -> tuple[str, dict[str, str]]:
        def target(model: str) -> dict[str, object]:
            return {
                "provider": "openai",
                "custom_host": provider,
                "api_key": "k",
                "override_params": {"model": model},
                "request_timeout": ATTEMPT_MS,
                "retry": {"attempts": RETRIES},
            }

        config = target(fault)
        if column.endswith("fallback"):
            config = {"strategy": {"mode": "fallback"}, "targets": [target(fault), target("ok")]}
        return fault, {"x-portkey-config": json.dumps(config), "authorization": "Bearer k"}
