"""An engine that is killed, and a server that is told to leave: real processes, real signals."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import httpx
import psutil
import pytest
from server_harness import until
from test_server_serve import read_errors, read_until, started

from ds_runtime.config import ServerConfig
from ds_runtime.errors import ConfigError, EngineDeadError
from ds_runtime.server.engines.client import EngineClient
from ds_runtime.server.engines.restarts import Lives
from ds_runtime.server.errors import DrainingError


def chat(order, **body):
    return {"messages": [{"role": "user", "content": order}], **body}


class Running:
    """A server's process with its engine's, and a client of it."""

    def __init__(self, process):
        self.process = process
        self.engine()
        self.url = read_until(process, r"serving \S+ at (http://\S+)")[1]
        self.http = httpx.Client(base_url=self.url, timeout=30)

    def engine(self):
        self.pid = int(read_until(self.process, r"engine (\d+)")[1])

    def health(self):
        reply = self.http.get("/health")
        return reply.status_code, reply.json()

    def asks(self, order, path="/v1/chat/completions", **body):
        """Starts a request in a thread; `box` gets its answer once it is there."""
        box = []
        thread = threading.Thread(
            target=lambda: box.append(httpx.post(self.url + path, json=chat(order, **body)))
        )
        thread.start()
        return thread, box

    def wait_running(self, count):
        def running():
            return self.http.get("/server_info").json()["stats"]["running"] == count

        until(running)


@pytest.fixture
def run(bpe_folder):
    """Starts one server; `run(mode, **config)`."""

    def start(mode="works", **config):
        served = Running(stack.enter_context(started(bpe_folder, mode, **config)))
        stack.callback(served.http.close)
        return served

    with contextlib.ExitStack() as stack:
        yield start


def test_a_killed_engine_is_restarted_and_its_requests_told(run):
    served = run()
    whole, box = served.asks("[go on ]")
    body = chat("[go on ]", stream=True)
    with served.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        served.wait_running(2)
        os.kill(served.pid, signal.SIGKILL)
        said = "".join(lines)
    whole.join(10)
    for text in (said, box[0].text):
        assert "the engine has stopped: engine rank 0 left with exit code -9" in text
        assert "the server restarts it: try again" in text
    assert '"status":503' in said and '"code":"engine_dead"' in said
    assert box[0].status_code == 503
    read_errors(served.process, r"the engine has stopped: .*-9; restart 1 of 3 in 0\.5 s")
    until(lambda: served.health()[1]["status"] in ("restarting", "ok"))
    before = served.pid
    served.engine()
    assert served.pid != before and not psutil.pid_exists(before)
    read_until(served.process, "serving")
    assert served.health() == (200, {"status": "ok"})
    reply = served.http.post("/v1/chat/completions", json=chat("[say here again]"))
    assert reply.json()["choices"][0]["message"]["content"] == "here again"
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(15) == 0


@pytest.mark.slow
def test_restarts_are_bounded_and_health_says_why(run, bpe_folder):
    served = run("dies later", max_engine_restarts=2)
    marker = bpe_folder / "died"
    marker.touch()
    try:
        os.kill(served.pid, signal.SIGKILL)
        until(lambda: served.health()[1]["status"] == "restarting")
        status, body = served.health()
        assert status == 503 and "exit code -9; restart 1 of 2" in body["reason"]
        reply = served.http.post("/v1/chat/completions", json=chat("[say x]"))
        assert reply.status_code == 503 and int(reply.headers["retry-after"]) > 0
        assert "is being restarted" in reply.json()["error"]["message"]
        read_errors(served.process, r"restart 1 of 2 in 0\.5 s")
        read_errors(served.process, r"exit code 4; restart 2 of 2 in 1 s")
        read_errors(served.process, r"exit code 4; the server exits")
        status, body = served.health()
        assert (status, body["status"]) == (503, "dead") and "exit code 4" in body["reason"]
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(15) == 1
    finally:
        marker.unlink()


@pytest.mark.slow
def test_a_signal_ends_the_wait_for_a_restart(run, bpe_folder):
    served = run("dies later")
    (bpe_folder / "died").touch()
    try:
        os.kill(served.pid, signal.SIGKILL)
        read_errors(served.process, "restart 2 of 3")
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(15) == 0
    finally:
        (bpe_folder / "died").unlink()


def test_sigterm_drains_then_stops(run):
    served = run()
    text = "abcdefgh" * 40
    thread, box = served.asks(f"[go {text}]", max_tokens=500)
    served.wait_running(1)
    served.process.send_signal(signal.SIGTERM)
    read_errors(served.process, "shutting down: 1 requests may take 20 s more")
    assert served.health() == (503, {"status": "draining"})
    refused = served.http.post("/v1/chat/completions", json=chat("[say x]"))
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
    thread.join(20)
    body = box[0].json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 500
    assert served.process.wait(15) == 0


@pytest.mark.slow
def test_the_grace_has_a_limit(run):
    served = run(shutdown_timeout=0.3)
    thread, box = served.asks("[hang]")
    served.wait_running(1)
    begin = time.monotonic()
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(15) == 0, "and not after the usual 20 s"
    assert time.monotonic() - begin > 0.25
    thread.join(5)
    assert box[0].status_code == 503
    assert box[0].json()["error"]["code"] == "shutting_down", "and not that it may try again"


def test_what_follows_is_what_is_true_when_the_engine_dies():
    """Not when it was started: the limit may be reached or forgotten since, the server leaving."""
    client, told = EngineClient("ipc://a", "ipc://b"), []
    client.outlook = lambda: told.pop()
    client.fail("it fell")
    for outlook in ("the server restarts it", "the server exits"):
        told.append(outlook)
        with pytest.raises(EngineDeadError, match=f"it fell; {outlook}"):
            client.require()
    client.end()
    with pytest.raises(EngineDeadError, match="it fell; the server is shutting down"):
        client.require()
    other = EngineClient("ipc://a", "ipc://b")
    other.end()
    with pytest.raises(DrainingError, match="this request has ended"):
        other.require()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_engine_restarts": -1}, "--max-engine-restarts -1: must be at least 0"),
        ({"shutdown_timeout": -0.5}, "--shutdown-timeout -0.5: must be from 0 to 1000000"),
    ],
)
def test_limits_are_checked(fields, said):
    with pytest.raises(ConfigError, match=said):
        ServerConfig(**fields)
    with pytest.raises(ConfigError, match="restart, exit"):
        ServerConfig(on_engine_death="shrug")


def test_a_long_life_forgets_the_restarts_before_it(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    folders = []
    lives = Lives(folders.append, ServerConfig(max_engine_restarts=2))
    assert [lives.delay(), lives.delay()] == [0.5, 1.0] and not lives.may_go_on()
    lives.ready()
    now[0] += 599
    assert not lives.may_go_on() and lives.outlook() == "the server exits"
    now[0] += 1
    assert lives.may_go_on() and lives.delay() == 0.5
    lives.renew()
    assert folders[0] != folders[1] and not folders[0].exists() and folders[1].exists()
    lives.close()
    assert not folders[1].exists()
