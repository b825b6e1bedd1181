"""The engine behind real sockets, in real processes that really die."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import zmq
from served import rests

from ds_runtime import LLM, SamplingParams
from ds_runtime.config import EngineConfig
from ds_runtime.engine.messages import (
    Abort,
    Dead,
    Failed,
    Flush,
    Flushed,
    Ready,
    Stats,
    Submit,
    SubmitGroup,
    Tokens,
    decode_from_engine,
    encoder,
)
from ds_runtime.engine.process.launch import EngineProcesses
from ds_runtime.engine.process.transport import bind_pull, connect_push, private_folder
from ds_runtime.errors import CheckpointError

SETTINGS = {"platform": "cpu", "dtype": "float32", "kv_memory": 2_000_000, "threads": 1}


class Front:
    """A front end: an engine's processes and the two sockets to them."""

    def __init__(self, model: Path, folder: Path, tell=None, **settings):
        config = EngineConfig(model=str(model), **{**SETTINGS, **settings})
        self.engine = EngineProcesses(config, folder, SETTINGS, tell=tell)
        self.context = zmq.Context()
        self.inbox = bind_pull(self.context, self.engine.from_engine)
        self.outbox = connect_push(self.context, self.engine.to_engine)
        self.pending = []
        self.engine.start()

    def send(self, message):
        self.outbox.send(encoder.encode(message))

    def next(self, *kinds, timeout=60.0):
        """The next message of these kinds; others are dropped."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            while self.pending:
                message = self.pending.pop(0)
                if isinstance(message, kinds):
                    return message
            if self.inbox.poll(100):
                self.pending += decode_from_engine.decode(self.inbox.recv())
            elif self.engine.poll() is not None and not self.inbox.poll(300):
                raise AssertionError(f"the engine died: {self.engine.poll()}")
        raise AssertionError(f"no {kinds} within {timeout} s")

    def tokens(self, rid):
        """All tokens of one request; those of others are dropped."""
        found, finish = [], None
        while finish is None:
            message = self.next(Tokens, Failed)
            assert not (isinstance(message, Failed) and message.rid == rid), message
            if message.rid == rid:
                found += message.tokens
                finish = message.finish
        return found

    def close(self):
        self.engine.stop()
        self.context.destroy(linger=0)


@contextlib.contextmanager
def front(model, **settings):
    with private_folder() as folder:
        end = Front(model, folder, **settings)
        try:
            yield end
        finally:
            end.close()


@pytest.fixture(scope="module")
def running(tiny):
    written = []

    def tell(spec, text):
        written.append((spec.rank, text))

    with front(tiny, tell=tell, max_queued_requests=2, max_running_requests=1) as end:
        end.ready, end.written = end.next(Ready), written
        yield end


def submit(rid, max_tokens=5, prompt=(5, 6, 7), **params):
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return Submit(rid=rid, prompt=list(prompt), params=sampling, seed=1)


def test_ready_says_what_was_loaded(running):
    ready = running.ready
    assert (ready.context_length, ready.vocab_size, ready.page_size) == (160, 288, 16)
    assert ready.kv_tokens >= 160 and "DeepseekV3ForCausalLM" in ready.banner
    mode = running.engine.folder.stat().st_mode
    assert stat.S_IMODE(mode) == 0o700


def test_what_its_processes_write_is_told_and_where_they_are_on_request(running):
    def said(text):
        return any(rank == 0 and text in line for rank, line in running.written)

    assert said("loading weights")
    running.engine.trace()  # by the C library: Python's own streams are not asked
    deadline = time.monotonic() + 30
    while not said("engine/process/loop.py") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert said("most recent call first") and said("engine/process/loop.py"), running.written
    running.send(submit("goes on", 2))
    running.tokens("goes on")


def test_tokens_are_those_of_the_offline_api(running, tiny):
    running.send(submit("a", 8))
    with LLM(tiny, **SETTINGS) as llm:
        expected = llm.generate([5, 6, 7], SamplingParams(max_tokens=8))[0].token_ids
    assert running.tokens("a") == expected


def test_a_group_brings_its_prompt_once_and_computes_its_log_probabilities_once(running, tiny):
    prompt = [5, 6, 7] * 14
    params = SamplingParams(max_tokens=3, n=2, prompt_logprobs=1)
    group = SubmitGroup(rids=["g0", "g1"], prompt=prompt, params=params, seed=1)
    running.send(group)
    messages = [running.next(Tokens) for _ in range(6)]
    tokens = {r: [t for m in messages if m.rid == r for t in m.tokens] for r in ("g0", "g1")}
    with LLM(tiny, **SETTINGS) as llm:
        expected = llm.generate(prompt, params)[0]
    assert tokens == {"g0": expected.token_ids, "g1": expected.token_ids}
    first, *later = messages
    assert first.rid == "g0" and len(first.prompt_logprobs) == len(prompt)
    assert all(m.prompt_logprobs is None for m in later)
    assert [e.token for e in first.prompt_logprobs[1:]] == prompt[1:]


def test_aborted_requests_fall_silent_and_free_their_pages(running):
    running.send(submit("long", 150))
    assert running.next(Tokens).rid == "long"
    running.send(Abort(["long", "unknown"]))
    running.send(submit("next", 2))
    while (message := running.next(Tokens)).rid == "long":
        assert message.finish is None
    assert message.rid == "next"
    running.next(Tokens)
    stats = running.next(Stats)
    while stats.running:
        stats = running.next(Stats)
    assert stats.pages_free + stats.pages_cached == stats.pages_total


def test_a_full_queue_and_an_invalid_request_are_refused(running):
    running.send(submit("q0", 150))
    running.next(Tokens)  # it runs: two more may wait
    for i in range(1, 5):
        running.send(submit(f"q{i}"))
    refused = [running.next(Failed) for _ in range(2)]
    assert [(f.rid, f.kind) for f in refused] == [("q3", "queue_full"), ("q4", "queue_full")]
    assert "--max-queued-requests" in refused[0].message
    running.send(Abort([f"q{i}" for i in range(5)]))
    running.send(submit("bad", prompt=[9999]))
    failed = running.next(Failed)
    assert (failed.rid, failed.kind, failed.param) == ("bad", "invalid", "prompt")
    running.send(submit("good", 3))
    assert len(running.tokens("good")) == 3


def test_flush_answers_with_the_pages_that_it_freed(running):
    running.send(Flush("before"))
    running.next(Flushed)
    running.send(submit("fill", 2, prompt=range(2, 50)))
    running.tokens("fill")
    running.send(Flush("t1"))
    flushed = running.next(Flushed)
    assert (flushed.token, flushed.pages) == ("t1", 3)


def test_an_idle_engine_does_not_spin(running):
    running.send(submit("one", 1))
    running.next(Tokens)
    assert rests(psutil.Process(running.engine.pids[0]))


def test_a_killed_engine_gives_its_reason(tiny):
    with front(tiny) as end:
        end.next(Ready)
        os.kill(end.engine.pids[0], signal.SIGKILL)
        deadline = time.monotonic() + 30
        while end.engine.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert "rank 0 was ended by SIGKILL" in end.engine.poll()


def test_a_checkpoint_error_is_a_sentence_without_traceback(tiny, tmp_path, capfd):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    with front(tmp_path) as end:
        deadline = time.monotonic() + 60
        while end.engine.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "safetensors" in end.engine.poll()
        assert isinstance(end.engine.failure, CheckpointError)
    assert "Traceback" not in capfd.readouterr().err


def test_ctrl_c_does_not_reach_the_engine_and_stop_is_quick(tiny):
    with front(tiny) as end:
        end.next(Ready)
        os.kill(end.engine.pids[0], signal.SIGINT)
        end.send(submit("after", 2))
        end.tokens("after")
        end.engine.stop(30)
        assert end.engine._processes[0].exitcode == 0, "it left by itself"
        assert not psutil.pid_exists(end.engine.pids[0])


def test_a_rank_that_is_killed_under_load_is_the_reason_and_no_other(tiny, capfd):
    with front(tiny, tp=2, dist_timeout=60) as end:
        end.next(Ready)
        end.send(submit("long", 140, ignore_eos=True))
        end.next(Tokens)
        os.kill(end.engine.pids[1], signal.SIGKILL)
        deadline = time.monotonic() + 30
        while end.engine.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert "rank 1 was ended by SIGKILL" in end.engine.poll()
        while end.inbox.poll(300):
            end.pending += decode_from_engine.decode(end.inbox.recv())
        assert not [m for m in end.pending if isinstance(m, Dead)]  # it would be believed first


MAKE = """
import os, sys, time
from ds_runtime.engine.process.transport import make_private_folder
print(make_private_folder(), flush=True)
time.sleep(60)
"""


def test_folders_of_the_dead_are_swept_and_those_of_the_living_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    env = os.environ | {"TMPDIR": str(tmp_path)}
    makers = [
        subprocess.Popen([sys.executable, "-c", MAKE], stdout=subprocess.PIPE, env=env, text=True)
        for _ in range(2)
    ]
    try:
        dead, alive = (Path(m.stdout.readline().strip()) for m in makers)
        foreign = tmp_path / "ds-runtime-notes"  # of no owner: not ours to remove
        foreign.mkdir()
        makers[0].kill()
        makers[0].wait()
        with private_folder() as own, private_folder() as other:
            assert set(tmp_path.iterdir()) == {alive, foreign, own, other}
            assert dead not in tmp_path.iterdir()
        assert set(tmp_path.iterdir()) == {alive, foreign}
    finally:
        for maker in makers:
            maker.kill()
            maker.communicate()


@pytest.fixture
def short_path():
    """A folder whose name leaves room for that of a socket, whatever the tests' own folder is."""
    with tempfile.TemporaryDirectory(prefix="ds-") as folder:
        yield Path(folder)


def test_children_leave_when_their_parent_is_killed(tiny, short_path):
    script = Path(__file__).with_name("engine_main.py")
    command, env = [sys.executable, script, tiny], os.environ | {"TMPDIR": short_path}
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, env=env)
    try:
        pids = [int(p) for p in parent.stdout.readline().split()]
        assert pids and all(psutil.pid_exists(p) for p in pids)
        assert list(short_path.glob("ds-runtime-*"))
    finally:
        parent.kill()
        parent.communicate()
    _, alive = psutil.wait_procs([psutil.Process(p) for p in pids if psutil.pid_exists(p)], 5)
    assert not alive, alive
    assert not list(short_path.glob("ds-runtime-*"))


@pytest.mark.parametrize("asked", [None, "77"])
def test_the_platform_bounds_spinning_in_the_engine_alone(tiny, asked):
    """libgomp itself says what it read when torch loaded it; what a user sets stays."""
    script = Path(__file__).with_name("engine_main.py")
    env = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    env |= {"OMP_DISPLAY_ENV": "verbose"} | ({"GOMP_SPINCOUNT": asked} if asked else {})
    command = [sys.executable, str(script), str(tiny)]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            (engine,) = (int(pid) for pid in process.stdout.readline().split())
            spawned = Path(f"/proc/{engine}/environ").read_bytes()
        finally:
            process.kill()
        said = process.stderr.read()
    assert set(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", said)) == {asked or "2000"}
    assert (b"GOMP_SPINCOUNT" in spawned) == (asked is not None)  # nothing leaks from the parent
