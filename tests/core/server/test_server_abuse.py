"""Clients that stall, drip, crowd, vanish and pry, over real sockets: others are served on."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import time
from functools import partial

import httpx
import psutil
import pytest
from server_harness import serving, until
from test_server_serve import read_until, started

from ds_runtime.server.http import bodies, descriptors
from ds_runtime.server.http.guard import OPEN_PATHS

CHAT = {"messages": [{"role": "user", "content": "[say fine]"}]}
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n"
)


def fine(served):
    """Others are served."""
    reply = served.post("/v1/chat/completions", **CHAT)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == "fine"


@contextlib.contextmanager
def connected(served, receive_buffer=None):
    url = httpx.URL(served.url)
    with socket.socket() as raw:
        if receive_buffer is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        raw.settimeout(10)
        raw.connect((url.host, url.port))
        yield raw


def test_no_answer_leads_where_the_host_header_says(served, bpe_folder):
    for path in ("/metrics/", "/v1/models", "/v1/chat/completions/", "//elsewhere.example/"):
        reply = served.http.get(path, headers={"host": "elsewhere.example"}, follow_redirects=False)
        assert reply.status_code == 403 and "location" not in reply.headers
        assert "elsewhere.example:" not in reply.text
        with serving(bpe_folder, allowed_hosts=("*",)) as trusting:
            reply = trusting.http.get(path, headers={"host": "elsewhere.example"})
            assert reply.status_code in (200, 404, 405) and "location" not in reply.headers
            assert "elsewhere.example:" not in reply.text


def post(raw, path, value):
    data = json.dumps(value).encode()
    raw.sendall(HEAD.replace(b"/v1/completions", path.encode()) % len(data) + data)


def everything(raw):
    """What comes until the server ends the connection."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while part := raw.recv(1 << 16):
            answer += part
    return answer


def ended(raw):
    """Whether the server has dropped the connection; what came before is thrown away."""
    try:
        while raw.recv(1 << 16):
            pass
    except OSError:
        return True
    return True


@pytest.fixture(scope="module")
def hasty(bpe_folder):
    """A server with little patience and small buffers."""
    with serving(bpe_folder, client_timeout=1.2, send_buffer=1 << 14, max_body=16 << 20) as one:
        yield one


def test_a_stream_that_nobody_reads_is_ended(hasty):
    aborted = len(hasty.engine.aborted)
    with connected(hasty, receive_buffer=1 << 12) as raw:
        body = {"prompt": "[go on ]", "stream": True, "max_tokens": 4000, "logprobs": 20}
        post(raw, "/v1/completions", body)
        fine(hasty)
        hasty.wait_aborted(aborted + 1)
    fine(hasty)


def test_an_answer_that_nobody_reads_is_dropped(hasty):
    with connected(hasty, receive_buffer=1 << 12) as raw:
        post(raw, "/detokenize", {"tokens": [300] * 500_000})
        until(lambda: open_connections(hasty) >= 2)
        fine(hasty)
        until(lambda: open_connections(hasty) <= 1, 8)  # ours alone is left


def open_connections(served):
    port = httpx.URL(served.url).port
    found = psutil.Process().net_connections("tcp")
    return sum(c.laddr.port == port and c.status == "ESTABLISHED" for c in found)


@pytest.mark.parametrize("begin", [b"", b"\r\n\r\n", b"GET /health HTTP/1.1\r\nA: b\r\n"])
def test_a_head_that_drips_is_not_waited_for(hasty, begin):
    with connected(hasty) as raw:
        start = time.monotonic()
        with contextlib.suppress(OSError):
            raw.sendall(begin)
            while time.monotonic() - start < 60:
                time.sleep(0.1)
                raw.sendall(b"x" if begin.strip() else b"")
                raw.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    if raw.recv(10) == b"":
                        break
                raw.setblocking(True)
        assert time.monotonic() - start < 60
    fine(hasty)


def test_a_connection_that_is_used_again_may_rest_but_not_drip(hasty):
    with connected(hasty) as raw:
        for pause in (1.5, 0):
            raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while b"}" not in answer:
                answer += raw.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200")
            time.sleep(pause)  # longer than a head may take
        raw.sendall(b"GET /he")
        assert ended(raw)
    fine(hasty)


def test_a_head_without_end_is_refused(served):
    with connected(served) as raw:
        with contextlib.suppress(OSError):
            raw.sendall(b"GET /health HTTP/1.1\r\n")
            for n in range(40):
                raw.sendall(b"X-%d: %s\r\n" % (n, b"y" * 8000))
                time.sleep(0.005)
        with contextlib.suppress(ConnectionError):
            assert raw.recv(1000).startswith(b"HTTP/1.1 400")
        assert ended(raw)
    fine(served)


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET\r\n\r\n"]
)
def test_what_is_no_http_is_refused_in_json(served, sent):
    with connected(served) as raw:
        raw.sendall(sent)
        head, _, body = everything(raw).partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0].startswith(b"HTTP/1.1 400 ") and b"content-length: %d" % len(body) in lines
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error" and error["code"] == "invalid_http"
    assert "HTTP" in error["message"]
    fine(served)


def test_a_body_that_drips_is_not_waited_for(served, monkeypatch):
    monkeypatch.setattr(bodies, "_BODY_SECONDS", 0.4)
    with connected(served) as raw:
        raw.sendall(HEAD % 10_000 + b"{")
        time.sleep(0.2)
        raw.sendall(b" ")
        answer = everything(raw)
        assert answer.startswith(b"HTTP/1.1 408") and b"body_too_slow" in answer
    fine(served)


def test_bodies_share_bounded_memory_and_give_it_back(bpe_folder):
    size = 1 << 20
    with serving(bpe_folder, max_body=size) as served, contextlib.ExitStack() as stack:
        held = served.app.state.bodies
        for _ in range(15):
            raw = stack.enter_context(connected(served))
            raw.sendall(HEAD % size + b" " * (size - 1))
        until(lambda: held.held == 15 * (size - 1))
        last = stack.enter_context(connected(served))
        last.sendall(HEAD % size + b" " * (size - 1))
        until(lambda: held.held == 16 * (size - 1))
        late = stack.enter_context(connected(served))
        with contextlib.suppress(ConnectionError):
            late.sendall(HEAD % size + b" " * (size - 1))
        answer = everything(late)
        assert answer.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in answer.lower()
        fine(served)
        last.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        last.close()  # vanishes, with a reset
        until(lambda: held.held <= 15 * (size - 1))
        raw.sendall(b" ")
        assert raw.recv(12) == b"HTTP/1.1 400"
        until(lambda: held.held <= 14 * (size - 1))
        stack.close()
        until(lambda: held.held == 0)
        fine(served)


def test_idle_connections_make_room_for_new_ones(bpe_folder, monkeypatch):
    monkeypatch.setattr(descriptors, "connections", lambda: (20, 32))
    with serving(bpe_folder) as served, contextlib.ExitStack() as stack:
        body = {"prompt": "[go on ]", "stream": True, "max_tokens": 4000}
        with served.http.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            crowd = [stack.enter_context(connected(served)) for _ in range(60)]
            with httpx.Client(base_url=served.url, timeout=10) as other:
                assert other.get("/health").status_code == 200
            assert ended(crowd[0])  # the longest idle
            assert next(line for line in lines if line)  # what runs is left alone
            assert not served.engine.aborted


@pytest.mark.slow
def test_ten_thousand_open_connections(bpe_folder):
    most, _ = descriptors.connections()  # lifts this process's own limit as well
    with started(bpe_folder) as process, contextlib.ExitStack() as stack:
        url = httpx.URL(read_until(process, r"serving \S+ at (http://\S+)")[1])
        for n in range(min(10_000, most)):
            raw = stack.enter_context(socket.create_connection((url.host, url.port)))
            if n % 2:
                raw.sendall(b"GET /health HTTP/1.1\r\n")
        with httpx.Client(base_url=url, timeout=20) as http:
            for _ in range(5):
                reply = http.post("/v1/chat/completions", json=CHAT)
                assert reply.json()["choices"][0]["message"]["content"] == "fine"
        assert psutil.Process(process.pid).memory_info().rss < 1 << 30


TRICKS = (
    "../../../etc/passwd",
    "%2e%2e/%2e%2e/etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "/etc/passwd",
    "fake/../../x",
    "fake%00",
    "%00",
    "fake%0d%0aX-Injected:%201",
    "\u202efake",
    "a" * 5000,
)


@pytest.mark.parametrize("name", TRICKS, ids=range(len(TRICKS)))
def test_a_model_s_name_is_no_path(served, name):
    with connected(served) as raw:
        path = f"/v1/models/{name}".encode().replace(b"\xe2\x80\xae", b"%E2%80%AE")
        raw.sendall(b"GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % path)
        answer = everything(raw)
    head, _, said = answer.partition(b"\r\n\r\n")
    assert head.split()[1] in (b"404", b"400") and b"root:" not in answer
    assert b"x-injected" not in head.lower() and len(said) < 2000
    for body in ({"model": name}, {"model": [name]}, {"model": {"a": name}}):
        reply = served.post("/v1/chat/completions", **CHAT, **body)
        assert reply.status_code in (400, 404) and "root:" not in reply.text
    fine(served)


def routes(app):
    """(path, method) of everything that the application answers; parameters filled in."""
    found, left = set(), list(app.routes)
    while left:
        route = left.pop()
        if router := getattr(route, "original_router", None):  # as FastAPI includes one
            left += router.routes
            continue
        path = re.sub(r"\{[^}]*\}", "x", route.path)
        found |= {(path, method) for method in getattr(route, "methods", None) or {"GET"}}
    return sorted(found)


def test_every_route_asks_for_the_key(bpe_folder):
    with serving(bpe_folder, api_key=("right-key",)) as served:
        found = routes(served.app)
        assert len(found) > 20 and {"/health", "/v1/plan", "/abort_request"} <= {
            p for p, _ in found
        }
        for path, method in found:
            ask = partial(served.http.request, method)
            for headers in (
                {},
                {"authorization": "Bearer wrong"},
                {"authorization": "Bearer"},
                {"authorization": "Bearer right-ke"},
                {"authorization": "Bearer right-keyy"},
                {"authorization": "Basic right-key"},
                {"x-api-key": "wrong"},
                {"cookie": "api_key=right-key"},
            ):
                status = ask(path, headers=headers).status_code
                assert (status == 401) == (path not in OPEN_PATHS), (method, path, headers, status)
            if path not in OPEN_PATHS:
                for other in (path + "/", path.upper(), f"/health/%2e%2e{path}", path + "%20"):
                    assert ask(other).status_code == 401, (method, other)
        assert not served.engine.submits


SECRET = "xqzsecret"


def test_what_one_request_holds_no_other_sees(bpe_folder):
    """Prompts, answers, ids, keys: not in others' answers, errors, metrics or the server's log."""
    with started(bpe_folder, api_key=("k-" + SECRET,)) as process:
        url = read_until(process, r"serving \S+ at (http://\S+)")[1]
        headers = {"authorization": f"Bearer k-{SECRET}"}
        with httpx.Client(base_url=url, headers=headers, timeout=20) as http:

            def chat(order, **fields):
                messages = [{"role": "user", "content": order}]
                body = {"messages": messages, **fields}
                return http.post("/v1/chat/completions", json=body)

            planted = [
                chat(f"{SECRET} [say {SECRET}]"),
                chat(f"{SECRET} [say x]", user=SECRET, stop=[SECRET + "!"]),
                chat(f"{SECRET} [invalid]"),
                chat(f"{SECRET} [full]"),
                chat("[say x]", temperature=SECRET),
                http.post("/v1/completions", content=f'{{"prompt": "{SECRET}'.encode()),
                http.post("/tokenize", json={"prompt": SECRET}),
                http.post("/generate", json={"text": f"[say {SECRET}]", "stream": True}),
                http.post("/v1/responses", json={"input": f"{SECRET} [say x]", "store": True}),
                http.get("/v1/models/x", headers={"x-secret": SECRET, "cookie": SECRET}),
                http.get("/v1/models", params={"key": SECRET}),
                http.get("/v1/models", headers={"authorization": f"Bearer {SECRET}"}),
            ]
            assert SECRET in planted[0].text and planted[2].status_code == 400
            assert planted[-1].status_code == 401
            others = [
                chat("[say nothing]"),
                chat("[say nothing]", logprobs=True, top_logprobs=5, n=3),
                chat("[invalid]"),
                chat("[full]"),
                http.post("/v1/completions", json={"prompt": "[say a]", "logprobs": 3}),
                http.get("/v1/models"),
                http.get("/server_info"),
                http.get("/get_model_info"),
                http.get("/health"),
                http.get("/metrics"),
                http.get("/v1/plan"),
                http.get("/openapi.json"),
                http.post("/flush_cache"),
                http.post("/abort_request", json={"abort_all": True}),
                http.get("/v1/responses/resp_x"),
                http.get("/"),
            ]
        for reply in others:
            assert SECRET not in reply.text and SECRET not in str(reply.headers), reply.url
        assert "finish_reason" in others[0].text
        process.terminate()
        process.wait(5)
        assert SECRET not in process.stdout.read() + process.stderr.read()
