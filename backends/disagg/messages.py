"""What coordinator and workers say to each other: msgpack structs behind a four-byte length.

A worker has one socket pair with its coordinator, inherited at start: no name, no port, nobody else can connect, and
its end-of-file is how either learns that the other has died. On another host its node (`node`) holds that end, and
passes frames between it and the coordinator's connection (`control`).
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

from backends.disagg.engine.step_time import Coefficients

LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 64 << 20

Role = Literal["prefill", "decode", "unified"]


class TLSFiles(msgspec.Struct, frozen=True):
    """Paths of PEM files: what this side shows (`cert`, `key`), and whom it believes (`ca`)."""

    cert: str
    key: str
    ca: str


class WorkerConfig(msgspec.Struct, frozen=True):
    """Everything a worker needs to start; the first message it gets."""

    name: str
    role: Role
    model: str
    model_path: str
    model_kind: Literal["gguf", "hf"]
    fingerprint: str
    device: str
    dtype: str
    block_size: int
    kv_tokens: int
    max_model_len: int
    max_batch: int
    prefill_chunk: int
    prefix_cache: bool
    quantization: Literal["none", "int8", "int4"]
    threads: int
    cpus: list[int] | None
    transport: Literal["shm", "tcp", "nixl"]
    kv_host: str
    """The address that workers on other hosts pull KV from; empty where there are none."""
    kv_port: int
    """0 takes any."""
    kv_codec: Literal["auto", "exact", "raw", "lossless", "int8", "near", "small"]
    secret: str
    lease_s: float
    spill_tokens: int
    tls: TLSFiles | None = None


class Sampling(msgspec.Struct, frozen=True):
    """`engine.sequence.SamplingParams` on the wire; field by field the same."""

    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop_ids: list[int]
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: list[tuple[int, float]] = []
    min_tokens: int = 0
    logprobs: int | None = None


class Source(msgspec.Struct, frozen=True):
    """Where a prompt's KV is."""

    address: str
    incarnation: str
    """The life of that worker in which it was computed."""
    request: int
    """What it is called there."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Serve a request: whole, up to the first token (`hand_over`), or from another worker's KV on (`source`)."""

    request: int
    prompt_ids: list[int]
    sampling: Sampling
    source: Source | None = None
    """None prefills here."""
    hand_over: bool = False
    """Stop after the first token, and keep the KV until it is aborted or its lease ends."""
    replay: list[int] = []
    """Tokens of the answer that were given before: go on after them."""
    ttft_s: float | None = None
    """The first token is due this long after now."""
    tpot_s: float | None = None
    """Seconds between tokens that are promised."""
    grammar: str | None = None
    """llguidance's form of what the answer must look like."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    request: int


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Nobody else can take over what was submitted here to be handed over: go on with it, after `replay`."""

    request: int
    replay: list[int]
    tpot_s: float | None = None


class Meet(msgspec.Struct, frozen=True, tag=True):
    """KV may have to be pulled from there: connect now, so that no request waits for it."""

    address: str
    incarnation: str


class Reset(msgspec.Struct, frozen=True, tag=True):
    """Another coordinator has taken this worker over: forget every request, and say Started again."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Exit cleanly."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded; requests may come."""

    pid: int
    incarnation: str
    host: str
    addresses: list[str]
    """Where others pull KV from."""
    num_blocks: int
    token_bytes: int
    """Of KV."""
    dtype: str
    runner: str
    step: Coefficients
    """`engine.step_time.StepTime.coefficients`."""


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    message: str
    hint: str | None


class TokenOut(msgspec.Struct, frozen=True, array_like=True):
    request: int
    index: int
    token: int
    finish_reason: str | None
    cached: int = 0
    """With the first token: how many prompt tokens were found in the prefix cache."""
    logprobs: list[tuple[int, float]] | None = None
    """Where asked for: this token's, then those of the likeliest."""


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """What one engine step produced."""

    tokens: list[TokenOut]


class Transferred(msgspec.Struct, frozen=True, tag=True):
    """Decode: a prompt's KV has landed here."""

    request: int
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


class Failed(msgspec.Struct, frozen=True, tag=True):
    """One request failed; the worker goes on."""

    request: int
    message: str
    status: int = 503
    kv_lost: bool = False
    """Its KV could not be had: it may be tried elsewhere."""


class State(msgspec.Struct, frozen=True, tag=True):
    """The worker's load, sent when it changed, a few times a second at most."""

    free_blocks: int
    waiting: int
    running: int
    held: int
    """Prompts whose KV is kept for other workers."""
    prefilled_tokens: int
    """Prompt tokens computed since the start; of those replayed, none."""
    replayed_tokens: int
    context: int
    """KV tokens of the sequences that decode."""
    step: Coefficients


class Cached(msgspec.Struct, frozen=True, tag=True):
    """Which prefixes the worker remembers has changed: keys of prompt blocks (`engine.blocks.prefix_keys`)."""

    added: list[bytes]
    removed: list[bytes]


ToWorker = Submit | Resume | Abort | Meet | Reset | Stop
FromWorker = Started | StartFailed | Tokens | Transferred | Failed | Cached | State

_encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
decode_config = msgspec.msgpack.Decoder(WorkerConfig).decode


def frame(message: msgspec.Struct) -> bytes:
    """`message` with its length before it."""
    body = _encode(message)
    return LENGTH.pack(len(body)) + body
