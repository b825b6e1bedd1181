"""Large bodies: bounded by the context before they are read, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_harness import serving, until
from test_server_bad_input import error
from test_server_serve import read_until, started

from ds_runtime.server import front
from ds_runtime.server.http import body as module
from ds_runtime.server.http.bodies import LARGE, Bodies, Shape

sys.path.append(str(Path(__file__).parents[2] / "slow"))
from attackers_bodies import bodies

CONTEXT = 4096  # the fake engine's
LIMIT = CONTEXT * 16 + (1 << 20)
ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/generate",
    "/tokenize",
    "/detokenize",
    "/abort_request",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)


@pytest.mark.parametrize("path", ROUTES)
def test_no_body_is_larger_than_the_context_can_need(served, path):
    for chunked in (False, True):
        raw = b"{}".ljust(LIMIT + 1)
        reply = served.http.post(path, content=iter([raw]) if chunked else raw)
        assert reply.status_code == 413
        assert f"the limit is {LIMIT}" in reply.json()["error"]["message"]
    reply = served.http.post(path, content=b'{"x": 1}'.ljust(LIMIT))
    assert reply.status_code == 400 and "unknown field 'x'" in reply.text


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "raw, said",
    [
        ("[" + ",".join(["[]"] * 65_536) + "]", "more than 65536 arrays and objects"),
        ("[" * 65_537, "more than 65536 arrays and objects"),
        ('{"a":' * 65_537, "more than 65536 arrays and objects"),
        ("[" + ",".join(f'{{"{n}":{n}}}' for n in range(70_000)), "arrays and objects"),
        ("{" + ",".join(f'"{n}":1' for n in range(65_537)) + "}", "65536 members of objects"),
        ("[" + ",".join(["7"] * (LIMIT // 16 + 65_538)) + "]", "more than 135168 values"),
    ],
    ids=range(6),
)
def test_no_body_makes_more_values_than_can_be_read_at_once(served, path, raw, said):
    begin = time.monotonic()
    for content in (raw.encode(), f'{{"prompt": {raw}'.encode()):
        assert said in served.http.post(path, content=content).json()["error"]["message"]
    assert time.monotonic() - begin < 30  # nobody waits for what does not come


def test_a_prompt_of_the_whole_context_fits(served):
    """As text whose every character is escaped, and as ids."""
    text = "\u4f60" * (CONTEXT // 3)
    raw = json.dumps({"prompt": text}).encode()
    assert served.http.post("/v1/completions", content=raw).status_code == 200
    assert served.post("/v1/completions", prompt=[300] * (CONTEXT - 1), max_tokens=1).is_success
    inside = "[{,:" * 70_000  # in strings they build nothing
    assert error(served.post("/v1/completions", prompt=inside), 400)["code"] == (
        "context_length_exceeded"
    )


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text('\\"[]{},:\u4f60a'),
        lambda inner: st.lists(inner) | st.dictionaries(st.text('\\"[]{},:a'), inner),
    ),
    st.booleans(),
    st.data(),
)
def test_what_is_counted_is_what_is_read(value, escaped, data):
    """However the bytes are cut."""
    found = [0, 0, 0]

    def count(one):
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else None
        if inner is not None:
            found[0] += 1
            found[1] += len(one) if isinstance(one, dict) else 0
            found[2] += max(0, len(one) - 1)
            for item in inner:
                count(item)

    count(value)
    raw = json.dumps(value, ensure_ascii=escaped).encode()
    shape, begin = Shape(), 0
    while begin < len(raw):
        end = data.draw(st.integers(begin + 1, len(raw)))
        shape.add(raw[begin:end])
        begin = end
    assert [shape.containers, shape.members, shape.items] == found


@pytest.mark.parametrize("text", ['{"a": [1, 2.5, "x\\n", {}, null]}', "[1,", '{"a" 1}', "[NaN]"])
def test_either_reader_says_the_same(text, monkeypatch):
    def read():
        try:
            return module._json(text.encode(), 0)
        except Exception as e:
            return str(e)

    fast = read()
    monkeypatch.setattr(module, "_MANY", 0)
    assert read() == fast


def test_one_large_body_at_a_time(bpe_folder, monkeypatch):
    """And few of others, however many come at once."""
    now, most = {True: 0, False: 0}, {True: 0, False: 0}
    lock, real = threading.Lock(), module._read

    def work(bodies, raw, *rest):
        large = len(raw) > LARGE
        with lock:
            now[large] += 1
            most[large] = max(most[large], now[large])
        try:
            time.sleep(0.02)
            return real(bodies, raw, *rest)
        finally:
            with lock:
                now[large] -= 1

    monkeypatch.setattr(module, "_read", work)
    with serving(bpe_folder) as served, ThreadPoolExecutor(16) as pool:

        def ask(n):
            raw = b'{"text": "[say hi]"}'.ljust(900_000 if n % 2 else 100_000)
            headers = {"content-type": "application/json"}
            url = f"{served.url}/generate"
            return httpx.post(url, content=raw, headers=headers, timeout=60).status_code

        assert set(pool.map(ask, range(32))) == {200}
        assert most[True] == 1 and 1 < most[False] <= 3
        until(lambda: not served.app.state.bodies.held)


def test_a_client_that_leaves_while_it_waits_costs_no_work(bpe_folder, monkeypatch):
    gate, done, real = threading.Event(), [], module._read

    def work(bodies, raw, *rest):
        done.append(len(raw))
        assert gate.wait(20)
        return real(bodies, raw, *rest)

    monkeypatch.setattr(module, "_read", work)
    with serving(bpe_folder) as served:
        raw = b'{"text": "[say hi]"}'.ljust(900_000)
        held: Bodies = served.app.state.bodies
        first = threading.Thread(target=lambda: served.http.post("/generate", content=raw))
        first.start()
        until(lambda: done)
        with pytest.raises(httpx.ReadTimeout):
            headers = {"content-type": "application/json"}
            httpx.post(f"{served.url}/generate", content=raw, headers=headers, timeout=0.5)
        gate.set()
        first.join(20)
        until(lambda: not held.held)
        assert len(done) == 1


class Lags:
    """Processor time that this process takes between two turns of the event loop."""

    def __init__(self):
        self.found = []

    async def watch(self):
        last = time.process_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.process_time()
            self.found.append(now - last)
            last = now


@pytest.fixture(scope="module")
def watched(bpe_folder):
    """A server as `serve` runs it, and its lags."""
    lags, before = Lags(), sys.getswitchinterval()
    sys.setswitchinterval(front._SWITCH_SECONDS)
    try:
        with serving(bpe_folder, beside=[lags.watch]) as served:
            yield served, lags
    finally:
        sys.setswitchinterval(before)


SENDER = """
import sys, http.client
host, path = sys.argv[1:]
body = sys.stdin.buffer.read()
for _ in range(3):
    one = http.client.HTTPConnection(host, timeout=30)
    one.request("POST", path, body, {"content-type": "application/json"})
    assert one.getresponse().status in (200, 400, 413)
"""


@pytest.mark.parametrize("size", [190_000, 900_000, 16_000_000])
@pytest.mark.parametrize("name", bodies(10))
def test_no_body_makes_others_wait(watched, name, size):
    """The event loop, from which all tokens leave, gets its turn within 20 ms.

    The client is another process; and what counts is this one's own processor time.
    """
    served, lags = watched
    path, raw = bodies(size)[name]
    tries = []
    while len(tries) < 5 and min(tries, default=1.0) > 0.02:
        lags.found.clear()
        command = [sys.executable, "-c", SENDER, httpx.URL(served.url).netloc.decode(), path]
        subprocess.run(command, input=raw, check=True, timeout=60)
        tries.append(max(lags.found))
    assert min(tries) <= 0.02, tries


def test_sixteen_of_them_take_little_memory(bpe_folder):
    with started(bpe_folder) as process, ThreadPoolExecutor(16) as pool:
        url = read_until(process, r"serving \S+ at (http://\S+)")[1]
        server = psutil.Process(process.pid)
        headers = {"content-type": "application/json"}
        sent = [*bodies(16_000_000).values(), *bodies(LIMIT - 100_000).values()]

        def ask(n):
            path, raw = sent[n % len(sent)]
            return httpx.post(url + path, content=raw, headers=headers, timeout=60).status_code

        before = server.memory_info().rss
        asked = [pool.submit(ask, n) for n in range(32)]
        most = before
        while not all(one.done() for one in asked):
            most = max(most, server.memory_info().rss)
            time.sleep(0.01)
        assert {one.result() for one in asked} <= {200, 400, 413, 503}
        assert most - before < 200 << 20, (before, most)
        reply = httpx.post(f"{url}/generate", json={"text": "[say fine]"}, timeout=20)
        assert reply.json()["text"] == "fine"


def test_one_thread_at_a_time_prepares_and_none_waits_for_those_that_wait():
    bodies = Bodies(None, lambda: 8192)
    lock, busy, most = threading.Lock(), 0, 0
    all_wait = threading.Barrier(8, timeout=10)

    def change(by):
        nonlocal busy, most
        with lock:
            busy += by
            most = max(most, busy)

    def prepare(number):
        with bodies.preparing():
            change(1)
            time.sleep(0.002)
            change(-1)
            with bodies.aside():
                all_wait.wait()  # nobody holds the turn
            change(1)
            time.sleep(0.002)
            change(-1)
            if number == 3:
                raise ValueError

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(prepare, number) for number in range(8)]
        faults = [type(one.exception()) for one in asked]
    assert faults == [type(None)] * 3 + [ValueError] + [type(None)] * 4 and most == 1
    with bodies.aside(), bodies.preparing():
        pass
    with bodies.preparing():  # free again, also behind the one that failed
        pass
