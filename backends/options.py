"""What each provider type takes in a policy. Validated when the policy is loaded, before anything starts."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OpenAIOptions(_Options):
    """Any API that speaks OpenAI's wire format over HTTP."""

    base_url: str = Field("https://api.openai.com/v1", pattern=r"^https?://[^/\s]+")
    api_key: SecretStr | None = None
    organization: str | None = None
    headers: dict[str, str] = Field(default_factory=dict)
    connect_timeout_ms: int = Field(5000, gt=0)


class DisaggOptions(_Options):
    """The bundled prefill/decode cluster on this host."""

    model: str
    """A name from `splitroute model list`, a path to an HF folder or a .gguf file, or a Hub id `org/name`."""
    mode: Literal["split", "unified"] = "split"
    """`split`: prefill and decode in separate processes. `unified`: both in each `decode` worker."""
    disaggregate: Literal["adaptive", "always"] = "adaptive"
    """`adaptive`: a request is split where its transfer is predicted to cost less than it saves. `always`: whenever
    both pools have somebody."""
    planner: bool = False
    """Flip workers between the pools by load."""
    prefill: int = Field(1, ge=1, le=64)
    decode: int = Field(1, ge=1, le=64)
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


PROVIDER_OPTIONS: dict[str, type[BaseModel]] = {"openai": OpenAIOptions, "disagg": DisaggOptions}
