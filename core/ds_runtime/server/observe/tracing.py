"""OpenTelemetry traces: one span per generating request, made when it is over.

The spans' times are those that were noted anyway, so that a token costs nothing. `opentelemetry` is
imported here only when traces are on; its own variables (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER,
OTEL_EXPORTER_OTLP_HEADERS, …) work as everywhere.
"""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ds_runtime._version import __version__
from ds_runtime.errors import ConfigError
from ds_runtime.platform.probe import install_command
from ds_runtime.server.observe.request_record import Exchange

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from ds_runtime.server.generate.run import Run

_CLOSE_SECONDS = 1.0
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
}


class Tracing:
    """Makes the spans of exchanges. Call it when one is over; `close` sends what waits.

    A request span with children `queue`, `prefill` and `decode`; its parent is the client's, by
    W3C's `traceparent`, and whether it is kept is the sampler's to say.
    """

    def __init__(self, provider: TracerProvider, model: str) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace, self._provider, self._model = trace, provider, model
        self._tracer = provider.get_tracer("ds_runtime", __version__)
        self._context = TraceContextTextMapPropagator()

    def __call__(self, exchange: Exchange) -> None:
        """The spans of one exchange; those that generate nothing have none."""
        run = exchange.run
        if run is None:
            return
        kinds, status = self._trace.SpanKind, self._trace.Status
        operation = _OPERATIONS.get(exchange.route, "generate_content")
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._context.extract(exchange.headers),
            kind=kinds.SERVER,
            start_time=exchange.began,
            attributes=_attributes(exchange, run, operation, self._model),
        )
        if exchange.status >= 500 or exchange.gone:
            error = "client_gone" if exchange.gone else str(exchange.status)
            span.set_attribute("error.type", error)
            span.set_status(status(self._trace.StatusCode.ERROR))
        self._parts(exchange, run, self._trace.set_span_in_context(span))
        span.end(_ns(exchange, exchange.end))

    def _parts(self, exchange: Exchange, run: Run, context: Any) -> None:
        timer = run.timer
        times = [timer.begin, exchange.end]
        if timer.first is not None:
            times = [timer.begin, timer.begin + timer.queued, timer.first, exchange.end]
        for name, begin, end in zip(("queue", "prefill", "decode"), times, times[1:], strict=False):
            part = self._tracer.start_span(name, context, start_time=_ns(exchange, begin))
            part.end(_ns(exchange, end))

    def close(self) -> None:
        """Send what waits and end the exporter's thread; a collector that is away stops nobody."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(_CLOSE_SECONDS)


def _ns(exchange: Exchange, at: float) -> int:
    """A time of `perf_counter` in ns since 1970."""
    return exchange.began + int((at - exchange.begin) * 1e9)


def _attributes(exchange: Exchange, run: Run, operation: str, model: str) -> dict[str, Any]:
    """By the semantic conventions for generative AI and HTTP. No prompt, no answer."""
    params = run.choices[0].params
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "ds_runtime",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": run.id,
        "gen_ai.output.type": "text",
        "gen_ai.request.choice.count": len(run.choices),
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.seed": params.seed,
        "gen_ai.usage.input_tokens": run.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": run.cached_tokens,
        "gen_ai.usage.output_tokens": run.generated_tokens,
        "gen_ai.response.finish_reasons": [c.finish_reason or "abort" for c in run.choices],
        "http.request.method": exchange.method,
        "http.route": exchange.route,
        "http.response.status_code": exchange.status,
        "client.address": exchange.client,
        "ds_runtime.request_id": exchange.request_id,
        "gen_ai.request.stream": exchange.stream,
    }
    if run.timer.first is not None:
        waited = run.timer.first - run.timer.begin
        found["gen_ai.response.time_to_first_chunk"] = waited
    return {name: value for name, value in found.items() if value is not None}


def start_tracing(endpoint: str, model: str) -> Tracing:
    """Traces to an OTLP collector over HTTP; ConfigError without the packages."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"--otlp-endpoint {endpoint!r}: must be like http://127.0.0.1:4318")
    try:
        resources = importlib.import_module("opentelemetry.sdk.resources")
        sdk = importlib.import_module("opentelemetry.sdk.trace")
        batches = importlib.import_module("opentelemetry.sdk.trace.export")
        otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError as e:
        raise ConfigError(
            f"--otlp-endpoint {endpoint}: {e}; {install_command('otel')}, or leave it out"
        ) from e
    # What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say wins over these.
    named = {"service.name": "ds-runtime", "service.version": __version__}
    detected = resources.OTELResourceDetector().detect()
    resource = resources.Resource.create(named).merge(detected)
    path = "" if parts.path.rstrip("/") else "/v1/traces"
    exporter = otlp.OTLPSpanExporter(endpoint=endpoint.rstrip("/") + path)
    provider = sdk.TracerProvider(resource=resource)
    provider.add_span_processor(batches.BatchSpanProcessor(exporter))
    return Tracing(provider, model)
