"""An engine on two nodes, which are two servers of this machine: one of them answers HTTP."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import psutil
import pytest
from served import Serving

from ds_runtime import LLM, SamplingParams
from ds_runtime.errors import ConfigError

FLAGS = ("--dtype", "float32", "--threads", "1", "--kv-memory", "200MB", "--dist-timeout", "60")
PROMPT = "12+30="


def address():
    with socket.create_server(("127.0.0.1", 0)) as one:
        return f"127.0.0.1:{one.getsockname()[1]}"


@contextlib.contextmanager
def nodes(*given, count=2, tp=2):
    """Servers by number; `given`: flags of each beside those of all."""
    at, started = address(), []
    own = ("--tp", str(tp), "--nnodes", str(count), "--dist-init-addr", at)
    try:
        for number, more in enumerate(given):
            if more is not None:
                flags = (*FLAGS, *own, "--node-rank", str(number), *more)
                started.append(Serving("demo", *flags))
        yield started
    finally:
        for one in started:
            one.end()


def tree(server):
    """All that a server has started; its own end is its Popen's to see."""
    return psutil.Process(server.process.pid).children(recursive=True)


def gone(processes, seconds):
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


def said(server, seconds=20.0):
    """All that a server wrote, once it has left by itself."""
    code = server.process.wait(seconds)
    server._reader.join(5)
    return code, "".join(server.lines)


def secrets(tmp_path, *words):
    files = [tmp_path / f"secret{i}" for i in range(len(words))]
    for file, word in zip(files, words, strict=True):
        file.write_text(word)
    return [("--dist-token-file", str(file)) for file in files]


def test_two_nodes_answer_as_one_and_leave_together(tmp_path):
    token = secrets(tmp_path, "word")[0]
    with LLM("demo", platform="cpu", dtype="float32", kv_memory="200MB") as alone:
        (expected,) = alone.generate([PROMPT], SamplingParams(max_tokens=12, temperature=0.0))
    with nodes(token, token) as (first, second):
        second.wait(r"node 1 of 2: 1 ranks for node 0 at 127\.0\.0\.1:\d+")
        url = first.wait_url()
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert reply["choices"][0]["text"] == expected.text
        every = tree(first) + tree(second)
        first.process.send_signal(signal.SIGTERM)
        ends = said(first), said(second)
        assert [code for code, _ in ends] == [0, 0], ends
        assert gone(every, 2)


@pytest.mark.slow
def test_nodes_that_share_a_folder_keep_what_was_cached(tmp_path):
    """Both write to it and read it, over a restart of both."""
    token, folder = secrets(tmp_path, "word")[0], tmp_path / "cache"
    own = (*token, "--enable-hierarchical-cache", "--disk-cache", str(folder))
    body = {"model": "demo", "prompt": PROMPT * 20, "max_tokens": 8, "temperature": 0}
    said = []
    for _ in range(2):
        with nodes(own, own) as (first, _second):
            reply = httpx.post(f"{first.wait_url()}/v1/completions", json=body, timeout=60).json()
            details = reply["usage"]["prompt_tokens_details"]["cached_tokens_details"]
            said.append((reply["choices"][0]["text"], details["storage"]))
            until = time.monotonic() + 30
            while not [*folder.glob("*/*.page")]:
                assert time.monotonic() < until
                time.sleep(0.1)
            time.sleep(1.0)  # both are idle, and write the rest
    (cold, none), (again, stored) = said
    assert cold == again and not none and stored >= 64


@pytest.mark.slow
def test_nodes_without_a_shared_folder_compute(tmp_path):
    """A page that one of them cannot read is computed by both."""
    token, said = secrets(tmp_path, "word")[0], []
    own = [
        (*token, "--enable-hierarchical-cache", "--disk-cache", str(tmp_path / word))
        for word in ("here", "there")
    ]
    body = {"model": "demo", "prompt": PROMPT * 20, "max_tokens": 8, "temperature": 0}
    for _ in range(2):
        with nodes(*own) as (first, _second):
            reply = httpx.post(f"{first.wait_url()}/v1/completions", json=body, timeout=60).json()
            details = reply["usage"]["prompt_tokens_details"]["cached_tokens_details"]
            said.append((reply["choices"][0]["text"], details["storage"]))
            time.sleep(2.0)
    assert said[0] == said[1] == (said[0][0], 0)


@pytest.mark.slow
def test_groups_of_attention_on_nodes_of_their_own():
    with LLM("demo", platform="cpu", dtype="float32", kv_memory="200MB") as alone:
        (expected,) = alone.generate([PROMPT], SamplingParams(max_tokens=12, temperature=0.0))
    groups = ("--dp", "2", "--enable-dp-attention")
    with nodes(groups, groups, tp=2) as (first, _):
        url = first.wait_url()
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert reply["choices"][0]["text"] == expected.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--dp", "2", "--enable-dp-attention"), "--enable-dp-attention, groups: 1 here, 2 there"),
        (("--page-size", "32"), "--page-size: 16 here, 32 there"),
        (("--ep", "2"), "--ep: 1 here, 2 there"),
    ],
)
def test_a_node_that_does_not_fit_ends_both_with_the_reason(tmp_path, more, sentence):
    token = secrets(tmp_path, "word")[0]
    with nodes(token, (*token, *more)) as servers:
        every = [process for one in servers for process in tree(one)]
        for one in servers:
            code, text = said(one, 30)
            assert code == 1 and sentence in text
        assert gone(every, 2)


@pytest.mark.slow
def test_a_node_that_starts_long_after_a_refusal_reads_it_too(tmp_path):
    """Rank 0 would be gone otherwise, and this one wait for it until --dist-timeout."""
    token = secrets(tmp_path, "word")[0]
    odd = (*token, "--page-size", "32")
    with nodes(token, odd, None, token, count=4, tp=4) as (first, second, fourth):
        for one in (second, fourth):
            code, text = said(one, 40)
            assert code == 1 and "--page-size: 16 here, 32 there" in text
        first.wait("not started: the ranks decided differently")
        first.wait("node 0 exits in 30 s, and tells nodes that connect until then")
        time.sleep(7)
        assert first.process.poll() is None
        command = list(fourth.process.args)
        command[command.index("--node-rank") + 1] = "2"
        late = subprocess.run(command, capture_output=True, text=True, timeout=40)
        assert late.returncode == 1
        assert "--page-size: 16 here, 32 there" in late.stdout + late.stderr
        code, text = said(first, 5)  # everybody knows: it waits no longer
        assert code == 1 and "--page-size: 16 here, 32 there" in text


@pytest.mark.slow
def test_a_node_with_another_secret_is_refused_and_may_come_again(tmp_path):
    first, second = secrets(tmp_path, "word", "world")
    with nodes(first, second) as (one, two):
        code, text = said(two, 30)
        assert code == 1 and "has another secret, or something else listens there" in text
        assert "Traceback" not in text
        one.wait("a rank with another secret than rank 0 was refused")
        number = two.process.args.index("--dist-token-file") + 1
        again = [first[1] if at == number else word for at, word in enumerate(two.process.args)]
        two.process = subprocess.Popen(again, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        assert one.wait_url()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "signals", "disk"),
    [(n, s, False) for n in (signal.SIGTERM, signal.SIGINT) for s in (1, 2)]
    + [(signal.SIGTERM, 1, True)],
)
def test_a_signal_to_every_node_lets_running_requests_end(tmp_path, number, signals, disk):
    """As torchrun and Kubernetes send it, and Ctrl-C; two to a node that has no HTTP end it. With
    a disk, what only the devices have is written before all leave."""
    token, folder = secrets(tmp_path, "word")[0] if disk else (), tmp_path / "cache"
    cached = ("--enable-hierarchical-cache", "--hicache-write-policy", "write_back")
    own = (*token, *cached, "--disk-cache", str(folder)) if disk else ()
    patience = 85 if disk else 25
    with nodes(own, own) as (first, second):
        url = first.wait_url()
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 300, "ignore_eos": True}
        body |= {"stream": True, "temperature": 0}
        every, tokens, last = tree(first) + tree(second), 0, ""
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
            try:
                for line in reply.iter_lines():
                    last, tokens = line or last, tokens + line.startswith("data: {")
                    if line and tokens == 5:
                        second.process.send_signal(number)
                        second.wait(f"waits up to {patience} s for node 0 to end; another signal")
                        assert not [*folder.glob("*/*.page")]
                        first.process.send_signal(number)
                        if signals == 2:
                            time.sleep(0.5)
                            second.process.send_signal(number)
            except httpx.HTTPError:
                assert signals == 2
        codes = [said(one)[0] for one in (first, second)]
        if signals == 1:
            assert codes == [0, 0] and last == "data: [DONE]"
            assert len([*folder.glob("*/*.page")]) >= (16 if disk else 0)
        else:
            assert codes[1] == 0
        assert gone(every, 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("whom", "how"),  # a rank leaves SIGTERM to its server, and goes on while that is stopped
    [
        ("server", signal.SIGKILL),
        ("server", signal.SIGTERM),
        ("rank", signal.SIGKILL),
        ("rank", signal.SIGSTOP),
    ],
)
@pytest.mark.parametrize("which", [0, 1])
def test_a_node_that_dies_ends_the_other(how, which, whom):
    with nodes((), ()) as servers:
        servers[0].wait_url()
        other = servers[1 - which]
        victim, every = servers[which].process, tree(other)
        if whom == "rank":
            victim = servers[which].ranks()[0]
        victim.send_signal(how)
        if how == signal.SIGTERM and which == 1:
            time.sleep(0.5)
            victim.send_signal(how)  # one may have come to every node
        code, text = said(other, 10)
        assert gone(every, 2)
        if how == signal.SIGTERM and which == 0:
            assert code == 0
        else:
            name = "rank 0 on node 0" if which == 0 else "rank 1 on node 1"
            lost = name in text and "has left, or cannot be reached" in text
            known = f"engine rank {which} was " in text and (which == 0 or "(on node 1)" in text)
            assert code == 1 and (lost or (whom == "rank" and known)), text
            assert known or (whom, how) != ("rank", signal.SIGKILL), text


@pytest.mark.slow
def test_a_node_that_is_missing_is_named():
    with nodes(("--dist-timeout", "3"), None) as (first,):
        code, text = said(first, 40)
        assert code == 1 and "rank 1 on node 1 did not start within 3 s (--dist-timeout)" in text
    with nodes(None, ("--dist-timeout", "3")) as (second,):
        code, text = said(second, 40)
        assert code == 1 and "did not answer within 3 s (--dist-timeout): start node 0" in text


@pytest.mark.slow
@pytest.mark.parametrize("per_node", [1, 2])
def test_torchrun_starts_the_ranks(per_node):
    """Once with a process for each rank, once with one for each node; both make two ranks."""
    meet = address()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(per_node)]
    serve = ["-m", "ds_runtime", "serve", *FLAGS, "--platform", "cpu", "--port", "0"]
    count = 2 // per_node
    started = []
    for number in range(count):
        host, port = meet.split(":")
        where = ["--nnodes", str(count), "--node-rank", str(number)]
        where += ["--master-addr", host, "--master-port", port]
        started.append(
            subprocess.Popen(
                [*command, *where, *serve],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ,
            )
        )
    every = []
    try:
        lines = []
        for line in started[0].stdout:
            lines.append(line)
            if "serving demo at" in line:
                break
        text = "".join(lines)
        assert "torchrun: is --tp 2" in text and "serving demo at" in text, text
        url = text.rpartition("serving demo at ")[2].split()[0]
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 4}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert reply.status_code == 200 and "2 ranks" in text
        every = [p for one in started for p in psutil.Process(one.pid).children(recursive=True)]
    finally:
        for one in started:
            one.send_signal(signal.SIGTERM)
        for one in started:
            one.stdout.close()
            one.wait(30)
    assert every and gone(every, 10)


def test_one_process_has_the_ranks_of_one_machine():
    with pytest.raises(ConfigError, match="--nnodes 2: ranks on several machines are a server's"):
        LLM("demo", tp=2, nnodes=2, dist_init_addr="127.0.0.1:1")
