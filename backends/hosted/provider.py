"""What hosted APIs have in common: a base URL, a key that never shows, and exact counts where a vocabulary is here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from backends.base import BackendError, Call, Goals, Health, PromptCount, Reply, Sample, Surface
from backends.hosted.counting import TokenizerMissing, count_body, text_counter
from backends.hosted.http import HttpClient, Response
from backends.hosted.refusals import refusal
from backends.hosted.splice import spliced
from backends.options import HostedOptions

_MAX_ERROR_BYTES = 1 << 20


class Provider:
    """`headers` are the API's own, the key's among them; the policy's come after them."""

    surfaces: ClassVar[frozenset[Surface]]

    def __init__(self, name: str, options: HostedOptions, headers: Mapping[str, str]) -> None:
        self.name = name
        self.options = options
        self._key = options.api_key.get_secret_value() if options.api_key is not None else None
        self._headers = {"content-type": "application/json", **headers, **options.headers}
        self._client: HttpClient | None = None
        self._last_error: str | None = None
        self._count: Callable[[str], int] | None = None

    async def start(self) -> None:
        if self.options.tokenizer is not None and self._count is None:
            try:
                self._count = await asyncio.to_thread(text_counter, self.options.tokenizer)
            except TokenizerMissing as missing:
                raise BackendError(f"provider {self.name}: {missing}", status=500) from None
        if self._client is None:
            timeout_s = self.options.connect_timeout_ms / 1000
            try:
                self._client = HttpClient(self.name, self.options.base_url, self._headers, timeout_s)
            except ValueError as error:
                raise BackendError(f"provider {self.name}: {error}", status=500) from None

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def count_prompt(self, surface: Surface, body: Mapping[str, Any]) -> PromptCount | None:
        if self._count is None:
            return None
        tokens = count_body(self._count, surface, body)
        return None if tokens is None else PromptCount(tokens, exact=True)

    def forecast(self, prompt: PromptCount, max_tokens: int | None, goals: Goals) -> None:
        return None

    def samples(self) -> list[Sample]:
        return []

    def context_limit(self) -> int | None:
        return None

    def health(self) -> Health:
        """Always able to take a request, as far as we know without sending one."""
        return Health(True, {"base_url": self.options.base_url, "last_error": self._last_error})

    async def open(self, call: Call) -> Reply:
        try:
            return await self._open(call)
        except BackendError as error:
            raise self.noted(error) from None

    async def _open(self, call: Call) -> Reply:
        raise NotImplementedError

    async def send(self, call: Call, path: str, changes: Mapping[str, Any]) -> Response:
        """POST the call's body with `changes` to its top level. Raises BackendError for any status but 200."""
        if self._client is None:
            raise BackendError(f"provider {self.name} is not running", status=503)
        changes = {"model": call.body["model"], **changes}
        content = spliced(call.raw, changes, call.dropped) if call.raw is not None else None
        if content is None:
            content = json.dumps({**call.body, **changes}, ensure_ascii=False, separators=(",", ":")).encode()
        response = await self._client.post(path, content, {"x-request-id": call.request_id}, call.connect_timeout_s)
        if response.status == 200:
            return response
        try:
            said = await response.read(_MAX_ERROR_BYTES)
        finally:
            await response.aclose()
        raise refusal(self.name, response.status, response.headers, said)

    def noted(self, error: BackendError) -> BackendError:
        """`error` without the key, should the provider have echoed it; remembered for /health."""
        if self._key and self._key in error.message:
            error.message = error.message.replace(self._key, "***")
            error.args = (error.message,)
        self._last_error = error.message
        return error
