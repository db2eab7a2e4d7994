"""What each provider type takes in a policy. Validated when the policy is loaded, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from backends.disagg.proof import MIN_SECRET


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class HostedOptions(_Options):
    """What all APIs over HTTP have."""

    base_url: str = Field(pattern=r"^https?://[^/\s]+")
    api_key: SecretStr | None = None
    headers: dict[str, str] = Field(default_factory=dict)
    connect_timeout_ms: int = Field(5000, gt=0)
    tokenizer: str | None = Field(None, min_length=1)
    """Counts prompts exactly: `o200k_base` or `cl100k_base`, or the path to a `tokenizer.json`. None estimates."""


class OpenAIOptions(HostedOptions):
    """Any API that speaks OpenAI's wire format."""

    base_url: str = Field("https://api.openai.com/v1", pattern=r"^https?://[^/\s]+")
    organization: str | None = None
    continues: Literal["vllm", "prefix"] | None = None
    """How it is asked to go on with an answer that has begun: vLLM's `continue_final_message`, or `prefix: true` in the
    last message (DeepSeek, Mistral). None: not at all."""


class AnthropicOptions(HostedOptions):
    """Anthropic's API, and others that speak it."""

    base_url: str = Field("https://api.anthropic.com/v1", pattern=r"^https?://[^/\s]+")
    version: str = Field("2023-06-01", pattern=r"^\d{4}-\d{2}-\d{2}$")
    """Sent as `anthropic-version`."""
    beta: tuple[str, ...] = ()
    """Sent as `anthropic-beta`."""


class RemoteWorker(_Options):
    """A worker on another host, where `splitroute worker` keeps it."""

    role: Literal["prefill", "decode", "unified"]
    address: str = Field(pattern=r"^[^\s:]+(:\d{1,5})?$|^\[[0-9a-fA-F:]+\](:\d{1,5})?$")
    """`HOST:PORT`."""


class TLSOptions(_Options):
    """PEM files for what crosses between hosts: control and KV."""

    ca: Path
    """Whose certificates the others must have, for the address that they are reached at."""
    cert: Path
    key: Path


class DisaggOptions(_Options):
    """The bundled prefill/decode cluster: processes of this host, and workers on others."""

    model: str
    """A name from `splitroute model list`, a path to an HF folder or a .gguf file, or a Hub id `org/name`."""
    mode: Literal["split", "unified"] = "split"
    """`split`: prefill and decode in separate processes. `unified`: both in each `decode` worker."""
    disaggregate: Literal["adaptive", "always"] = "adaptive"
    """`adaptive`: a request is split where its transfer is predicted to cost less than it saves. `always`: whenever
    both pools have somebody."""
    planner: bool = False
    """Flip workers between the pools by load."""
    prefill: int = Field(1, ge=0, le=64)
    decode: int = Field(1, ge=0, le=64)
    """How many of each on this host."""
    workers: tuple[RemoteWorker, ...] = ()
    """Those on other hosts."""
    secret: SecretStr | None = Field(None, min_length=MIN_SECRET)
    """What every host of the cluster must know."""
    tls: TLSOptions | None = None
    kv_host: str | None = None
    """This host's address, for others that pull KV from it; None finds out."""
    transport: Literal["shm", "tcp", "nixl"] = "shm"
    """How KV crosses. `nixl` (RDMA and others, by UCX) must be installed."""
    kv_codec: Literal["auto", "exact", "raw", "lossless", "int8", "near", "small"] = "auto"
    """How KV goes over the network. `auto`: as it is, or smaller where the link is found to be slow: without loss, or
    with as little as int8's. `exact`: without loss only. Shared memory is always raw."""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["none", "int8", "int4"] = "none"
    """Rounds weights, not activations. `int8`: half the memory to read for each token, for a little accuracy. `int4`:
    a quarter of the memory, slower than int8 (torch's kernel), for more of it; CPU only."""
    max_model_len: int | None = Field(None, ge=16)
    """Prompt + answer, in tokens; None takes the model's own limit."""
    block_size: int = Field(16, ge=8, le=256, multiple_of=8)
    """Tokens per KV block."""
    kv_tokens: int = Field(16384, ge=64)
    """Tokens of KV cache per worker."""
    spill_tokens: int | None = Field(None, ge=0)
    """Tokens of KV that each worker may move to host memory while decode workers may need it again; None for
    `kv_tokens`."""
    max_batch: int = Field(64, ge=1, le=1024)
    """Sequences decoding together on one worker."""
    prefill_chunk: int = Field(512, ge=16)
    """Prompt tokens per engine step."""
    prefix_cache: bool = True
    """Keep the KV of prompts for later ones that begin alike, as long as nobody needs the room."""
    threads: int | None = Field(None, ge=1)
    """Compute threads per worker; None divides the machine's cores among the workers."""
    pin: bool = False
    """Pin each worker to its own cores (Linux)."""
    start_timeout_s: float = Field(120.0, gt=0)

    @model_validator(mode="after")
    def _somebody_in_every_pool(self) -> DisaggOptions:
        pools = {"prefill": self.prefill, "decode": self.decode} if self.mode == "split" else {"unified": self.decode}
        for worker in self.workers:
            if worker.role not in pools:
                raise ValueError(f"workers: mode {self.mode} has no {worker.role} workers, only {' and '.join(pools)}")
            pools[worker.role] += 1
        for role, count in pools.items():
            if not count:
                setting = "decode" if role == "unified" else role
                raise ValueError(f"there would be no {role} worker: set {setting} to 1, or name one in workers")
        if self.workers and self.secret is None:
            raise ValueError("workers on other hosts join with a secret: set secret to ${NAME}, the same on every host")
        if self.tls is not None and self.transport == "nixl":
            raise ValueError("tls does not cover NIXL's reads: take transport tcp, or leave tls out")
        return self


PROVIDER_OPTIONS: dict[str, type[BaseModel]] = {
    "openai": OpenAIOptions,
    "anthropic": AnthropicOptions,
    "disagg": DisaggOptions,
}
