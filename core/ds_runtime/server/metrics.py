"""Prometheus metrics: what clients experience, the engine's own counters, and what was bound.

Names and the labels `model_name` and `engine`, the number of a replica, are those that operators
know; docs/metrics.md has the table.
Labels come from the operator or this code, never from a request, so their number is bounded. A
token costs one observation; everything else is counted once per request, or read when asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ds_runtime._version import __version__
from ds_runtime.engine.messages import Ready, Stats
from ds_runtime.server.observe.engine_metrics import STATS

_OF_RANKS = (
    (
        "all_reduces",
        "sums",
        "kind",
        "sums over ranks, by arithmetic, by the kind that serves as many rows as the step has; "
        "without sums of draft layers",
    ),
    (
        "all_reduce_bytes_per_rank",
        "sum_bytes",
        "kind",
        "bytes of all-reduces that each rank received from the others, by arithmetic: without "
        "sums of draft layers, and with all rows in the last layer's FFN",
    ),
    (
        "rank_late_seconds",
        "rank_late",
        "rank",
        "how much later than the first rank each came to the collectives of the steps that "
        "ds_runtime_skew_steps_total counts",
    ),
)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_TOKENS = (*(float(m * 10**e) for e in range(6) for m in (1, 2, 5)), 1e6)


@dataclass(frozen=True, slots=True)
class EngineView:
    """What the metrics see of the engine: functions that tell its state now."""

    stats: Callable[[], Stats]
    ready: Callable[[], Ready | None]
    alive: Callable[[], bool]
    restarts: Callable[[], int] = lambda: 0


class Metrics:
    """One server's metrics, in a registry of their own. `engines`: its replicas, by number."""

    def __init__(
        self, engines: Sequence[EngineView], model: str, text_ended: Callable[[], int] = lambda: 0
    ) -> None:
        self._model = model
        self.registry = CollectorRegistry()
        self.registry.register(_Engines(engines, model, text_ended))
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "ds_runtime_http_requests",
            "HTTP requests by route and status",
            ["route", "status"],
            registry=self.registry,
        )
        self._finished = Counter(
            "ds_runtime_request_success",
            "choices by how they ended (abort: the client left, or an error)",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.dropped = Counter(
            "ds_runtime_kept_dropped",
            "responses and threads that were dropped to make room for others",
            registry=self.registry,
        )
        self.clamped = Counter(
            "ds_runtime_clamped_requests",
            "prompts whose limit of tokens was above what the context had left, and became that",
            registry=self.registry,
        )
        one = self._histogram
        self.first_token = one("time_to_first_token_seconds", "arrival to first token", _SECONDS)
        self.token_gap = one(
            "inter_token_latency_seconds", "time per token after a choice's first", _GAP
        )
        self.duration = one(
            "e2e_request_latency_seconds", "arrival to the end of the answer", _SECONDS
        )
        self.queue = one("request_queue_time_seconds", "arrival to the first step's plan", _SECONDS)
        self.prefill = one(
            "request_prefill_time_seconds", "the first step's plan to the first token", _SECONDS
        )
        self.decode = one("request_decode_time_seconds", "first token to the last", _SECONDS)
        self.per_token = one(
            "request_time_per_output_token_seconds", "mean time per token after the first", _GAP
        )
        self.prompt = one("request_prompt_tokens", "prompt tokens of a request", _TOKENS)
        self.generated = one(
            "request_generation_tokens", "generated tokens of a request, all choices", _TOKENS
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"ds_runtime_{name}", text, ["model_name"], buckets=buckets, registry=self.registry
        ).labels(self._model)

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """A gauge that is read when it is asked for."""
        Gauge(f"ds_runtime_{name}", text, registry=self.registry).set_function(value)

    def finished(self, reason: str) -> None:
        """A choice has ended: by itself, or as `abort`."""
        self._finished.labels(self._model, reason).inc()

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


class Timer:
    """The clock of one client request with its choices. Times are those of `time.perf_counter`.

    begin: when the request arrived. `first`: its first token; `prefill`: seconds that the engine
    took for it, from the plan of its first step on.
    """

    def __init__(self, metrics: Metrics, begin: float) -> None:
        self._metrics = metrics
        self.begin = begin
        self.first: float | None = None
        self.end: float | None = None
        self.prefill = 0.0
        self._last: dict[str, float] = {}

    def tokens(self, rid: str, count: int, prefill: float | None) -> None:
        """`count` more tokens of a choice have come; `prefill` with its first."""
        if count == 0:
            return
        now = time.perf_counter()
        last = self._last.get(rid)
        if last is not None:
            self._metrics.token_gap.observe((now - last) / count)
        elif self.first is None:
            self.first = now
            self.prefill = min(prefill or 0.0, now - self.begin)
            self._metrics.first_token.observe(now - self.begin)
        self._last[rid] = now

    @property
    def queued(self) -> float:
        """Seconds from arrival to the plan of the first step. Only once there is a first token."""
        assert self.first is not None
        return self.first - self.begin - self.prefill

    def close(self, prompt_tokens: int, generated: int) -> None:
        """The answer is over. May be called twice."""
        if self.end is not None:
            return
        self.end = time.perf_counter()
        metrics = self._metrics
        metrics.duration.observe(self.end - self.begin)
        metrics.prompt.observe(prompt_tokens)
        metrics.generated.observe(generated)
        if self.first is None:
            return
        decode = max(self._last.values()) - self.first
        metrics.queue.observe(self.queued)
        metrics.prefill.observe(self.prefill)
        metrics.decode.observe(decode)
        # Choices run side by side: a mean over all of them is that of each.
        if (later := generated - len(self._last)) > 0:
            metrics.per_token.observe(decode * len(self._last) / later)


class _Engines(Collector):
    """Every engine's latest Stats and its state, and their plan, which is one; work on text."""

    def __init__(
        self, engines: Sequence[EngineView], model: str, text_ended: Callable[[], int]
    ) -> None:
        self._engines, self._model, self._text_ended = engines, model, text_ended

    def collect(self) -> Iterator[Metric]:
        every = [(str(n), engine, engine.stats()) for n, engine in enumerate(self._engines)]
        for field, name, kind, text in STATS:
            yield self._family(kind, name, text, {n: getattr(s, field) for n, _, s in every})
        yield self._family(
            GaugeMetricFamily,
            "kv_cache_usage_perc",
            "share of the KV pages that running requests hold, 0 to 1",
            {n: _usage(stats) for n, _, stats in every},
        )
        yield self._family(
            GaugeMetricFamily,
            "engine_up",
            "1 while the engine can serve",
            {n: int(e.ready() is not None and e.alive()) for n, e, _ in every},
        )
        yield self._family(
            CounterMetricFamily,
            "engine_restarts",
            "starts of the engine after its first",
            {n: engine.restarts() for n, engine, _ in every},
        )
        chosen = CounterMetricFamily(
            "ds_runtime_expert_tokens",
            "with --expert-metrics: tokens of rank 0's sequences that chose a routed expert; "
            "the last layer counts only tokens that need logits; refused drafts count, too",
            labels=["model_name", "engine", "layer", "expert"],
        )
        for n, _, stats in every:
            for layer, counts in stats.expert_tokens.items():
                for expert, count in enumerate(counts):
                    chosen.add_metric([self._model, n, str(layer), str(expert)], count)
        yield chosen
        yield from self._of_ranks(every)
        made = CounterMetricFamily(
            "ds_runtime_kernel_compilations",
            "kernels that were compiled, at the start and later; what comes later delays requests",
            labels=["model_name", "engine", "compiler", "kernel"],
        )
        for n, _, stats in every:
            for key, count in stats.compilations.items():
                compiler, _, kernel = key.partition(" ")
                made.add_metric([self._model, n, compiler, kernel], count)
        yield made
        ended = CounterMetricFamily(
            "ds_runtime_text_work_ended",
            "chat templates and tokenizers that were stopped in a request: they took too long, or "
            "too much memory",
            labels=["model_name"],
        )
        ended.add_metric([self._model], self._text_ended())
        yield ended
        yield _info("build", "the version of the runtime", [{"version": __version__}])
        ready = next((r for _, engine, _ in every if (r := engine.ready()) is not None), None)
        if ready is not None:
            yield from _plan(ready)

    def _of_ranks(self, every: Sequence[tuple[str, EngineView, Stats]]) -> Iterator[Metric]:
        """All-reduces, by the kind that served them, and how late each rank was."""
        for name, field, label, text in _OF_RANKS:
            found = CounterMetricFamily(
                f"ds_runtime_{name}", text, labels=["model_name", "engine", label]
            )
            for n, _, stats in every:
                for key, value in getattr(stats, field).items():
                    found.add_metric([self._model, n, str(key)], value)
            yield found

    def _family(
        self, kind: type[Metric], name: str, text: str, values: Mapping[str, float]
    ) -> Metric:
        family = kind(f"ds_runtime_{name}", text, labels=["model_name", "engine"])  # type: ignore[call-arg]
        sample = family.name + ("_total" if kind is CounterMetricFamily else "")
        for engine, value in values.items():
            family.add_sample(sample, {"model_name": self._model, "engine": engine}, value)
        return family


def _usage(stats: Stats) -> float:
    used = stats.pages_total - stats.pages_free - stats.pages_cached
    return used / stats.pages_total if stats.pages_total else 0.0


def _plan(ready: Ready) -> Iterator[Metric]:
    """What was bound: the same for a plan's life, so the values are all 1."""
    plan = ready.plan
    said = ("digest", "platform", "arch", "dtype", "kv_layout")
    yield _info(
        "plan",
        "the plan: its digest, platform and formats",
        [{key: str(plan.get(key, "")) for key in said}],
    )
    rows = {(r["op"], r["kernel"], r["provider"]): None for r in plan.get("rows", ())}
    kernels = [{"op": op, "kernel": kernel, "provider": by} for op, kernel, by in rows]
    yield _info("kernel", "the kernels that serve each op", kernels)


def _info(name: str, text: str, values: list[dict[str, str]]) -> Metric:
    family = InfoMetricFamily(f"ds_runtime_{name}", text)
    for labels in values:
        family.add_sample(f"ds_runtime_{name}_info", labels, 1)
    return family
