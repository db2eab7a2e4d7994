"""The workers that a provider's options ask for: on this host, and behind nodes on others."""

from __future__ import annotations

import secrets

import msgspec

from backends.base import BackendError
from backends.disagg.control import own_address, parse_address
from backends.disagg.handle import WorkerHandle
from backends.disagg.lives import RemoteLife, cores
from backends.disagg.messages import Role, TLSFiles, WorkerConfig
from backends.models import ModelFiles
from backends.options import DisaggOptions

LEASE_S = 60.0
"""How long a prompt's KV is kept for a decode worker that is not heard of."""


class Roster:
    """`mark`: the model's fingerprint; `context`: the longest prompt and answer, in tokens."""

    def __init__(self, options: DisaggOptions, files: ModelFiles, mark: str, context: int) -> None:
        self._options = options
        self._files = files
        self._mark = mark
        self._context = context
        self._secret = secrets.token_hex(16) if options.secret is None else options.secret.get_secret_value()
        self._threads = options.threads or len(cores())
        """Of each worker here."""
        self._kv_host = ""
        if options.secret is not None:
            farthest = parse_address(options.workers[0].address)[0] if options.workers else "192.0.2.1"
            self._kv_host = options.kv_host or own_address(farthest)

    def workers(self) -> list[WorkerHandle]:
        """All of them, prefill first, with this machine's cores divided among those that are here."""
        options = self._options
        split = options.mode == "split"
        decode_role: Role = "decode" if split else "unified"
        local: list[Role] = ["prefill" for _ in range(options.prefill if split else 0)]
        local += [decode_role for _ in range(options.decode)]
        usable = cores()
        self._threads = threads = options.threads or max(1, len(usable) // max(1, len(local)))
        workers: list[WorkerHandle] = []
        for index, role in enumerate(local):
            config = self._config(free_name(role, workers), role)
            cpus = [usable[(index * threads + i) % len(usable)] for i in range(threads)] if options.pin else None
            workers.append(WorkerHandle(msgspec.structs.replace(config, threads=threads, cpus=cpus)))
        for remote in options.workers:
            workers.append(self.another(free_name(remote.role, workers), remote.role, remote.address))
        return sorted(workers, key=lambda worker: worker.role != "prefill")

    def another(self, name: str, role: Role, address: str | None = None) -> WorkerHandle:
        """One more worker: a process here, or behind the node at `address`. Raises BackendError (400, 409)."""
        config = self._config(name, role)
        if address is None:
            return WorkerHandle(msgspec.structs.replace(config, threads=self._threads))
        if self._options.secret is None:
            raise BackendError(
                "workers on other hosts join with a secret, and this provider has none",
                status=409,
                hint="set secret: ${NAME} in the policy, and give the same one to splitroute worker",
            )
        try:
            parse_address(address)
        except ValueError as error:
            raise BackendError(f"address {error}", status=400, param="address") from None
        ca = None if self._options.tls is None else str(self._options.tls.ca)
        transport = self._options.transport
        elsewhere = msgspec.structs.replace(config, transport="tcp" if transport == "shm" else transport)
        return WorkerHandle(elsewhere, RemoteLife(address, self._secret, ca), address)

    def _config(self, name: str, role: Role) -> WorkerConfig:
        options, tls = self._options, self._options.tls
        return WorkerConfig(
            name=name,
            role=role,
            model=self._files.name,
            model_path=str(self._files.path),
            model_kind=self._files.kind,
            fingerprint=self._mark,
            device=options.device,
            dtype=options.dtype,
            block_size=options.block_size,
            kv_tokens=options.kv_tokens,
            max_model_len=self._context,
            max_batch=options.max_batch,
            prefill_chunk=options.prefill_chunk,
            prefix_cache=options.prefix_cache,
            quantization=options.quantization,
            threads=options.threads or 0,
            cpus=None,
            transport=options.transport,
            kv_host=self._kv_host,
            kv_port=0,
            kv_codec=options.kv_codec,
            secret=self._secret,
            lease_s=LEASE_S,
            spill_tokens=options.kv_tokens if options.spill_tokens is None else options.spill_tokens,
            tls=None if tls is None else TLSFiles(str(tls.cert), str(tls.key), str(tls.ca)),
        )


def free_name(role: Role, workers: list[WorkerHandle]) -> str:
    """`role` and the first number that nobody in that role's line has."""
    names = {worker.name for worker in workers}
    return next(f"{role}-{number}" for number in range(len(names) + 1) if f"{role}-{number}" not in names)
