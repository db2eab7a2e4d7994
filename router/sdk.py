"""The SDK: a policy and its backends in the caller's own process."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import policies
from backends import PROVIDER_OPTIONS, create
from backends.base import Backend, BackendError, Health, Surface, Usage, read_usage
from policies import Decision, Policy, RouterState
from router.answer import Answer
from router.errors import RouterError
from router.execution import Executor
from router.incoming import Incoming, read
from router.inprocess import BASE_URL, IN_PROCESS, http_client, official
from router.reloading import Reloading
from router.results import ChatStream, Result

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI
    from openai.resources.chat.completions import AsyncCompletions

    from router.ledger import Ledger

Messages = Sequence[Mapping[str, Any]]

_NO_USAGE = Usage(0, 0)
"""A provider that does not count."""


class Chat:
    """`router.chat`: to be called, or to be gone through as OpenAI's client is."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def __call__(
        self,
        *,
        model: str,
        messages: Messages,
        ttft_ms: float | None = None,
        tpot_ms: float | None = None,
        **parameters: Any,
    ) -> Result:
        """Ask `model`, the name of a route, and wait for the whole answer.

        `ttft_ms` and `tpot_ms` are the latency goals; `parameters` are those of OpenAI's chat completions.
        Raises RouterError.
        """
        body = {"messages": _as_list(messages), **parameters}
        return await self._router.whole("chat.completions", model, body, ttft_ms, tpot_ms)

    @property
    def completions(self) -> AsyncCompletions:
        """`create`, `parse` and `stream` of OpenAI's client (`router.openai`), with its types and its errors."""
        return self._router.openai.chat.completions


class Router:
    """Sends requests where a policy says. Starts its backends on first use; always close it, or use `async with`."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.reloading = Reloading()
        self.backends: dict[str, Backend] = {
            name: create(name, policy.providers[name].options) for name in _used_providers(policy)
        }
        self._retiring: set[asyncio.Task[None]] = set()
        self._executor = Executor(policy, self.backends)
        self.ledger.metrics.add_source(
            lambda: ((name, sample) for name, backend in self.backends.items() for sample in backend.samples())
        )
        self._starting: asyncio.Task[None] | None = None
        self._started = False
        self.chat = Chat(self)
        """`await router.chat(...)`; and `router.chat.completions`, as OpenAI's client has it."""

    @classmethod
    def from_policy(cls, path: str | os.PathLike[str], *, env: Mapping[str, str] | None = None) -> Router:
        """The router of the policy in file `path`; `${NAME}` in it is taken from `env` (default: os.environ).

        Raises PolicyError with everything that is wrong in the file, or OSError.
        """
        text = read_file(str(path))
        return cls(
            policies.load(
                text,
                filename=str(path),
                env=os.environ if env is None else env,
                provider_types=PROVIDER_OPTIONS,
                read=read_file,
            )
        )

    @classmethod
    def from_text(cls, text: str, *, filename: str = "policy", env: Mapping[str, str] | None = None) -> Router:
        """The router of a policy given as YAML, such as `policies.preset("local")`. Raises PolicyError."""
        return cls(
            policies.load(
                text,
                filename=filename,
                env=os.environ if env is None else env,
                provider_types=PROVIDER_OPTIONS,
            )
        )

    # --- life ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start every backend (worker processes, connections); waits until they are ready.

        Raises BackendError with a hint, after stopping those that had started. Safe to call again.
        """
        if self._started:
            return
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        try:
            await asyncio.shield(self._starting)
            self._started = self._starting is not None
        except Exception:
            self._starting = None
            raise

    async def _start(self) -> None:
        starting = [asyncio.create_task(backend.start()) for backend in self.backends.values()]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            await asyncio.gather(*starting, return_exceptions=True)
            await self._stop_backends()
            raise

    async def aclose(self) -> None:
        """Stop every backend; what is still being answered fails. Safe to call twice."""
        starting, self._starting = self._starting, None
        self._started = False
        if starting is not None and not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        await self._stop_backends()

    async def use(self, policy: Policy) -> None:
        """Take `policy` from the next request on; requests under way keep theirs. What it needs is started first, and
        what it needs no more is stopped when nobody uses it any more.

        Raises BackendError, and then nothing has changed.
        """
        await self.start()
        backends: dict[str, Backend] = {}
        fresh: list[Backend] = []
        for name in _used_providers(policy):
            provider, before = policy.providers[name], self.policy.providers.get(name)
            if name in self.backends and before is not None and before.options == provider.options:
                backends[name] = self.backends[name]
            else:
                backends[name] = create(name, provider.options)
                fresh.append(backends[name])
        try:
            await asyncio.gather(*(backend.start() for backend in fresh))
        except BaseException:
            await asyncio.gather(*(backend.aclose() for backend in fresh), return_exceptions=True)
            raise
        old, leaving = self._executor, [one for one in self.backends.values() if one not in backends.values()]
        self.policy, self.backends = policy, backends
        self._executor = Executor(policy, backends, before=old)
        retiring = asyncio.create_task(self._retire(old, leaving))
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retiring.discard)

    @staticmethod
    async def _retire(old: Executor, leaving: list[Backend]) -> None:
        try:
            await old.drained()
        finally:
            await asyncio.gather(*(backend.aclose() for backend in leaving))

    async def _stop_backends(self) -> None:
        await self._executor.mirrors.aclose()
        for task in list(self._retiring):
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        await asyncio.gather(*(backend.aclose() for backend in self.backends.values()))

    async def __aenter__(self) -> Router:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # --- requests ------------------------------------------------------------------------------------

    @cached_property
    def openai(self) -> AsyncOpenAI:
        """OpenAI's own client on this router: streams, `parse` with pydantic models, its types and its errors.

        Nothing goes over a socket, and the router does the retrying. Raises ImportError where it is not installed.
        """
        sdk = official("openai")
        client: AsyncOpenAI = sdk.AsyncOpenAI(
            base_url=f"{BASE_URL}/v1", api_key=IN_PROCESS, max_retries=0, http_client=http_client(self, sdk)
        )
        return client

    @cached_property
    def anthropic(self) -> AsyncAnthropic:
        """Anthropic's, likewise."""
        sdk = official("anthropic")
        client: AsyncAnthropic = sdk.AsyncAnthropic(
            base_url=BASE_URL, api_key=IN_PROCESS, max_retries=0, http_client=http_client(self, sdk)
        )
        return client

    async def complete(
        self,
        *,
        model: str,
        prompt: str | Sequence[int],
        ttft_ms: float | None = None,
        tpot_ms: float | None = None,
        **parameters: Any,
    ) -> Result:
        """Continue `prompt` (text or token ids), without a chat template. Raises RouterError."""
        body = {"prompt": _as_list(prompt), **parameters}
        return await self.whole("completions", model, body, ttft_ms, tpot_ms)

    def stream(
        self,
        *,
        model: str,
        messages: Messages,
        ttft_ms: float | None = None,
        tpot_ms: float | None = None,
        **parameters: Any,
    ) -> ChatStream:
        """`chat`, as it is generated: `async for event in router.stream(...)`. Raises RouterError, also midway."""
        options = {"include_usage": True, **(parameters.pop("stream_options", None) or {})}
        body = {"messages": _as_list(messages), **parameters, "stream": True, "stream_options": options}

        async def opening() -> Answer:
            return await self.open(self._incoming("chat.completions", model, body, ttft_ms, tpot_ms))

        return ChatStream(opening, "chat.completions")

    async def explain(
        self,
        *,
        model: str,
        messages: Messages | None = None,
        prompt: str | None = None,
        ttft_ms: float | None = None,
        tpot_ms: float | None = None,
        **parameters: Any,
    ) -> Decision:
        """Where this request would go now, and why each candidate was kept or dropped. Nothing is sent.

        Raises RouterError where no candidate could take it.
        """
        await self.start()
        if prompt is not None:
            incoming = self._incoming("completions", model, {"prompt": prompt, **parameters}, ttft_ms, tpot_ms)
        else:
            body = {"messages": _as_list(messages), **parameters}
            incoming = self._incoming("chat.completions", model, body, ttft_ms, tpot_ms)
        profile, _, _ = self._executor.profile(incoming)
        return self._executor.decide(profile)

    async def count(self, incoming: Incoming) -> int:
        """Tokens of the prompt, as the target that would get the request counts them. Raises RouterError."""
        await self.start()
        profile, _, refusals = self._executor.profile(incoming)
        if refusals and not profile.tokens_by_target:
            error = next(iter(refusals.values()))
            raise RouterError(error.message, status=error.status, code=error.code, param=error.param)
        first = self._executor.decide(profile).order[0]
        return profile.tokens_by_target.get(first, profile.prompt_tokens)

    async def open(self, incoming: Incoming) -> Answer:
        """The gateway's way in: an answer as pieces in OpenAI's wire format. Raises RouterError."""
        try:
            await self.start()
        except BackendError as error:
            raise RouterError(error.message, status=error.status, kind=error.kind, code=error.code) from error
        return await self._executor.run(incoming)

    async def whole(
        self, surface: Surface, model: str, body: dict[str, Any], ttft_ms: float | None, tpot_ms: float | None
    ) -> Result:
        """What `chat` and `complete` do. Raises RouterError."""
        if body.pop("stream", None):
            raise RouterError("stream=True: use router.stream(...)", status=400, param="stream")
        begun = time.monotonic()
        answer = await self.open(self._incoming(surface, model, body, ttft_ms, tpot_ms))
        try:
            data = b"".join([piece.data async for piece in answer])
        finally:
            await answer.aclose()
        raw = json.loads(data)
        choice = (raw.get("choices") or [{}])[0]
        text = choice.get("text") if surface == "completions" else (choice.get("message") or {}).get("content")
        return Result(
            text=text or "",
            finish_reason=choice.get("finish_reason"),
            usage=answer.usage or read_usage(raw) or _NO_USAGE,
            target=answer.target,
            decision=answer.decision,
            attempts=tuple(answer.attempts),
            request_id=answer.incoming.request_id,
            total_ms=(time.monotonic() - begun) * 1000,
            cost_usd=answer.cost_usd,
            transfer=answer.transfer,
            raw=raw,
        )

    def _incoming(
        self, surface: Surface, model: str, body: dict[str, Any], ttft_ms: float | None, tpot_ms: float | None
    ) -> Incoming:
        return read(surface, {"model": model, **body}, request_id=new_request_id(), ttft_ms=ttft_ms, tpot_ms=tpot_ms)

    # --- facts ---------------------------------------------------------------------------------------

    @property
    def state(self) -> RouterState:
        """What is known of the targets."""
        return self._executor.state

    @property
    def ledger(self) -> Ledger:
        """The latest requests and the metrics."""
        return self._executor.ledger

    def health(self) -> dict[str, Health]:
        """Each provider's health."""
        return {name: backend.health() for name, backend in self.backends.items()}


def read_file(path: str) -> str:
    """The text of a policy file, or of one that it includes."""
    return Path(path).read_text(encoding="utf-8")


def _used_providers(policy: Policy) -> list[str]:
    used = {target.provider for target in policy.targets.values()}
    return [name for name in policy.providers if name in used]


def _as_list(value: Any) -> Any:
    """A tuple or other sequence as JSON has it; what is no sequence is left for the check to refuse."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def new_request_id() -> str:
    return f"req-{secrets.token_hex(12)}"
