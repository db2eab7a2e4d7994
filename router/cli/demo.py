"""`splitroute demo`: three real requests through the real gateway, and where each of them went."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from router.cli.errors import CliError
from router.cli.parser import Parser

if TYPE_CHECKING:
    from router.cli.demo_report import Row
    from router.sdk import Router

_EXAMPLES = """\
examples:
  splitroute demo                    start everything, ask, show where each request went, stop
  splitroute demo --json rows.json   write the table as JSON too
  splitroute demo --keep             go on serving until Ctrl-C
"""

LONG_PROMPT_TOKENS = 1500


@dataclass(frozen=True, slots=True)
class _Request:
    name: str
    about: str
    prompt: str
    max_tokens: int
    ttft_ms: int | None = None


def register(commands: argparse._SubParsersAction[Parser], common: Parser) -> None:
    demo = commands.add_parser(
        "demo",
        parents=[common],
        help="see it work: three requests, three routes",
        description=(
            "Start the bundled cluster, a demo provider that stands in for a hosted API, and the gateway; send a "
            "short interactive prompt, one of 1,500 tokens and one for the hosted API; show where each went."
        ),
        epilog=_EXAMPLES,
    )
    demo.add_argument("--json", metavar="FILE", help="write the table's rows as JSON")
    demo.add_argument("--keep", action="store_true", help="go on serving until Ctrl-C")
    demo.set_defaults(run=_demo, parser=demo)


def _demo(args: argparse.Namespace) -> int:
    from router.cli.listening import listen
    from router.gateway.server import run

    json_file = None if args.json is None else Path(args.json).resolve()
    if json_file is not None and not json_file.parent.is_dir():
        raise CliError(f"--json {args.json}: no such folder", hint="name a file in a folder that exists")
    with listen("127.0.0.1", 0) as listener:
        return run(_run(listener, json_file, args.keep))


async def _run(listener: socket.socket, json_file: Path | None, keep: bool) -> int:
    import policies
    from backends import PROVIDER_OPTIONS
    from router.cli.console import err, out
    from router.cli.demo_report import as_json, missing_handover, table
    from router.cli.listening import url
    from router.cli.up import pull_models
    from router.demo_provider import DemoProvider
    from router.gateway.app import create_app
    from router.gateway.server import Server
    from router.sdk import Router

    provider = DemoProvider()
    environment = {**os.environ, "SPLITROUTE_DEMO_URL": await provider.start()}
    policy = policies.load(
        policies.preset("demo"), filename="demo.yaml", env=environment, provider_types=PROVIDER_OPTIONS
    )
    pull_models(policy)
    router = Router(policy)
    server = Server(create_app(router))
    try:
        with err().status("starting a prefill worker, a decode worker, a demo provider and the gateway"):
            await router.start()
        serving = await server.start_on(listener)
        base_url = f"{url(listener)}/v1"
        out().print(f"gateway: {base_url}   policy: the preset demo.yaml", markup=False, soft_wrap=True)
        _show_processes(router)
        rows = [await _ask(base_url, request, router) for request in _requests(router)]
        out().print(table(rows))
        if json_file is not None:
            json_file.write_text(as_json(rows), encoding="utf-8")  # noqa: ASYNC240 - a few hundred bytes
        if (missing := missing_handover(rows[1])) is not None:
            raise CliError(missing, hint="splitroute demo --debug")
        if keep:
            out().print(f"still serving {base_url}; Ctrl-C stops", markup=False, soft_wrap=True)
        else:
            server.should_exit = True
        await serving
    finally:
        await router.aclose()
        await provider.aclose()
    return 0


def _show_processes(router: Router) -> None:
    from router.cli.console import out

    for health in router.health().values():
        for worker in health.detail.get("workers", ()):
            out().print(
                f"  {worker['name']}: process {worker['pid']}, {health.detail['model']} in {worker['dtype']}",
                markup=False,
            )


def _requests(router: Router) -> list[_Request]:
    return [
        _Request(
            "interactive", "short, and wants its first token within 1.5 s", "What is the capital of France?", 40, 1500
        ),
        _Request("long", f"about {LONG_PROMPT_TOKENS:,} tokens of prompt", _long_prompt(router), 40),
        _Request("hosted", "short, without a goal: the policy sends it to the hosted API", "Name three rivers.", 40),
    ]


def _long_prompt(router: Router) -> str:
    """A question after as many paragraphs of the demo's text as make about 1,500 tokens with it."""
    question = "\n\nIn two sentences: what does this text say about the two kitchens?"
    paragraphs = (files("router.cli") / "data" / "two-kitchens.txt").read_text(encoding="utf-8").split("\n\n")
    own = router.backends["cluster"]
    prompt = ""
    while True:
        for paragraph in paragraphs:
            longer = f"{prompt}{paragraph}\n\n"
            body = {"messages": [{"role": "user", "content": longer + question}]}
            counted = own.count_prompt("chat.completions", body)
            assert counted is not None
            if counted.tokens > LONG_PROMPT_TOKENS + 50:
                return prompt + question
            prompt = longer


async def _ask(base_url: str, request: _Request, router: Router) -> Row:
    """Send `request` over HTTP, print the answer as it streams, and say what it took."""
    import httpx

    from router.cli.console import out
    from router.cli.demo_report import Row

    out().print(f"\n{request.name}: {request.about}", style="bold", markup=False)
    shown = (
        request.prompt
        if len(request.prompt) < 100
        else f"{request.prompt[:60].strip()} … {request.prompt[-70:].strip()}"
    )
    out().print(f"> {' '.join(shown.split())}", markup=False, soft_wrap=True)
    headers = {"x-request-id": f"demo-{request.name}"}
    if request.ttft_ms is not None:
        headers["x-slo-ttft-ms"] = str(request.ttft_ms)
    body = {
        "model": "chat",
        "messages": [{"role": "user", "content": request.prompt}],
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "stream": True,
    }
    async with (
        httpx.AsyncClient(timeout=None, trust_env=False) as client,
        client.stream("POST", f"{base_url}/chat/completions", json=body, headers=headers) as response,
    ):
        if response.status_code != 200:
            raise CliError(f"the {request.name} request failed: {_said(await response.aread())}")
        done = False
        async for line in response.aiter_lines():
            done = done or line == "data: [DONE]"
            _print_text(line)
        print(flush=True)
        if not done:
            raise CliError(f"the answer to the {request.name} request was cut")
    record = router.ledger.find(headers["x-request-id"])
    assert record is not None and record.decision is not None and record.target is not None
    assert record.usage is not None
    provider = router.policy.providers[router.policy.targets[record.target].provider]
    return Row(
        request=request.name,
        class_name=record.decision.class_name,
        target=record.target,
        provider=f"{provider.name}, {provider.type}",
        why=record.decision.reason,
        prompt_tokens=record.usage.prompt_tokens,
        completion_tokens=record.usage.completion_tokens,
        ttft_ms=None if record.ttft_s is None else record.ttft_s * 1000,
        tpot_ms=None if record.tpot_s is None else record.tpot_s * 1000,
        transfer=record.transfer,
    )


def _print_text(line: str) -> None:
    if not line.startswith("data: {"):
        return
    chunk: dict[str, Any] = json.loads(line[6:])
    for choice in chunk.get("choices", ()):
        sys.stdout.write((choice.get("delta") or {}).get("content") or "")
        sys.stdout.flush()


def _said(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace")[:200]
