"""The log of a server in a process of its own: its lines, what they hold and what they never do."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from server_harness import serving, until

from ds_runtime.config import ServerConfig
from ds_runtime.errors import ConfigError
from ds_runtime.server.observe.log import logging_to
from ds_runtime.server.observe.request_record import current_id

MAIN = Path(__file__).with_name("serve_main.py")
SECRET = "the-secret-of-7391"


@contextlib.contextmanager
def logged(folder, tmp_path, **settings):
    """(a client, the lines of the log so far). What the server writes goes to files."""
    out, err = tmp_path / "out", tmp_path / "err"
    arguments = [str(folder), "0", "works", json.dumps(settings)]
    with out.open("w") as one, err.open("w") as other:
        process = subprocess.Popen([sys.executable, MAIN, *arguments], stdout=one, stderr=other)
        try:
            address = re.compile(r"serving \S+ at (http://[\d.:]+)")
            until(lambda: address.search(out.read_text()) or process.poll() is not None, 30)
            url = address.search(out.read_text())[1]
            with httpx.Client(base_url=url, timeout=20) as http:
                until(lambda: http.get("/health").status_code == 200)
                yield http, lambda: (out.read_text() + err.read_text()).splitlines()
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
        finally:
            process.kill()
            process.wait()


def chat(http, order, **body):
    messages = [{"role": "user", "content": order}]
    return http.post("/v1/chat/completions", json={"messages": messages, **body})


def test_json_lines_hold_the_facts_and_no_prompt(bpe_folder, tmp_path):
    settings = {"log_format": "json", "log_level": "debug", "api_key": ("k-" + SECRET,)}
    with logged(bpe_folder, tmp_path, **settings) as (http, lines):
        http.headers["authorization"] = "Bearer k-" + SECRET
        known = {"x-request-id": "mine-1"}
        reply = http.post(
            f"/v1/chat/completions?q={SECRET}",
            json={"messages": [{"role": "user", "content": f"[say {SECRET}]"}], "n": 2},
            headers=known,
        )
        assert SECRET in reply.text
        usage = reply.json()["usage"]
        assert chat(http, f"[say {SECRET}]", nonsense=SECRET).status_code == 400
        http.get(f"/v1/models?key={SECRET}", headers={"authorization": "Bearer wrong"})
        with http.stream(
            "POST",
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "[go on ]"}], "stream": True},
            headers={"x-request-id": "left-early"},
        ) as stream:
            next(stream.iter_lines())
        until(lambda: any("left-early" in line for line in lines()))
    said = "\n".join(lines())
    assert SECRET not in said
    objects = [json.loads(line) for line in lines() if line.startswith("{")]
    access = {o["request_id"]: o for o in objects if o["logger"] == "ds_runtime.access"}
    mine = access["mine-1"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", mine["time"])
    assert (mine["method"], mine["route"], mine["status"]) == (
        "POST",
        "/v1/chat/completions",
        200,
    )
    assert mine["client"] == "127.0.0.1" and mine["level"] == "info"
    assert mine["answer_id"] == reply.json()["id"] and mine["choices"] == 2
    assert mine["prompt_tokens"] == usage["prompt_tokens"]
    assert mine["completion_tokens"] == usage["completion_tokens"]
    assert mine["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert mine["finish_reasons"] == ["stop"] and mine["stream"] is False
    assert 0 <= mine["queue_seconds"] <= mine["ttft_seconds"] <= mine["seconds"]
    gone = access["left-early"]
    assert gone["client_gone"] is True and gone["finish_reasons"] == ["abort"]
    assert {o["status"] for o in access.values()} >= {200, 400, 401}
    health = [o for o in access.values() if o["route"] == "/health"]
    assert health and {o["level"] for o in health} == {"debug"}


def said(capfd):
    """What went to standard output and standard error."""
    return "".join(capfd.readouterr())


def test_text_lines_for_people(bpe_folder, capfd):
    with serving(bpe_folder) as served, logging_to(ServerConfig()):
        served.chat(f"[say {SECRET}]")
        served.http.get("/no\u2028such%0Apath%1b[31m")
        served.http.get("/health")
    text = said(capfd)
    assert SECRET not in text
    found = text.splitlines()
    assert len(found) == 2, "health at level info is quiet"
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO access \[req-\w{32}\] 127\.0\.0\.1 POST "
        r"/v1/chat/completions 200 in \d\.\d{3} s, \d+ tokens in \(4 cached\), \d+ out, stop, "
        r"first token after \d\.\d{3} s",
        found[0],
    )
    assert r"GET /no\u2028such\npath\x1b[31m 404 in" in found[1]


@pytest.mark.parametrize("settings", [{"access_log": False}, {"log_level": "warning"}])
def test_the_access_log_can_be_off(served, capfd, settings):
    with logging_to(ServerConfig(**settings)):
        served.chat("[say x]")
        served.http.get("/nothing")
    assert said(capfd) == ""


def test_a_bug_is_told_with_its_request(bpe_folder, capfd):
    def plugin(app):
        @app.get("/breaks")
        async def breaks():
            raise ValueError("a bug")

    with serving(bpe_folder, routes_of=plugin) as served:
        with logging_to(ServerConfig(log_format="json")):
            served.http.get("/breaks", headers={"x-request-id": "mine"})
            served.http.get("/health")  # the traceback is written when the answer is sent already
        lines = [json.loads(line) for line in said(capfd).splitlines()]
    assert all(line["request_id"] == "mine" for line in lines)
    access = [line for line in lines if line["logger"] == "ds_runtime.access"]
    assert [(a["status"], a["level"]) for a in access] == [(500, "warning")]
    (trace,) = (line for line in lines if "exception" in line)
    assert trace["exception"].endswith("ValueError: a bug")


def test_levels_are_checked():
    with pytest.raises(ConfigError, match="--log-level 'loud': must be one of debug, info, warn"):
        ServerConfig(log_level="loud")


def test_a_failure_comes_with_its_request_and_traceback(capfd):
    token = current_id.set("req-1")
    try:
        with logging_to(ServerConfig(log_format="json")):
            try:
                raise ValueError("broken\nhere")
            except ValueError:
                logging.getLogger("uvicorn.error").exception("it failed")
            logging.getLogger("uvicorn.error").info("not said")
            logging.getLogger("ds_runtime.server").info("said")
    finally:
        current_id.reset(token)
    out, err = capfd.readouterr()
    (failed,) = (json.loads(line) for line in err.splitlines())
    assert failed["request_id"] == "req-1" and failed["level"] == "error"
    assert failed["exception"].startswith("Traceback") and failed["message"] == "it failed"
    assert json.loads(out)["message"] == "said"


SLOW_READER = """
import logging, os, time
from ds_runtime.config import ServerConfig
from ds_runtime.server.observe.log import logging_to
log = logging.getLogger("ds_runtime.test")
with logging_to(ServerConfig()):
    begin = time.monotonic()
    for i in range(12000):
        log.info("line %d %s", i, "x" * 100)
    os.write(2, f"{time.monotonic() - begin:.3f}\\n".encode())  # at once: the log writes there, too
"""


def before_the_time(process):
    """(standard error up to the seconds that the logging took, these); gaps may be told before."""
    lines = []
    while not re.fullmatch(r"[\d.]+\n", line := process.stderr.readline()):
        assert "lines were dropped" in line
        lines.append(line)
    return "".join(lines), float(line)


def test_a_reader_that_stalls_holds_up_nobody():
    """Its pipe is full after 64 KiB: lines that fit nowhere are dropped, and the end comes."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_READER],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert before_the_time(process)[1] < 30
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def test_lines_that_were_dropped_are_told(tmp_path):
    code = SLOW_READER + "    time.sleep(2)\n"
    with (tmp_path / "err").open("w+") as err:  # not a pipe: gaps may be told at any time
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=err, text=True
        )
        try:
            while not re.search(r"^[\d.]+$", (tmp_path / "err").read_text(), re.MULTILINE):
                assert process.poll() is None
                time.sleep(0.05)
            out, _ = process.communicate(timeout=30)
        finally:
            process.kill()
            process.wait()
    said = (tmp_path / "err").read_text()
    dropped = re.findall(r"WARNING server\.observe\.log (\d+) log lines were dropped", said)
    assert dropped and len(out.splitlines()) + sum(map(int, dropped)) == 12000
