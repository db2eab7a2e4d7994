"""Prometheus metrics, in base units. Histogram edges of latencies are vLLM's, so that dashboards carry over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from backends.base import Sample
    from router.ledger import Record

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_TPOT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_E2E = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_RATIO = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.11, 1.25, 1.5, 2.0, 4.0, 10.0)
# An edge at 50 ms: past it a hand-over can be felt between two tokens.
_TRANSFER = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class _Samples(Collector):
    """Prometheus' view of what backends count themselves."""

    def __init__(self, samples: Callable[[], Iterable[tuple[str, Sample]]]) -> None:
        self._samples = samples

    def describe(self) -> list[Metric]:
        return []  # they depend on what is running; without this the registry would ask now

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for provider, sample in self._samples():
            family = families.setdefault(
                sample.name, Metric(f"splitroute_{sample.name.removesuffix('_total')}", sample.about, sample.kind)
            )
            family.add_sample(f"splitroute_{sample.name}", {"provider": provider, **sample.labels}, sample.value)
        yield from families.values()


M = TypeVar("M", Counter, Histogram)


class _Labelled(Generic[M]):
    """A metric's children by their labels. The client's own look-up takes longer than what is then counted."""

    def __init__(self, metric: M) -> None:
        self._metric: M = metric
        self._children: dict[tuple[str, ...], M] = {}

    def of(self, *labels: str) -> M:
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = self._metric.labels(*labels)
        return child


class Metrics:
    """One router's metrics, in a registry of its own: two routers in a process do not collide."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, about: str, *labels: str) -> _Labelled[Counter]:
            return _Labelled(Counter(f"splitroute_{name}", about, labels, registry=registry))

        def histogram(name: str, about: str, buckets: tuple[float, ...], *labels: str) -> _Labelled[Histogram]:
            return _Labelled(Histogram(f"splitroute_{name}", about, labels, buckets=buckets, registry=registry))

        self.in_flight = Gauge("splitroute_requests_in_flight", "Requests being served", registry=registry)
        self.queued = Gauge("splitroute_requests_queued", "Requests that wait for a full target", registry=registry)
        self.shed = Counter("splitroute_requests_shed_total", "Requests that a queue turned away", registry=registry)
        self._attempt_cost = counter("attempt_cost_usd_total", "Cost of all attempts, by why they were made", "kind")
        self._requests = counter("requests_total", "Requests by how they ended", "surface", "status", "error")
        self._decisions = counter(
            "routing_decisions_total", "Decisions by what was chosen first", "route", "class", "target", "choose"
        )
        self._attempts = counter("attempts_total", "Attempts at targets", "target", "status", "kind")
        self._ttft = histogram("time_to_first_token_seconds", "From arrival to first content", _TTFT, "target", "class")
        self._tpot = histogram(
            "time_per_output_token_seconds", "(end - first token) / (tokens - 1)", _TPOT, "target", "class"
        )
        self._e2e = histogram("request_seconds", "From arrival to the end of the answer", _E2E, "target", "class")
        self._tokens = counter("tokens_total", "Tokens by direction", "target", "direction")
        self._cost = counter("cost_usd_total", "Cost by the policy's prices", "target")
        self.mirrored = counter(
            "mirrored_requests_total", "Copies sent to mirrors, by how they ended", "target", "outcome"
        )
        self._ratio = histogram(
            "time_to_first_token_observed_over_predicted", "1 where the prediction was right", _RATIO, "target"
        )
        self._goals = counter(
            "goal_predictions_total",
            "Answers by the chance to meet their goals that was predicted, in tenths, and by whether they did",
            "target",
            "predicted",
            "met",
        )
        self._moved = counter("kv_transfer_bytes_total", "KV bytes handed from prefill to decode", "transport")
        self._phases = histogram("kv_transfer_seconds", "The phases of a KV hand-over", _TRANSFER, "phase", "pair")

    def observe(self, record: Record) -> None:
        """Count one finished request."""
        self._requests.of(record.surface, str(record.status), record.error or "").inc()
        for attempt in record.attempts:
            self._attempts.of(attempt.target, str(attempt.status), attempt.kind).inc()
            if attempt.cost_usd is not None:
                self._attempt_cost.of(attempt.kind).inc(attempt.cost_usd)
        decision = record.decision
        if decision is None:
            return
        if decision.order:
            self._decisions.of(decision.route, decision.class_name, decision.order[0], decision.choose).inc()
        if record.target is None:
            return
        by = (record.target, decision.class_name)
        if record.ttft_s is not None:
            self._ttft.of(*by).observe(record.ttft_s)
            if expected_ms := decision.predicted(record.target).ttft_ms:  # 0 where all of a prompt is cached
                self._ratio.of(record.target).observe(record.attempts[-1].seconds * 1000 / expected_ms)
        if record.met is not None and (chance := decision.predicted(record.target).p_meet) is not None:
            tenth = min(9, int(chance * 10)) / 10
            self._goals.of(record.target, f"{tenth:.1f}", "yes" if record.met else "no").inc()
        if record.tpot_s is not None:
            self._tpot.of(*by).observe(record.tpot_s)
        self._e2e.of(*by).observe(record.total_s)
        if record.usage is not None:
            self._tokens.of(record.target, "input").inc(record.usage.prompt_tokens)
            self._tokens.of(record.target, "output").inc(record.usage.completion_tokens)
        if record.cost_usd is not None:
            self._cost.of(record.target).inc(record.cost_usd)
        if (moved := record.transfer) is not None:
            self._moved.of(moved.transport).inc(moved.bytes)
            for phase in ("queue", "alloc", "wire", "codec", "exposed"):
                pair = f"{moved.prefill} → {moved.decode}"
                self._phases.of(phase, pair).observe(getattr(moved, f"{phase}_s"))

    def add_source(self, samples: Callable[[], Iterable[tuple[str, Sample]]]) -> None:
        """Show what providers count themselves too: (provider, sample) each time somebody asks."""
        self._registry.register(_Samples(samples))

    def text(self) -> bytes:
        """The exposition format, for GET /metrics."""
        return generate_latest(self._registry)
