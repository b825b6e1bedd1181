"""Streams beside long prompts, on a real server: the gaps between tokens, and the same texts."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from contextlib import closing
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest
from served import serving

VOCAB = 300


def ids(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(length)]


def stream(
    url: str, prompt: list[int], count: int, begun: threading.Semaphore | None = None
) -> tuple[list[int], list[float]]:
    """The ids of an answer, and the seconds between its events. begun: released with the first."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": count, "stream": True}
    body |= {"ignore_eos": True, "temperature": 0, "return_token_ids": True}
    tokens, times = [], []
    with closing(HTTPConnection(urlsplit(url).netloc, timeout=120)) as http:
        kind = {"content-type": "application/json"}
        http.request("POST", "/v1/completions", json.dumps(body), kind)
        reply = http.getresponse()
        assert reply.status == 200, reply.read()
        for line in reply:
            if line.startswith(b"data: {"):
                if begun is not None and not times:
                    begun.release()
                times.append(time.perf_counter())
                tokens += json.loads(line[6:])["choices"][0].get("token_ids", [])
    assert len(tokens) == count
    return tokens, [b - a for a, b in itertools.pairwise(times)]


def together(
    url: str, requests: list[tuple[list[int], int]], begun: threading.Semaphore | None = None
) -> list[tuple[list[int], list[float]]]:
    """Answers of requests that are sent at once."""
    found = {}
    threads = [
        threading.Thread(target=lambda i=i, r=r: found.__setitem__(i, stream(url, *r, begun)))
        for i, r in enumerate(requests)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[i] for i in range(len(requests))]


def metric(url: str, name: str) -> float:
    with closing(HTTPConnection(urlsplit(url).netloc, timeout=30)) as http:
        http.request("GET", "/metrics")
        lines = http.getresponse().read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"ds_runtime_{name}{{"))


def expected_and_took(url: str) -> tuple[float, float]:
    name = "prefill_step{}_seconds_total"
    return metric(url, name.format("_expected")), metric(url, name.format(""))


def mixed(url: str, seed: int, count: int, length: int) -> tuple[list[list[int]], list[float]]:
    """Streams that run while long prompts come: all answers, and the gaps of the streams."""
    running = [(ids(20, seed + i), count) for i in range(4)]
    late = [(ids(length, seed + 10 + i), 4) for i in range(4)]
    found: list[tuple[list[int], list[float]]] = []
    begun = threading.Semaphore(0)
    beside = threading.Thread(target=lambda: found.extend(together(url, running, begun)))
    beside.start()
    for _ in running:
        assert begun.acquire(timeout=60)
    behind = together(url, late)
    beside.join()
    return [tokens for tokens, _ in found + behind], [g for _, gaps in found for g in gaps]


def test_chunks_are_cut_and_answers_are_the_same():
    with serving("demo", "--max-itl", "15", "--dtype", "float32") as server:
        url = server.wait_url()
        for length in (60, 400):
            stream(url, ids(length, length), 4)
        cut = metric(url, "prefill_steps_cut_total")
        answers, _ = mixed(url, 1, 60, 500)
        assert metric(url, "prefill_steps_cut_total") > cut
        assert metric(url, "prefill_chunk_tokens_total") >= 4 * 500
        before, found = (0.0, 0.0), list[float]()
        for seed in (101, 201, 301):  # others take the processor between two steps: not each time
            now = expected_and_took(url)
            found.append((now[0] - before[0]) / (now[1] - before[1]))
            if 0.4 < found[-1] < 2.5:
                break
            before = now
            mixed(url, seed, 60, 500)
        assert 0.4 < found[-1] < 2.5, found
        alone = [stream(url, ids(20, 1 + i), 60)[0] for i in range(4)]
        alone += [stream(url, ids(500, 11 + i), 4)[0] for i in range(4)]
        assert answers == alone
        with closing(HTTPConnection(urlsplit(url).netloc, timeout=30)) as http:
            http.request("GET", "/server_info")
            assert b'"max_itl":15' in http.getresponse().read().replace(b" ", b"")


@pytest.mark.slow
def test_long_prompts_leave_the_gaps_of_streams_short():
    """A gap that each stream has at least once in each run, with the limit and without it. How many
    there are hangs on how many prompts a step takes without one."""
    worst = {}
    for limit in ("0", "30"):
        with serving("demo", "--max-itl", limit) as server:
            url = server.wait_url()
            for length in (60, 700, 1500, 300):
                stream(url, ids(length, length), 4)
            found = sorted(mixed(url, 1, 600, 1500)[1] + mixed(url, 50, 600, 1500)[1])
            worst[limit] = found[-2 * 4]
    assert worst["30"] < 0.6 * worst["0"], worst
