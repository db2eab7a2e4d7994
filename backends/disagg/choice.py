"""One answer of a request: token ids become text, tool calls and log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from backends.disagg.messages import TokenOut
from backends.disagg.request import GenerationRequest
from backends.disagg.tools import CallReader, ToolCall
from backends.models import Tokenizer
from backends.models.detokenize import Detokenizer
from backends.models.stops import StopChecker


@dataclass(slots=True)
class Delta:
    """What has become certain."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """OpenAI's chat form, one for each token"""
    finish_reason: str | None = None

    @property
    def content(self) -> bool:
        return bool(self.text or self.calls)


class Choice:
    """Takes the tokens of one generation. `ends` are the ids that end it and are not part of the text."""

    def __init__(self, index: int, tokenizer: Tokenizer, request: GenerationRequest, ends: frozenset[int]) -> None:
        self.index = index
        self.tokens = 0
        self.cached = 0
        self._tokenizer = tokenizer
        self._ends = ends
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopChecker(request.stop)
        self._calls: CallReader | None = None
        if request.tools is not None and tokenizer.tool_style is not None:
            self._calls = CallReader(tokenizer.tool_style, request.tools.names)
        self._called = 0
        self._logprobs: list[dict[str, Any]] = []
        """Of tokens whose text is still held back."""

    def push(self, token: TokenOut) -> Delta:
        """Take the next token. After a delta with a finish reason there is no more."""
        self.tokens += 1
        self.cached += token.cached
        text = ""
        if token.token not in self._ends:
            text = self._detokenizer.push([token.token])
            if token.logprobs:
                self._logprobs.append(self._logprob(token.logprobs))
        if token.finish_reason is not None:
            text += self._detokenizer.finish()
        text, stopped = self._stops.push(text)
        reason = "stop" if stopped else token.finish_reason
        if reason is not None and not stopped:
            text += self._stops.flush()
        delta = Delta(text, finish_reason=reason)
        if self._calls is not None:
            delta.text, delta.calls = self._calls.push(text)
            if reason is not None:
                rest, calls = self._calls.finish()
                delta.text += rest
                delta.calls += calls
            self._called += len(delta.calls)
            if reason == "stop" and self._called:
                delta.finish_reason = "tool_calls"
        if delta.content or reason is not None:
            delta.logprobs, self._logprobs = self._logprobs, []
        return delta

    def _logprob(self, values: list[tuple[int, float]]) -> dict[str, Any]:
        (chosen, *top) = [self._named(token, value) for token, value in values]
        return {**chosen, "top_logprobs": top}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        # JSON has no infinity: a token that cannot come has a very small probability.
        return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(data)}
