"""What every source of tokens is to the router: one `Backend` protocol, one currency, one error.

The currency is OpenAI's wire format as bytes, cut at event boundaries (`Piece`), beside the few facts that
routing and accounting need. A hosted API that already speaks it is relayed untouched; the bundled cluster
writes it itself. Nothing here opens a connection or imports more than the standard library.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

Surface = Literal["chat.completions", "completions", "messages", "embeddings"]
"""OpenAI's chat completions, completions and embeddings, and Anthropic's messages."""


@dataclass(frozen=True, slots=True)
class Goals:
    """What the caller asks of latency. All in milliseconds; None where nothing was asked."""

    ttft_ms: float | None = None
    """Time to first token."""
    tpot_ms: float | None = None
    """Time per output token after the first."""

    @property
    def ttft_s(self) -> float | None:
        return None if self.ttft_ms is None else self.ttft_ms / 1000

    @property
    def tpot_s(self) -> float | None:
        return None if self.tpot_ms is None else self.tpot_ms / 1000


@dataclass(frozen=True, slots=True)
class Call:
    """One attempt, as it goes to a backend."""

    request_id: str
    surface: Surface
    body: Mapping[str, Any]
    """The client's JSON object; `model` is already the target's model. Never mutated."""
    stream: bool
    goals: Goals = field(default_factory=Goals)
    prompt_ids: tuple[int, ...] | None = None
    """The prompt's token ids where this backend's own `count_prompt` made them: templated and tokenized once."""
    raw: bytes | None = None
    """The body as the client wrote it, for those who relay it; `model` in it is the client's."""
    dropped: frozenset[str] = frozenset()
    """What `raw` has at its top level that is not for providers."""
    connect_timeout_s: float | None = None
    """For a new connection; None for the backend's own."""

    def without(self, name: str) -> Call:
        """The same call without that parameter."""
        body = {key: value for key, value in self.body.items() if key != name}
        return replace(self, body=body, dropped=self.dropped | {name})


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


def read_usage(body: Mapping[str, Any]) -> Usage | None:
    """OpenAI's `usage` object, where `body` has one."""
    usage = body.get("usage")
    if not isinstance(usage, Mapping):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else 0
    return Usage(int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0), int(cached or 0))


@dataclass(frozen=True, slots=True)
class KVTransfer:
    """What one request's hand-over from prefill to decode moved, and how long each part took.

    `exposed_s` is what the client could feel: from the prefill's last layer done to the decode side being
    able to step. The phases overlap with prefill, so they may add up to more than that.
    """

    prefill: str
    """The worker that computed it."""
    decode: str
    transport: str
    codec: str
    bytes: int
    prefill_pid: int
    decode_pid: int
    queue_s: float
    alloc_s: float
    wire_s: float
    codec_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True)
class Piece:
    """Complete SSE events (streamed) or the whole JSON body (not streamed), with what was seen in them."""

    data: bytes
    content: bool = False
    """Whether a client would see generated content (text, tool call, reasoning); comments and role-only
    frames are not."""
    usage: Usage | None = None
    done: bool = False
    """The stream's proper end (`data: [DONE]`) or the body's end. A stream that stops without it was cut."""


@dataclass(frozen=True, slots=True)
class PromptCount:
    tokens: int
    exact: bool
    """True when the target's own tokenizer counted; False for an estimate."""
    prompt_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a backend expects of a request if it came now, from its own queues, caches and speeds."""

    uncached_tokens: int
    """Prompt tokens that it would have to compute."""
    ttft_s: float
    tpot_s: float
    """Until the next token, beside those that it serves."""


@dataclass(frozen=True, slots=True)
class Health:
    ok: bool
    detail: Mapping[str, Any] = field(default_factory=dict)
    """JSON-ready facts for /health: workers with role, pid and state; never a secret."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One value that a backend counts or measures itself, as Prometheus has it, without the `splitroute_` before it."""

    name: str
    kind: Literal["counter", "gauge"]
    about: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


class Reply(Protocol):
    """An answer under way. Iterate once; always `aclose()` (closing early cancels the work upstream)."""

    status: int
    headers: Mapping[str, str]

    @property
    def transfer(self) -> KVTransfer | None:
        """The KV hand-over of this request, once known; None where there was none."""

    @property
    def placement(self) -> str | None:
        """Where within the backend it was sent, and why, in words; None where there is nothing to say."""

    def __aiter__(self) -> AsyncIterator[Piece]: ...

    async def aclose(self) -> None: ...


@runtime_checkable
class Backend(Protocol):
    """A provider as configured in the policy: it may serve several targets."""

    surfaces: ClassVar[frozenset[Surface]]
    """What `open` takes."""

    async def start(self) -> None:
        """Make ready (open pools, spawn workers). Raises BackendError with what to do about it."""

    async def aclose(self) -> None:
        """Release everything; safe to call twice, and after a failed start."""

    def count_prompt(self, surface: Surface, body: Mapping[str, Any]) -> PromptCount | None:
        """Prompt tokens after templating with the target's own tokenizer, or None where it is not local.

        Raises BackendError (400) for a body it can tell is malformed.
        """

    def context_limit(self) -> int | None:
        """The longest prompt + answer in tokens where the backend knows it itself, else None."""

    async def open(self, call: Call) -> Reply:
        """Send `call`; return when the answer has begun. Raises BackendError when it is refused."""

    def health(self) -> Health: ...

    def forecast(self, prompt: PromptCount, max_tokens: int | None, goals: Goals) -> Forecast | None:
        """For a prompt that `count_prompt` counted; None where it cannot tell."""

    def samples(self) -> list[Sample]:
        """What it counts itself, for /metrics."""


@runtime_checkable
class Managed(Protocol):
    """A backend whose workers may be changed while it serves."""

    async def manage(
        self,
        action: str,
        worker: str | None = None,
        role: str | None = None,
        address: str | None = None,
        *,
        now: bool = False,
    ) -> dict[str, Any]:
        """`action` is add, drain, undrain, remove or flip. Raises BackendError (400, 404, 409)."""


class BackendError(Exception):
    """A refusal or failure, with what the provider said kept: status, code, param, message, headers.

    `status` follows HTTP: 400 the request is wrong, 401/403 credentials, 404 unknown model, 408/504 too late,
    413 too large, 429 too many (see `retry_after_s`), 5xx the provider's fault, 502 broken reply, 503 not
    available. `kind` is OpenAI's `error.type`.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 502,
        kind: str | None = None,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind or ("invalid_request_error" if 400 <= status < 500 else "api_error")
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.hint = hint
        """What the operator may do next; shown by the CLI, not sent to API clients."""
