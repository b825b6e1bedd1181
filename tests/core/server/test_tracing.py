"""Traces: into the SDK's memory, and over HTTP to a collector that reads OTLP."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from itertools import pairwise

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from server_harness import serving, until

from ds_runtime.errors import ConfigError
from ds_runtime.platform.probe import install_command
from ds_runtime.server.observe.tracing import Tracing, start_tracing

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "kept-out-of-traces"


@pytest.fixture(scope="module")
def memory():
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def traced(bpe_folder, memory):
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(1.0)))
    provider.add_span_processor(SimpleSpanProcessor(memory))
    with serving(bpe_folder, tell=[Tracing(provider, "fake")]) as one:
        yield one


def spans_of(memory, count=4):
    """{name: span} once there are as many."""
    until(lambda: len(memory.get_finished_spans()) >= count)
    found = {span.name: span for span in memory.get_finished_spans()}
    memory.clear()
    return found


def test_a_request_is_one_span_with_its_parts(traced, memory):
    messages = [{"role": "user", "content": f"[say {SECRET}]"}]
    reply = traced.http.post(
        "/v1/chat/completions",
        json={"messages": messages, "temperature": 0.5, "max_tokens": 9, "seed": 3},
        headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"},
    )
    spans = spans_of(memory)
    assert spans.keys() == {"chat fake", "queue", "prefill", "decode"}
    request = spans["chat fake"]
    assert f"{request.context.trace_id:032x}" == TRACE
    assert f"{request.parent.span_id:016x}" == PARENT
    found, usage = dict(request.attributes), reply.json()["usage"]
    assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 9
    assert found["gen_ai.usage.cache_read.input_tokens"] == 4
    assert found["gen_ai.response.finish_reasons"] == ("length",)
    assert found["gen_ai.request.temperature"] == 0.5 and found["gen_ai.request.seed"] == 3
    assert found["gen_ai.response.id"] == reply.json()["id"]
    assert (
        found["http.route"] == "/v1/chat/completions" and found["ds_runtime.request_id"] == "mine"
    )
    known = {v for v in vars(gen_ai_attributes).values() if isinstance(v, str)}
    assert {name for name in found if name.startswith("gen_ai.")} <= known
    assert SECRET not in "".join(span.to_json() for span in spans.values())

    parts = [spans[name] for name in ("queue", "prefill", "decode")]
    assert all(part.parent.span_id == request.context.span_id for part in parts)
    assert (
        abs(parts[0].start_time - request.start_time) < 1000
        and parts[-1].end_time == request.end_time
    )
    for one, other in pairwise(parts):
        assert one.start_time <= one.end_time == other.start_time
    first = found["gen_ai.response.time_to_first_chunk"]
    assert abs((parts[1].end_time - request.start_time) / 1e9 - first) < 1e-3


def test_what_the_client_does_not_sample_is_not_kept(traced, memory):
    traced.http.get("/v1/models")  # generates nothing
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    traced.http.post("/v1/completions", json={"prompt": "[say a]"}, headers=headers)
    headers["traceparent"] = "not-a-parent"
    traced.http.post("/v1/completions", json={"prompt": "[say b]"}, headers=headers)
    spans = spans_of(memory)
    assert "text_completion fake" in spans and spans["text_completion fake"].parent is None


def test_a_client_that_left_is_an_error(traced, memory):
    body = {"prompt": "[go on ]", "stream": True, "max_tokens": 4000}
    with traced.http.stream("POST", "/v1/completions", json=body) as reply:
        next(reply.iter_lines())
    span = spans_of(memory)["text_completion fake"]
    assert not span.status.is_ok and span.attributes["error.type"] == "client_gone"
    assert span.attributes["gen_ai.request.stream"] is True


class Collector(http.server.BaseHTTPRequestHandler):
    """Keeps what an exporter posts."""

    def do_POST(self):
        raw = self.rfile.read(int(self.headers["content-length"]))
        self.server.found.append((self.path, ExportTraceServiceRequest.FromString(raw)))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


def test_a_collector_gets_them(bpe_folder, monkeypatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "none")
    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as collector:
        collector.found = []
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        tracing = start_tracing(f"http://127.0.0.1:{collector.server_port}", "fake")
        with serving(bpe_folder, tell=[tracing]) as served:
            served.chat("[say x]")
        tracing.close()
        collector.shutdown()
    ((path, request),) = collector.found
    assert path == "/v1/traces"
    (resource,) = request.resource_spans
    said = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert said["service.name"] == "ds-runtime" and said["deployment.environment"] == "test"
    names = [span.name for scope in resource.scope_spans for span in scope.spans]
    assert sorted(names) == ["chat fake", "decode", "prefill", "queue"]


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "grpc://x", "http://"])
def test_an_endpoint_that_is_none(endpoint):
    with pytest.raises(ConfigError, match=r"--otlp-endpoint .*must be like http"):
        start_tracing(endpoint, "x")


CODE = """
import sys
SDK = ("opentelemetry.sdk", "opentelemetry.exporter")  # the API may be there for others
from ds_runtime.server.observe import tracing
from ds_runtime.server import serve
assert not [name for name in sys.modules if name.startswith(SDK)]
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("opentelemetry"):
            raise ImportError(f"No module named {name!r}")
sys.meta_path.insert(0, Missing())
try:
    tracing.start_tracing("http://127.0.0.1:4318", "x")
except tracing.ConfigError as e:
    print(e)
"""


def test_nothing_is_imported_when_off_and_the_remedy_is_told_when_missing():
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert f"{install_command('otel')}, or leave it out" in done.stdout
