"""An answer of the bundled cluster under way: one choice or several, streamed or whole."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence

from backends.base import Call, KVTransfer, Piece, Usage
from backends.disagg.choice import Choice, Delta
from backends.disagg.cluster import Cluster
from backends.disagg.generation import Generation
from backends.disagg.messages import TokenOut
from backends.disagg.render import Renderer
from backends.disagg.request import GenerationRequest


class DisaggReply:
    """`generations[i]` is what `choices[i]` is made of."""

    def __init__(
        self,
        cluster: Cluster,
        generations: Sequence[Generation],
        choices: Sequence[Choice],
        call: Call,
        request: GenerationRequest,
        prompt_tokens: int,
    ) -> None:
        self.status = 200
        self.headers: Mapping[str, str] = {"content-type": "text/event-stream" if call.stream else "application/json"}
        self._cluster = cluster
        self._generations = generations
        self._choices = choices
        self._call = call
        self._request = request
        self._prompt_tokens = prompt_tokens

    @property
    def transfer(self) -> KVTransfer | None:
        """The first choice's; others share the prompt's KV where it was computed, and are handed over alike."""
        return self._generations[0].transfer

    @property
    def placement(self) -> str | None:
        return self._generations[0].placement

    async def aclose(self) -> None:
        for generation in self._generations:
            self._cluster.end(generation)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        call = self._call
        renderer = Renderer(call.surface, secrets.token_hex(12), str(call.body.get("model", "")))
        try:
            if call.stream:
                opening = b"".join(renderer.opening(choice.index) for choice in self._choices)
                if opening:
                    yield Piece(opening)
                unfinished = len(self._choices)
                async for index, delta in self._deltas():
                    unfinished -= delta.finish_reason is not None
                    data = renderer.delta(index, delta)
                    if not unfinished:
                        usage = self._usage()
                        data += renderer.ending(usage, self._request.include_usage)
                        yield Piece(data, content=delta.content, usage=usage, done=True)
                    elif data:
                        yield Piece(data, content=delta.content)
            else:
                answers = [Delta() for _ in self._choices]
                async for index, delta in self._deltas():
                    answer = answers[index]
                    answer.text += delta.text
                    answer.calls += delta.calls
                    answer.logprobs += delta.logprobs
                    answer.finish_reason = delta.finish_reason
                usage = self._usage()
                content = any(answer.content for answer in answers)
                yield Piece(renderer.whole(answers, usage), content=content, usage=usage, done=True)
        finally:
            await self.aclose()

    async def _deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Every choice's deltas as they come, up to the one with its finish reason."""
        finished: set[int] = set()
        async for index, token in _merged(self._generations):
            if index in finished:
                continue
            delta = self._choices[index].push(token)
            if delta.finish_reason is not None:  # a stop string may end it before the workers know
                self._cluster.end(self._generations[index])
                finished.add(index)
            yield index, delta

    def _usage(self) -> Usage:
        return Usage(
            self._prompt_tokens,
            sum(choice.tokens for choice in self._choices),
            min(choice.cached for choice in self._choices),  # the first computes the prompt for the others
        )


async def _merged(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, TokenOut]]:
    """The tokens of all, each generation's in order. Raises BackendError where one fails."""
    if len(generations) == 1:
        async for token in generations[0]:
            yield 0, token
        return
    waiting = {asyncio.ensure_future(one.__anext__()): index for index, one in enumerate(generations)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(future)
                try:
                    token = future.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(generations[index].__anext__())] = index
                yield index, token
    finally:
        for future in waiting:
            future.cancel()
