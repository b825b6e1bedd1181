"""Too few file descriptors: the start says so, and while serving each request is answered."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import subprocess
import sys
import time

import httpx
import psutil
import pytest
from server_harness import serving
from test_server_serve import read_until, started

from ds_runtime.config import EngineConfig
from ds_runtime.errors import ConfigError
from ds_runtime.server.http import descriptors

LONG = b'{"prompt": "[go on ]", "stream": true, "max_tokens": 4000}'
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n"
)
REFUSED = b"HTTP/1.1 503 Service Unavailable"


def asking(url: str) -> socket.socket:
    """A client that has connected and sent its request."""
    at = httpx.URL(url)
    raw = socket.create_connection((at.host, at.port), timeout=10)
    raw.sendall(HEAD % len(LONG) + LONG)
    return raw


@pytest.mark.parametrize("soft", [40, 100, 151])
def test_a_start_with_too_few_is_refused(soft: int) -> None:
    line = f"ulimit -n {soft}; exec {sys.executable} -P -m ds_runtime serve --port 0"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    said = done.stderr.splitlines()
    assert len(said) == 1 and said[0].startswith(f"ds-runtime: limit of open files {soft}: serve ")
    assert "needs at least 152: raise it, as by ulimit -n 1024" in said[0]


@pytest.mark.parametrize("settings", [{}, {"dp": 2}, {"tp": 2}, {"dp": 3}])
def test_what_a_server_needs_leaves_room_for_connections(settings, monkeypatch) -> None:
    """The numbers were counted on servers of the demo model, which had so many open."""
    counted = {"{}": 40, "{'dp': 2}": 55, "{'tp': 2}": 42, "{'dp': 3}": 70}[str(settings)]
    config = EngineConfig(**settings)
    for allowed in range(1, 400):
        monkeypatch.setattr(descriptors, "limit", lambda allowed=allowed: allowed)
        try:
            descriptors.check_limit(config)
        except ConfigError as e:
            wanted = int(re.search(r"at least (\d+)", str(e))[1])
            assert allowed < wanted
        else:
            assert allowed == wanted and allowed - counted >= 100
            return
    raise AssertionError


def test_the_limit_is_raised_and_the_log_says_so(bpe_folder) -> None:
    hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 4096)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, before[1]))
    try:
        with started(bpe_folder) as process:
            said = read_until(process, r"may open (\d+) files at once, up from (\d+) \(ulimit -n\)")
            now = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            assert now[0] == min(now[1], 1 << 20) == int(said[1]) > int(said[2]) == hard - 1
            engine = int(read_until(process, r"engine (\d+) replica")[1])
            assert resource.prlimit(engine, resource.RLIMIT_NOFILE) == now
            read_until(process, r"serving \S+ at http://\S+")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("clients", [21, 40, 200])
def test_each_of_a_crowd_of_requests_is_answered(clients, bpe_folder, monkeypatch, caplog) -> None:
    """Each on a connection of its own; none is dropped, and one line says what is lacking."""
    monkeypatch.setattr(descriptors, "connections", lambda: (20, 128))
    with serving(bpe_folder) as served, contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(asking(served.url)) for _ in range(clients)]
        heads = [one.recv(4096) for one in crowd]
        refused = [
            head + one.recv(4096)
            for head, one in zip(heads, crowd, strict=True)
            if head.startswith(REFUSED)
        ]
        assert sum(head.startswith(b"HTTP/1.1 200 OK") for head in heads) == 20
        assert len(refused) == clients - 20
        for head in refused:
            assert b"retry-after: 1" in head.lower() and b'"too_many_connections"' in head
        said = [r for r in caplog.records if "no descriptor is left" in r.getMessage()]
        assert len(said) == 1
        stack.close()
        deadline = time.monotonic() + 10
        while served.http.get("/health").status_code != 200:
            assert time.monotonic() < deadline


def test_a_process_that_has_used_up_its_descriptors_says_so_and_serves_again(bpe_folder) -> None:
    with started(bpe_folder) as process:
        url = read_until(process, r"serving \S+ at (http://\S+)")[1]
        with httpx.Client(base_url=url, timeout=10) as http:
            assert http.get("/health").status_code == 200
        whole = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        numbers = [int(name) for name in os.listdir(f"/proc/{process.pid}/fd")]
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (max(numbers) + 4, whole[1]))
        for _ in range(30):
            with httpx.Client(base_url=url, timeout=10) as http:
                reply = http.get("/health")
            assert reply.status_code == 503 and reply.headers["retry-after"] == "1"
            assert reply.json()["error"]["code"] == "too_many_connections"
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, whole)
        with httpx.Client(base_url=url, timeout=10) as http:
            assert http.get("/health").status_code == 200
        assert psutil.Process(process.pid).num_fds() <= len(numbers) + 4
        process.terminate()
        said = process.communicate(timeout=30)[1]
        assert said.count("no descriptor is left for more connections") == 1
