"""A worker's process: `python -m backends.disagg.process FD`, started by the coordinator.

FD is its end of a socket pair. When the other end closes, however the coordinator died, this process exits
at once; its memory has no names, so nothing is left behind.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from backends.disagg.engine.engine import Engine, EngineConfig
from backends.disagg.messages import (
    LENGTH,
    MAX_MESSAGE_BYTES,
    StartFailed,
    WorkerConfig,
    decode_config,
    decode_to_worker,
    frame,
)
from backends.disagg.transfer.nixl import NixlError
from backends.disagg.worker import Event, Worker
from backends.models import ModelError, ModelFiles, load_config, load_tokenizer
from backends.models.weights import load_weights

if TYPE_CHECKING:
    from backends.disagg.engine.grammar import Grammars


def _receive(control: socket.socket) -> bytes:
    """The next message's body. Exits the process where the coordinator is gone."""
    (length,) = LENGTH.unpack(_receive_exactly(control, LENGTH.size))
    if length > MAX_MESSAGE_BYTES:
        os._exit(1)
    return _receive_exactly(control, length)


def _receive_exactly(control: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        try:
            piece = control.recv(count - len(data))
        except OSError:
            piece = b""
        if not piece:
            os._exit(0)
        data += piece
    return bytes(data)


def _read_control(control: socket.socket, inbox: queue.SimpleQueue[Event]) -> None:
    while True:
        inbox.put(decode_to_worker(_receive(control)))


def _load(config: WorkerConfig) -> Engine:
    torch.set_num_threads(config.threads)
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"device {device!r}: torch finds no CUDA device here", hint="set device to auto or cpu")
    files = ModelFiles(config.model, Path(config.model_path), config.model_kind)
    model = load_config(files)
    engine = Engine(
        model,
        load_weights(files, model),
        EngineConfig(
            dtype=resolve_dtype(config.dtype, device),
            device=device,
            block_size=config.block_size,
            kv_tokens=config.kv_tokens,
            max_model_len=config.max_model_len,
            max_batch=config.max_batch,
            prefill_chunk=config.prefill_chunk,
            prefix_cache=config.prefix_cache,
            quantization=config.quantization,
        ),
    )
    # Before measuring: the first touch of a page takes longer than attention over what is in it.
    engine.cache.prefault()
    engine.measure()
    return engine


def _grammars(config: WorkerConfig) -> Grammars:
    """Only where a request asks for a form: reading the vocabulary takes seconds."""
    from backends.disagg.engine.grammar import Grammars

    tokenizer = load_tokenizer(ModelFiles(config.model, Path(config.model_path), config.model_kind))
    return Grammars(tokenizer.to_json(), tokenizer.vocab_size, tokenizer.eos_token_ids)


def resolve_dtype(dtype: str, device: str) -> str:
    """`auto` is bfloat16 where the processor or GPU computes in it, else float32."""
    if dtype != "auto":
        return dtype
    if device.startswith("cuda"):
        return "bfloat16"
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "float32"
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"


def main() -> None:
    """Run the worker on the inherited socket whose descriptor is the only argument."""
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's to handle
    config = decode_config(_receive(control))
    logging.basicConfig(level=logging.WARNING, format=f"%(levelname)s {config.name}: %(message)s")
    if config.cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, config.cpus)
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    threading.Thread(target=_read_control, args=(control, inbox), name="control", daemon=True).start()
    try:
        worker = Worker(config, _load(config), control, inbox, lambda: _grammars(config))
    except Exception as error:
        if isinstance(error, ModelError | NixlError):
            failed = StartFailed(error.message, error.hint)
        else:
            failed = StartFailed(f"{type(error).__name__}: {error}", None)
        control.sendall(frame(failed))
        sys.exit(1)
    try:
        worker.run()
    finally:
        sys.stdout.flush()
    os._exit(0)  # daemon threads may hold locks that a tidy interpreter exit would wait for


if __name__ == "__main__":
    main()
