"""Checkpoints whose template or tokenizer does not end, in the whole command: others do not notice,
and a signal ends it at once."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import threading
import time

import httpx
import psutil
import pytest
from test_server_serve import read_until, started

from ds_runtime.text.apart import SECONDS

LOOP = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
SOME = '{% for m in messages %}{% if "[loop]" in m.content %}BAD{% endif %}{% endfor %}'
SAID = "{{ messages[-1].content }}"
FOLDS = "{{ 'x'|center(9999)|list|join('x'|center(5000)) }}" * 9000  # 25 ms and 50 MB each


@pytest.fixture(scope="module")
def folder(bpe_folder, tmp_path_factory):
    """A template that loops for messages with [loop], a tokenizer that backtracks for many x."""
    path = tmp_path_factory.mktemp("hostile") / "m"
    shutil.copytree(bpe_folder, path)
    (path / "chat_template.jinja").write_text(SOME.replace("BAD", LOOP) + SAID)
    whole = json.loads((path / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": r"(x+x+)+y|[^x]+|x"}, "behavior": "Isolated"}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    parts = [split | {"invert": False}, level | {"use_regex": False}]
    whole["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    (path / "tokenizer.json").write_text(json.dumps(whole))
    return path


@pytest.fixture(scope="module")
def url(folder):
    with started(folder) as process:
        yield read_until(process, r"serving \S+ at (http://\S+)")[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def chat(url, content, **more):
    body = {"messages": [{"role": "user", "content": content}], **more}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


BAD = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "[loop]"}]}),
    "count": ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "[loop]"}]}),
    "responses": ("/v1/responses", {"input": "[loop]"}),
    "completions": ("/v1/completions", {"prompt": "x" * 3000}),
    "generate": ("/generate", {"text": "x" * 3000}),
    "tokenize": ("/tokenize", {"prompt": "x" * 3000}),
}


def some(names, *fast):
    return [n if n in fast else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("route", some(BAD, "chat", "tokenize"))
def test_such_a_request_is_an_error_and_others_go_on(url, route):
    path, body = BAD[route]
    replies = []
    asked = [
        threading.Thread(
            target=lambda: replies.append(httpx.post(url + path, json=body, timeout=60))
        )
        for _ in range(3)
    ]
    for one in asked:
        one.start()
    took = []
    while any(one.is_alive() for one in asked) and len(took) < 20:
        begin = time.monotonic()
        reply = chat(url, "[say on]")
        took.append(time.monotonic() - begin)
        assert reply.json()["choices"][0]["message"]["content"] == "on"
    for one in asked:
        one.join()
    assert [r.status_code for r in replies] == [400] * 3
    said = replies[0].json()["error"]["message"]
    assert re.search(r"the checkpoint's (chat template|tokenizer) (takes more than|fails)", said)
    assert sorted(took)[len(took) // 2] < SECONDS / 4


def test_streams_go_on_and_it_is_counted(url):
    stop = threading.Event()
    bad = threading.Thread(target=lambda: [chat(url, "[loop]"), stop.set()])
    body = {"messages": [{"role": "user", "content": "[go on ]"}], "stream": True}
    gaps, last = [], None
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as reply:
        for _ in reply.iter_lines():
            now = time.monotonic()
            if last is None:
                bad.start()
            else:
                gaps.append(now - last)
            last = now
            if stop.is_set():
                break
    bad.join()
    # A stream that waited would have one gap, as long as the template runs.
    assert len(gaps) > 20 and max(gaps) < SECONDS / 2
    counted = httpx.get(f"{url}/metrics").text
    assert re.search(r'^ds_runtime_text_work_ended_total\{model_name="m"\} [1-9]', counted, re.M)


ENDED = {"loading": 3.0, "rendering": 5.0}  # a server drains: front._GRACE_SECONDS
TRIES = 3  # the machine lengthens an end, and never shortens one
ENDS = [(w, n) for w in ("loading", "rendering") for n in ("SIGTERM", "SIGINT", "SIGKILL")]


@pytest.mark.parametrize(
    "end", some(ENDS, ("loading", "SIGTERM"), ("loading", "SIGINT"), ("rendering", "SIGTERM"))
)
def test_a_signal_ends_it_at_once(folder, tmp_path, end):
    when, number = end
    if when == "loading":
        shutil.copytree(folder, tmp_path / "m")
        (folder := tmp_path / "m").joinpath("chat_template.jinja").write_text(FOLDS)
    took = list[float]()
    while not took or (took[-1] >= ENDED[when] and len(took) < TRIES):
        took.append(ends(folder, when, number))
    assert took[-1] < ENDED[when], took


def ends(folder, when, number):
    """Seconds from the signal to the end of the server's last process."""
    with started(folder) as process:
        if when == "rendering":
            where = read_until(process, r"serving \S+ at (http://\S+)")[1]
            for _ in range(3):
                threading.Thread(target=ignored, args=(where,), daemon=True).start()
            time.sleep(0.3)
        else:
            until_there(process)
        others = psutil.Process(process.pid).children(recursive=True)
        assert any("ds_runtime.text.worker" in one.cmdline() for one in others)
        begin = time.monotonic()
        os.kill(process.pid, signal.Signals[number])
        process.wait(20)
        psutil.wait_procs(others, 10)
        took = time.monotonic() - begin
        assert not [one for one in others if one.is_running()]
    return took


def ignored(url):
    with contextlib.suppress(httpx.HTTPError):
        chat(url, "[loop]")


def until_there(process):
    """The text's process, which comes after the engine's."""
    end = time.monotonic() + 20
    while not any("ds_runtime.text.worker" in one for one in commands(process.pid)):
        assert time.monotonic() < end
        time.sleep(0.02)


def commands(pid):
    for one in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            yield one.cmdline()
    time.sleep(1.0)
