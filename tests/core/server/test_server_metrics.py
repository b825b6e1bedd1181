"""What /metrics says, read by Prometheus' own parser; request ids on every answer."""

from __future__ import annotations

import time

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_harness import serving, until

from ds_runtime.engine.messages import Stats, Tokens
from ds_runtime.server.metrics import EngineView, Metrics, Timer
from ds_runtime.server.observe.engine_metrics import STATS

PLAN = {
    "digest": "abc",
    "platform": "cpu",
    "rows": [
        {"op": "linear", "kernel": "cpu.linear", "provider": "cpu", "sites": ["lm_head"]},
        {"op": "linear", "kernel": "cpu.linear", "provider": "cpu", "sites": ["layers.0.mlp"]},
        {"op": "rms_norm", "kernel": "reference.rms_norm", "provider": "reference", "sites": []},
    ],
}


def scrape(text):
    """{(sample, labels without the model's and engine 0's): value}; every family is declared."""
    out = {}
    for family in text_string_to_metric_families(text):
        assert family.type != "unknown", family.name
        for sample in family.samples:
            usual = {("model_name", sample.labels.get("model_name")), ("engine", "0")}
            labels = dict(sample.labels.items() - usual)
            out[sample.name.removeprefix("ds_runtime_"), *sorted(labels.items())] = sample.value
    return out


def read(served):
    return scrape(served.http.get("/metrics").text)


def view(stats=Stats, ready=lambda: None, alive=lambda: True):
    return EngineView(stats, ready, alive)


def test_a_request_is_counted_by_what_it_was(bpe_folder):
    with serving(bpe_folder) as served:
        before = read(served)
        assert before["engine_up",] == 1
        body = served.chat("[say one two three]", n=2).json()
        generated = body["usage"]["completion_tokens"]
        until(lambda: read(served)["generation_tokens_total",] == generated)
        found = read(served)
    for name in (
        "e2e_request_latency_seconds",
        "time_to_first_token_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_time_per_output_token_seconds",
    ):
        assert found[f"{name}_count",] == 1, name
    assert found["request_prompt_tokens_sum",] == body["usage"]["prompt_tokens"]
    assert found["request_generation_tokens_sum",] == generated
    assert found["inter_token_latency_seconds_count",] == generated - 2  # but for the first ones
    assert found["request_success_total", ("finished_reason", "stop")] == 2
    whole = found["e2e_request_latency_seconds_sum",]
    parts = ("queue", "prefill", "decode")
    assert sum(found[f"request_{p}_time_seconds_sum",] for p in parts) <= whole
    assert "process_resident_memory_bytes" in {key[0] for key in found}


def test_the_engine_s_figures_and_its_plan(fake_ready):
    stats = Stats(
        running=3,
        waiting=2,
        pages_total=10,
        pages_free=4,
        pages_cached=1,
        prompt_tokens=100,
        cached_tokens=40,
        generated_tokens=7,
        preemptions=1,
        broken=2,
        verified=5,
        draft_tokens=10,
        accepted_tokens=8,
        snapshots_total=40,
        snapshots_kept=9,
        snapshot_hits=21,
        snapshots_evicted=6,
        host_pages_total=80,
        host_pages_kept=30,
        cached_host_tokens=16,
        host_loaded_bytes=5000,
        host_load_seconds=0.5,
        wire_bytes=2.5e9,
        expert_tokens={3: [5, 0], 4: [1, 4]},
        sums={"one_shot": 12, "all_reduce": 3},
        sum_bytes={"one_shot": 4096.0, "all_reduce": 1e9},
        skew_steps=4,
        skew_seconds=0.5,
        rank_late={0: 0.0, 1: 0.5},
    )
    found = scrape(Metrics([view(lambda: stats, lambda: fake_ready)], "m").text().decode())
    assert found["num_requests_running",] == 3 and found["num_requests_waiting",] == 2
    assert found["kv_cache_usage_perc",] == 0.5
    assert found["prefix_cache_hits_total",] / found["prefix_cache_queries_total",] == 0.4
    assert found["generation_tokens_total",] == 7 and found["num_preemptions_total",] == 1
    assert found["corrupted_requests_total",] == 2
    drafted = found["spec_decode_num_draft_tokens_total",]
    assert found["spec_decode_num_accepted_tokens_total",] / drafted == 0.8
    assert found["spec_decode_num_drafts_total",] == 5
    assert found["state_snapshots",] == 40 and found["state_snapshots_kept",] == 9
    assert found["state_snapshot_hits_total",] == 21
    assert found["state_snapshots_evicted_total",] == 6
    assert found["host_pages",] == 80 and found["host_pages_kept",] == 30
    assert found["prefix_cache_host_hits_total",] == 16
    assert found["host_loaded_bytes_total",] / found["host_load_seconds_total",] == 10_000
    assert found["received_bytes_per_rank_total",] == 2.5e9
    for kind, count in stats.sums.items():
        assert found["all_reduces_total", ("kind", kind)] == count
        nbytes = found["all_reduce_bytes_per_rank_total", ("kind", kind)]
        assert nbytes == stats.sum_bytes[kind]
    assert found["skew_seconds_total",] / found["skew_steps_total",] == 0.125
    for rank, late in stats.rank_late.items():
        assert found["rank_late_seconds_total", ("rank", str(rank))] == late
    chosen = {key[1:]: n for key, n in found.items() if key[0] == "expert_tokens_total"}
    assert chosen == {
        (("expert", str(e)), ("layer", str(layer))): n
        for layer, some in stats.expert_tokens.items()
        for e, n in enumerate(some)
    }
    kernels = [dict(key[1:]) for key in found if key[0] == "kernel_info"]
    assert kernels == [  # one per op and kernel, however many the sites
        {"op": "linear", "kernel": "cpu.linear", "provider": "cpu"},
        {"op": "rms_norm", "kernel": "reference.rms_norm", "provider": "reference"},
    ]
    plans = [dict(key[1:]) for key in found if key[0] == "plan_info"]
    assert plans[0]["digest"] == "abc" and plans[0]["platform"] == "cpu"


@pytest.fixture
def fake_ready():
    from fake_engine import READY

    return msgspec.structs.replace(READY, plan=PLAN)


def test_no_figure_of_the_engine_is_forgotten():
    named = {
        "compilations",
        "expert_tokens",
        "sums",
        "sum_bytes",
        "rank_late",
    }  # have labels of their own
    assert {field for field, *_ in STATS} | named == set(Stats.__struct_fields__)


def test_an_engine_that_loads_or_died_is_not_up(fake_ready):
    for ready, alive in ((None, True), (fake_ready, False)):
        one = Metrics([view(ready=lambda r=ready: r, alive=lambda a=alive: a)], "m")
        assert scrape(one.text().decode())["engine_up",] == 0


def test_what_requests_say_makes_no_series(served):
    before = set(read(served))
    secret = "hidden-in-the-request"
    for path in (f"/{secret}", f"/v1/models/{secret}", f"/v1/responses/{secret}"):
        served.http.get(path, headers={"x-request-id": secret})
    served.chat(f"[say {secret}]", user=secret, rid=secret, model=secret)
    served.chat(f"[say {secret}]", user=secret, rid=secret)
    text = served.http.get("/metrics").text
    assert secret not in text
    new = {key for key in set(scrape(text)) - before if not key[0].endswith("_created")}
    assert {key[0] for key in new} <= {"http_requests_total", "request_success_total"}


def test_the_time_of_an_answer_has_three_parts():
    metrics = Metrics([view()], "m")
    timer = Timer(metrics, time.perf_counter() - 1.0)
    timer.tokens("a", 1, 0.25)
    assert timer.queued == pytest.approx(0.75, abs=0.1) and timer.prefill == 0.25
    timer.tokens("a", 2, None)
    timer.close(5, 3)
    timer.close(5, 3)
    found = scrape(metrics.text().decode())
    assert found["e2e_request_latency_seconds_count",] == 1
    assert found["request_prefill_time_seconds_sum",] == 0.25
    assert found["inter_token_latency_seconds_count",] == 1  # a gap, by its number of tokens


def test_an_engine_s_clock_that_disagrees_does_no_harm():
    timer = Timer(Metrics([view()], "m"), time.perf_counter())
    timer.tokens("a", 1, 1e6)
    assert 0 <= timer.queued < 1e-6


def test_tokens_without_a_prefill_time_are_read_as_before():
    raw = msgspec.msgpack.encode(
        {"type": "Tokens", "rid": "a", "tokens": [1]}  # as an older engine sends it
    )
    assert msgspec.msgpack.decode(raw, type=Tokens).prefill_seconds is None


@pytest.mark.parametrize("path", ["/health", "/nothing", "/v1/models", "/v1/models/other"])
def test_every_answer_has_a_request_id(served, path):
    reply = served.http.get(path, headers={"x-request-id": "trace/1:a-b_c"})
    assert reply.headers["x-request-id"] == "trace/1:a-b_c"
    made = {served.http.get(path).headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2 and all(m.startswith("req-") for m in made)


@pytest.mark.parametrize("bad", ["a b", "a" * 129, 'quo"te', "semi;colon", ""])
def test_an_id_that_logs_would_have_to_quote_is_replaced(served, bad):
    reply = served.http.get("/health", headers={"x-request-id": bad})
    assert reply.headers["x-request-id"].startswith("req-")


def test_refusals_and_failures_have_a_request_id_too(bpe_folder):
    def plugin(app):
        @app.get("/breaks")
        async def breaks():
            raise ValueError("a bug")

    with serving(
        bpe_folder, api_key=("k",), routes_of=plugin, cors_origins=("http://a",)
    ) as served:
        mine = {"x-request-id": "mine"}
        refused = served.http.get("/v1/models", headers=mine)
        assert (refused.status_code, refused.headers["x-request-id"]) == (401, "mine")
        good = {**mine, "authorization": "Bearer k", "origin": "http://a"}
        broken = served.http.get("/breaks", headers=good)
        assert (broken.status_code, broken.headers["x-request-id"]) == (500, "mine")
        seen = served.http.get("/v1/models", headers=good)
        assert seen.headers["access-control-expose-headers"] == "x-request-id"
        counted = ("http_requests_total", ("route", "/breaks"), ("status", "500"))
        assert read(served)[counted] == 1
