"""`SyncRouter`: the same router for code without an event loop. One thread runs the loop; every call waits."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from policies import Decision, Policy
from router.inprocess import BASE_URL, IN_PROCESS, official, sync_http_client
from router.results import Result, StreamEvent
from router.sdk import Messages, Router

if TYPE_CHECKING:
    from anthropic import Anthropic
    from openai import OpenAI
    from openai.resources.chat.completions import Completions

T = TypeVar("T")


class SyncChat:
    """As `Chat`."""

    def __init__(self, router: SyncRouter) -> None:
        self._router = router

    def __call__(
        self,
        *,
        model: str,
        messages: Messages,
        ttft_ms: float | None = None,
        tpot_ms: float | None = None,
        **parameters: Any,
    ) -> Result:
        """As `await router.chat(...)`."""
        return self._router.wait(
            self._router.router.chat(model=model, messages=messages, ttft_ms=ttft_ms, tpot_ms=tpot_ms, **parameters)
        )

    @property
    def completions(self) -> Completions:
        """As `Chat.completions`."""
        return self._router.openai.chat.completions


class SyncRouter:
    """Use as a context manager, or `close()` it. Any thread may call; calls run side by side."""

    def __init__(self, policy: Policy) -> None:
        self._run(Router(policy))

    def _run(self, router: Router) -> None:
        self.router = router
        """What runs in the loop."""
        self.chat = SyncChat(self)
        """As `Router.chat`."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="splitroute", daemon=True)
        self._thread.start()

    @classmethod
    def from_policy(cls, path: str | os.PathLike[str], *, env: Mapping[str, str] | None = None) -> SyncRouter:
        """As `Router.from_policy`."""
        self = cls.__new__(cls)
        self._run(Router.from_policy(path, env=env))
        return self

    def start(self) -> None:
        """As `Router.start`."""
        self.wait(self.router.start())

    @cached_property
    def openai(self) -> OpenAI:
        """As `Router.openai`."""
        sdk = official("openai")
        client: OpenAI = sdk.OpenAI(
            base_url=f"{BASE_URL}/v1",
            api_key=IN_PROCESS,
            max_retries=0,
            http_client=sync_http_client(self.router, sdk, self.wait),
        )
        return client

    @cached_property
    def anthropic(self) -> Anthropic:
        """As `Router.anthropic`."""
        sdk = official("anthropic")
        client: Anthropic = sdk.Anthropic(
            base_url=BASE_URL,
            api_key=IN_PROCESS,
            max_retries=0,
            http_client=sync_http_client(self.router, sdk, self.wait),
        )
        return client

    def complete(self, *, model: str, prompt: str, **parameters: Any) -> Result:
        """As `Router.complete`."""
        return self.wait(self.router.complete(model=model, prompt=prompt, **parameters))

    def stream(self, *, model: str, messages: Messages, **parameters: Any) -> Iterator[StreamEvent]:
        """As `Router.stream`. Closing the iterator early cancels the rest."""
        stream = self.router.stream(model=model, messages=messages, **parameters)

        async def following() -> StreamEvent | None:
            return await anext(stream, None)

        try:
            while (event := self.wait(following())) is not None:
                yield event
        finally:
            self.wait(stream.aclose())

    def explain(self, *, model: str, messages: Messages | None = None, **parameters: Any) -> Decision:
        """As `Router.explain`."""
        return self.wait(self.router.explain(model=model, messages=messages, **parameters))

    def close(self) -> None:
        """Stop every backend. Safe to call twice."""
        if self._loop.is_closed():
            return
        self.wait(self.router.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> SyncRouter:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work` in the router's loop."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C while waiting: the request must not go on unseen
            raise
