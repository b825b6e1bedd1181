"""Several engines behind one server, and one of them that falls or hangs while others serve."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_harness import serving, until
from test_server_serve import read_errors, read_until, started

from ds_runtime.config import EngineConfig, ServerConfig
from ds_runtime.engine.messages import Stats
from ds_runtime.errors import ConfigError
from ds_runtime.server.engines.replicas import Replicas
from ds_runtime.server.engines.supervisor import Watchdog

PROMPT = "a beginning that many requests share " * 20


@pytest.fixture(scope="module")
def pair(bpe_folder):
    with serving(bpe_folder, replicas=2) as one:
        yield one


def submits(served):
    return [len(engine.submits) for engine in served.engines]


def jobs(served):
    return [len(engine.jobs) for engine in served.engines]


@contextlib.contextmanager
def running(served, **body):
    """A request that goes on until the block ends."""
    asked = {"prompt": "[go on ]", "max_tokens": 3000, "stream": True, **body}
    with served.http.stream("POST", "/v1/completions", json=asked) as reply:
        lines = reply.iter_lines()  # which ends the request when it is forgotten
        next(lines)
        yield
    until(lambda: not any(e.jobs for e in served.engines if e.alive))


def ask(served, prompt, **body):
    reply = served.post("/v1/completions", prompt=prompt, max_tokens=2, **body)
    assert reply.status_code == 200, reply.text


def test_requests_go_where_the_least_is_under_way(pair):
    with running(pair, n=2):
        busy = jobs(pair).index(2)
        before = submits(pair)
        for _ in range(3):
            ask(pair, "[say so]")
        after = submits(pair)
        assert after[busy] == before[busy] and after[1 - busy] == before[1 - busy] + 3
    before = submits(pair)
    ask(pair, ["[say a]", "[say b]", "[say c]", "[say d]"])  # the prompts of one request, too
    assert [b - a for a, b in zip(before, submits(pair), strict=True)] == [2, 2]


def test_a_known_beginning_is_sent_where_it_was_unless_too_much_is_there(pair):
    pair.post("/flush_cache")
    ask(pair, PROMPT + "[say so]")
    home = submits(pair)
    for tail in range(3):
        ask(pair, f"{PROMPT}[say {tail}]")
    moved = [b - a for a, b in zip(home, submits(pair), strict=True)]
    assert sorted(moved) == [0, 3]
    here = moved.index(3)
    with running(pair, prompt=PROMPT + "[go on ]", n=20):
        assert jobs(pair)[here] == 20
        before = submits(pair)
        ask(pair, PROMPT + "[say that]")
        assert submits(pair)[here] == before[here], "20 are far more than none"
    ask(pair, PROMPT + "[say this]")
    assert submits(pair)[1 - here] == before[1 - here] + 2, "it knows it now"


def test_aborts_reach_the_engine_that_runs_the_choice(pair):
    aborted = [len(engine.aborted) for engine in pair.engines]
    with running(pair, prompt=["[go a]", "[go b]"], rid="both"):
        assert jobs(pair) == [1, 1]
        pair.post("/abort_request", rid="both")
        until(lambda: jobs(pair) == [0, 0])
    assert [len(e.aborted) for e in pair.engines] == [n + 1 for n in aborted]


def test_what_is_for_all_reaches_all(pair):
    flushes = [engine.flushes for engine in pair.engines]
    assert pair.post("/flush_cache").json() == {"pages_freed": 14}
    assert [engine.flushes for engine in pair.engines] == [n + 1 for n in flushes]
    load = {"lora_name": "a", "lora_path": "/adapters/a"}
    assert pair.post("/v1/load_lora_adapter", **load).json()["adapters"] == ["a"]
    assert [engine.adapters for engine in pair.engines] == [["a"], ["a"]]
    ask(pair, "[say so]", model="a")
    pair.engines[1].refuses = "full"  # one alone
    reply = pair.post("/v1/load_lora_adapter", lora_name="b", lora_path="/adapters/b")
    assert reply.status_code == 400 and "full" in reply.json()["error"]["message"]
    until(lambda: pair.engines[0].adapters == ["a"])
    pair.engines[1].refuses = ""
    assert pair.post("/v1/unload_lora_adapter", lora_name="a").status_code == 200
    assert [engine.adapters for engine in pair.engines] == [[], []]


def test_metrics_have_one_series_per_engine_and_the_info_their_sum(pair):
    def generated():
        found = text_string_to_metric_families(pair.http.get("/metrics").text)
        (family,) = (f for f in found if f.name == "ds_runtime_generation_tokens")
        return {s.labels["engine"]: s.value for s in family.samples}

    ask(pair, ["[say a]", "[say b]"])
    until(lambda: generated() == {str(n): e.generated for n, e in enumerate(pair.engines)})
    total = pair.http.get("/server_info").json()["stats"]["generated_tokens"]
    assert total == sum(engine.generated for engine in pair.engines)


def test_the_info_sums_every_counter_whatever_its_type():
    def stats(number):
        named = {"triton shared": number, f"nvrtc of {number}": 1}
        fields = Stats.__struct_fields__
        told = {name: number * i for i, name in enumerate(fields, 1)} | {"compilations": named}
        return SimpleNamespace(stats=Stats(**told))

    for numbers in ((3,), (3, 5)):
        total = Replicas([stats(n) for n in numbers]).stats
        named = {"triton shared": sum(numbers)} | {f"nvrtc of {n}": 1 for n in numbers}
        for i, name in enumerate(Stats.__struct_fields__, 1):
            wanted = named if name == "compilations" else i * sum(numbers)
            assert getattr(total, name) == wanted, name


def test_one_that_dies_takes_only_its_own_along(bpe_folder):
    with serving(bpe_folder, replicas=2) as served, running(served):
        alive = jobs(served).index(1)
        reply = served.chat("[die x]")
        assert reply.status_code == 503 and "signal 9" in reply.json()["error"]["message"]
        health = served.http.get("/health")
        assert health.status_code == 200
        assert list(health.json()["down"]) == [str(1 - alive)]
        before = submits(served)[alive]
        for _ in range(2):
            ask(served, "[say so]")
        assert submits(served)[alive] == before + 2


def engines(process, count):
    """Process ids by number of the replica, as they start."""
    found = [read_until(process, r"engine (\d+) replica (\d)") for _ in range(count)]
    return {int(line[2]): int(line[1]) for line in found}


def until_ok(http, count):
    until(lambda: len(http.get("/health").json().get("down", ())) == count)


def test_a_killed_replica_comes_back_while_the_other_serves(bpe_folder):
    with started(bpe_folder, dp=2) as process:
        pids = engines(process, 2)
        read_until(process, "replicas  2")
        url = read_until(process, r"serving \S+ at (http://\S+)")[1]
        body = {"prompt": "[go on ]", "max_tokens": 4000, "stream": True}
        with httpx.Client(base_url=url, timeout=20) as http:
            with (
                http.stream("POST", "/v1/completions", json=body) as first,
                http.stream("POST", "/v1/completions", json=body) as second,
            ):
                lines = [first.iter_lines(), second.iter_lines()]
                for one in lines:
                    next(one)
                os.kill(pids[1], signal.SIGKILL)
                read_errors(
                    process, r"replica 1: engine rank 0 left with exit code -9; restart 1 of"
                )
                http.post("/v1/completions", json={"prompt": "[say so]"}).raise_for_status()
                said = next(text for one in lines for text in one if "engine_dead" in text)
                assert "the server restarts it: try again" in said
            assert engines(process, 1).keys() == {1}
            read_until(process, r"serving")
            until_ok(http, 0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0


@pytest.mark.slow
def test_a_replica_that_dies_for_good_ends_the_server_once_others_are_done(bpe_folder):
    with started(bpe_folder, dp=2, on_engine_death="exit") as process:
        pids = engines(process, 2)
        url = read_until(process, r"serving \S+ at (http://\S+)")[1]
        body = {"prompt": "[go on ]", "max_tokens": 300}
        body |= {"stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as reply:
            lines = reply.iter_lines()
            next(lines)
            os.kill(pids[1], signal.SIGKILL)  # the first request is the other's
            read_errors(process, "replica 1: .* -9; the server exits")
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        assert process.wait(15) == 1


def test_an_engine_that_hangs_is_started_anew(bpe_folder):
    with started(bpe_folder, watchdog_timeout=0.4) as process:
        (pid,) = engines(process, 1).values()
        url = read_until(process, r"serving \S+ at (http://\S+)")[1]
        with httpx.Client(base_url=url, timeout=20) as http:
            os.kill(pid, signal.SIGSTOP)
            reply = http.post("/v1/completions", json={"prompt": "[say so]"})
            assert reply.status_code == 503
            said = reply.json()["error"]["message"]
            assert "it hangs: no sign for 0.4 s (--watchdog-timeout)" in said
            assert "the server restarts it" in said
            read_until(process, "traced 0")
            read_errors(process, "it hangs: .*; restart 1 of 3")
            assert engines(process, 1)[0] != pid
            read_until(process, "serving")
            assert http.post("/v1/completions", json={"prompt": "[say so]"}).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0


class Client:
    heard = 0
    awaits = True


def test_the_watchdog_counts_neither_idle_time_nor_its_own_sleep(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    client = Client()
    dog, never = Watchdog(client, 3.0), Watchdog(client, 0)

    def passes(seconds):
        now[0] += seconds
        return dog.hangs()

    assert not passes(100.0)  # this process was stopped
    assert not passes(1.0) and not passes(1.0) and passes(0.5)
    client.heard += 1
    assert not passes(1.0) and not passes(1.0) and not passes(1.0)
    client.awaits = False
    assert not passes(1.0)
    client.awaits = True
    assert not any(passes(1.0) for _ in range(3)) and passes(1.0)
    assert not never.hangs()


def test_settings_are_checked():
    with pytest.raises(ConfigError, match=r"--watchdog-timeout -1: must be from 0"):
        ServerConfig(watchdog_timeout=-1.0)
    with pytest.raises(ConfigError, match=r"--dp 0: must be at least"):
        EngineConfig(dp=0)
