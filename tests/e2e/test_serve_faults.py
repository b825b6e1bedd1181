"""kill -9 of one of the engine's processes, while a whole server runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading

import httpx
import psutil
import pytest
from served import serving

FLAGS = ("--dtype", "float32", "--kv-memory", "2MB", "--threads", "1")
ASK = {"prompt": [5, 6, 7], "max_tokens": 20, "temperature": 0}
LONG = {"prompt": [5, 6, 7], "max_tokens": 150, "ignore_eos": True}


@pytest.mark.slow
def test_a_rank_that_is_killed_is_told_and_the_engine_comes_back(tiny):
    with serving(tiny, *FLAGS, "--tp", "2") as served:
        url = served.wait_url()
        with httpx.Client(base_url=url, timeout=60) as http:
            before = http.post("/v1/completions", json=ASK).json()["choices"][0]["text"]
            box = []

            def load():  # one after the other, until one is told
                with httpx.Client(base_url=url, timeout=60) as mine:
                    while not box or box[-1].status_code == 200:
                        box.append(mine.post("/v1/completions", json=LONG))

            threads = [threading.Thread(target=load) for _ in range(3)]
            for thread in threads:
                thread.start()
            first = served.ranks()
            assert len(first) == 2
            first[1].kill()
            for thread in threads:
                thread.join(60)
            assert box[-1].status_code == 503
            said = box[-1].json()["error"]["message"]
            assert "was ended by SIGKILL" in said or "being restarted" in said
            served.wait("SIGKILL.*restart 1 of 3")
            assert served.wait_url() == url
            assert http.post("/v1/completions", json=ASK).json()["choices"][0]["text"] == before
            assert not any(psutil.pid_exists(p.pid) for p in first)


@pytest.mark.slow
def test_a_signal_to_the_whole_group_lets_answers_end():
    """As process managers send it: the ranks leave it to the server."""
    command = [sys.executable, "-m", "ds_runtime", "serve", "demo", "--platform", "cpu"]
    process = subprocess.Popen(
        [*command, "--port", "0", "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        url = next(m[1] for line in process.stdout if (m := re.search(r"(http://\S+?)/v1", line)))
        replies = []

        def ask():
            replies.append(
                httpx.post(f"{url}/v1/completions", json=LONG | {"max_tokens": 2000}, timeout=60)
            )

        thread = threading.Thread(target=ask)
        with httpx.Client(base_url=url, timeout=60) as http:
            http.post("/v1/completions", json=ASK)
            thread.start()
            running = re.compile(r"^ds_runtime_num_requests_running\{.*\} [1-9]", re.M)
            while not running.search(http.get("/metrics").text) and thread.is_alive():
                pass
        assert thread.is_alive()
        os.killpg(process.pid, signal.SIGTERM)
        thread.join()
        rest = process.stdout.read()
        assert replies[0].status_code == 200 and process.wait(20) == 0
        assert "ERROR" not in rest and "restart" not in rest
    finally:
        process.kill()
        process.communicate()
