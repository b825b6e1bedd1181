"""How long `ds-runtime serve` takes from its process's start to the first token of an answer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil

LIMIT = 6.0  # seconds from the start of the process, with warm files


def waited(pid):
    """Seconds that a process's main thread was ready to run while others had the processors."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def first_token(said):
    """Seconds until the first token, without those for which the machine was somebody else's."""
    command = [sys.executable, "-m", "ds_runtime", "serve", "--model", "demo", "--port", "0"]
    start = time.perf_counter()
    with said.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        for line in process.stdout:
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            raise AssertionError(said.read_text())
        asked = {"model": "demo", "messages": [{"role": "user", "content": "What is 12 + 30?"}]}
        url = f"{found[0]}/v1/chat/completions"
        with httpx.stream("POST", url, json=asked | {"stream": True}, timeout=60) as answer:
            assert answer.status_code == 200
            assert any(has_text(line) for line in answer.iter_lines())
            spent = time.perf_counter() - start
        children = psutil.Process(process.pid).children(recursive=True)
        return spent - max(waited(pid) for pid in (process.pid, *(c.pid for c in children)))
    finally:
        process.terminate()
        process.wait(timeout=30)
        process.stdout.close()


def has_text(line):
    """Whether a line of the event stream brings a piece of the answer."""
    if not line.startswith("data: {"):
        return False
    delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
    return bool(delta.get("content") or delta.get("reasoning_content"))


def test_the_demo_answers_soon_after_its_start(tmp_path):
    """The best of three starts, as the first may read cold files."""
    taken = []
    while len(taken) < 3 and min(taken, default=LIMIT) >= LIMIT:
        taken.append(first_token(tmp_path / "said"))
    assert min(taken) < LIMIT, taken
