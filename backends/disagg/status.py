"""A cluster described: for /health and `splitroute cluster status`, and in numbers for /metrics."""

from __future__ import annotations

from typing import Any

from backends.base import Sample
from backends.disagg.cluster import Cluster
from backends.disagg.handle import WorkerHandle


def described(cluster: Cluster) -> dict[str, Any]:
    """JSON-ready."""
    return {
        "workers": [_worker(worker) for worker in cluster.workers],
        "transfers": [
            {
                "pair": f"{source.name} → {target.name}",
                "alarm": pair.alarm,
                "count": pair.transfers,
                "megabytes_per_s": round(pair.bytes_per_s / 1e6),
                "recent_exposed_ms": [round(seconds * 1000, 1) for seconds in pair.recent],
            }
            for (source, target), pair in cluster.pools.pairs.items()
        ],
        "placed": dict(cluster.pools.placed),
        "recoveries": cluster.recoveries,
    }


def _worker(worker: WorkerHandle) -> dict[str, Any]:
    started, state = worker.started, worker.state
    return {
        "name": worker.name,
        "role": worker.role,
        "address": worker.address,
        "pid": started.pid if started else None,
        "state": "down" if started is None else "draining" if worker.draining else "up",
        "active": len(worker.active),
        "decoding": worker.decoding,
        "prompt_backlog_tokens": worker.prompt_backlog,
        "kept_prompts": state.held if state else None,
        "cached_blocks": len(worker.cached),
        "free_blocks": state.free_blocks if state else None,
        "dtype": started.dtype if started else None,
        "speed": _speed(worker),
    }


def _speed(worker: WorkerHandle) -> dict[str, float] | None:
    """As measured, in the words of a target's `speed:`, so that a simulation can be told."""
    if not any(worker.step):
        return None
    base, stream, context, prompt, pairs = worker.step
    per_1k = {"step_ms_per_1k_context": context, "prompt_ms_per_1k": prompt, "prompt_ms_per_1k_pairs": pairs}
    return {
        "step_ms": round(base * 1e3, 4),
        "step_ms_per_stream": round(stream * 1e3, 4),
        **{name: round(seconds * 1e6, 4) for name, seconds in per_1k.items()},
    }


def samples(cluster: Cluster) -> list[Sample]:
    """Counters hold over a worker's deaths, as far as it had told."""
    found = [Sample("recoveries_total", "counter", "Requests that went on elsewhere", cluster.recoveries)]
    for kind, count in cluster.pools.placed.items():
        about = "Requests by where the prompt was computed: split, whole on one worker, or whole as a pool had nobody"
        found.append(Sample("placements_total", "counter", about, count, {"kind": kind}))
    for worker in cluster.workers:
        by = {"worker": worker.name}
        found += [
            Sample("worker_up", "gauge", "Whether the worker serves", worker.up, by),
            Sample("prefill_tokens_total", "counter", "Prompt tokens computed", worker.prefilled_tokens, by),
            Sample(
                "replayed_tokens_total",
                "counter",
                "Tokens of answers computed again to go on after a worker was lost",
                worker.replayed_tokens,
                by,
            ),
            Sample("prompt_backlog_tokens", "gauge", "Prompt tokens still to compute", worker.prompt_backlog, by),
            Sample("decoding_sequences", "gauge", "Answers being decoded", worker.decoding, by),
        ]
        if worker.state is not None:
            found.append(Sample("kv_free_blocks", "gauge", "KV blocks nobody owns", worker.state.free_blocks, by))
            found.append(Sample("kv_kept_prompts", "gauge", "Prompts' KV kept for decode", worker.state.held, by))
    for (source, target), pair in cluster.pools.pairs.items():
        by = {"pair": f"{source.name} → {target.name}"}
        found.append(Sample("kv_transfer_alarm", "gauge", "1 while hand-overs take more than 50 ms", pair.alarm, by))
        found.append(Sample("kv_transfer_bytes_per_second", "gauge", "As measured", pair.bytes_per_s, by))
    return found
