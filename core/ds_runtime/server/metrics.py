"""Prometheus metrics: what clients experience, and the engine's own counters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ds_runtime.engine.messages import Stats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_GAUGES = {
    "running": "requests that the engine runs",
    "waiting": "requests that wait in the engine",
    "pages_total": "KV pages",
    "pages_free": "KV pages that hold nothing",
    "pages_cached": "KV pages that only the prefix cache holds",
}
_COUNTERS = {
    "prompt_tokens": "prompt tokens, cached ones included",
    "generated_tokens": "generated tokens",
    "cached_tokens": "prompt tokens taken from the prefix cache",
    "preemptions": "requests that gave their pages back to go on later",
    "steps": "engine steps",
    "step_seconds": "time in engine steps",
}


class Metrics:
    """One server's metrics, in a registry of their own."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Engine(stats))
        self.requests = Counter(
            "ds_runtime_http_requests",
            "HTTP requests by route and status",
            ["route", "status"],
            registry=self.registry,
        )
        self.finished = Counter(
            "ds_runtime_choices_finished",
            "choices by how they ended (abort: the client left, or an error)",
            ["reason"],
            registry=self.registry,
        )
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "arrival to first token", _SECONDS
        )
        self.token_gap = self._histogram(
            "inter_token_seconds", "time per token after the first", _GAP
        )
        self.duration = self._histogram(
            "request_seconds", "arrival to the end of the answer", _SECONDS
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"ds_runtime_{name}", text, buckets=buckets, registry=self.registry)

    def start(self, prompt_tokens: int) -> Timer:
        """Time one client request."""
        return Timer(self)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


class Timer:
    """The clock of one client request with its choices."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._begin = time.perf_counter()
        self._last: dict[str, float] = {}
        self._closed = False

    def tokens(self, rid: str, count: int) -> None:
        """`count` more tokens of a choice have come."""
        if count == 0:
            return
        now = time.perf_counter()
        last = self._last.get(rid)
        if last is None:
            self._metrics.first_token.observe(now - self._begin)
        else:
            self._metrics.token_gap.observe((now - last) / count)
        self._last[rid] = now

    def finished(self, reason: str) -> None:
        """A choice has ended: by itself, or as `abort`."""
        self._metrics.finished.labels(reason).inc()

    def close(self) -> None:
        """The answer is over. May be called twice."""
        if not self._closed:
            self._closed = True
            self._metrics.duration.observe(time.perf_counter() - self._begin)


class _Engine(Collector):
    """The engine's latest Stats as metrics."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"ds_runtime_{name}", text, value=getattr(stats, name))
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"ds_runtime_{name}", text, value=getattr(stats, name))


class CountRequests:
    """ASGI middleware: one count per answered request, by route pattern and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on and note the status."""

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Unknown paths share one label: clients must not be able to make new series.
                route = getattr(scope.get("route"), "path", "other")
                self._metrics.requests.labels(route, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, note if scope["type"] == "http" else send)
