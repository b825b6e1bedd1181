"""A rank that dies on one of two nodes, in every phase: both read why, and no process is left."""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import replace

import pytest
from test_rank_death import LIMIT, PHASES, Front, check_end, check_told, environment, family, plugin

from ds_runtime.config import EngineConfig
from ds_runtime.engine.messages import Ready, Tokens
from ds_runtime.engine.process.launch import EngineProcesses
from ds_runtime.engine.process.transport import private_folder

__all__ = ["plugin"]
CASES = {  # phase → how, communicator, of rank 0 and of rank 1
    "environment": ("raise gloo", "raise gloo"),  # before a rank has decided anything
    "device": ("kill gloo", "stop gloo"),  # before it has said hello
    "start": ("raise gloo", "kill gloo"),
    "load": ("raise deaf", "exit gloo"),
    "capture": ("kill gloo", "raise deaf"),
    "prefill": ("raise gloo", "stop deaf"),
    "decode": ("exit deaf", "raise gloo"),
    "close": ("raise deaf", "kill deaf"),
}


def address():
    with socket.create_server(("127.0.0.1", 0)) as one:
        return f"127.0.0.1:{one.getsockname()[1]}"


class Nodes(Front):
    """The front end of node 0, and what runs the ranks of node 1."""

    def __init__(self, folders, phase, tmp_path):
        (tmp_path / "word").write_text("a secret")
        self.more = {"nnodes": 2, "dist_init_addr": address(), "dist_timeout": 60}
        self.more |= {"dist_token_file": str(tmp_path / "word")}
        self.second = folders[1]
        super().__init__(folders[0], phase)

    def made(self, config, folder, *given):
        configs = [replace(config, node_rank=number, **self.more) for number in (0, 1)]
        self.other = EngineProcesses(configs[1], self.second, *given)
        return EngineProcesses(configs[0], folder, *given)

    def start(self):
        super().start()
        self.other.start()
        self.family |= set().union(*map(family, self.other.pids))

    def close(self):
        self.other.stop(0.0)
        super().close()


@contextlib.contextmanager
def nodes(phase, tmp_path):
    with private_folder() as one, private_folder() as two:
        both = Nodes((one, two), phase, tmp_path)
        try:
            yield both
        finally:
            both.close()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", CASES)
def test_both_nodes_learn_why_and_end(tmp_path, monkeypatch, phase, rank):
    how = CASES[phase][rank]
    env, at = environment(tmp_path, rank, phase, how)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with nodes(phase, tmp_path) as both:
        serves = both.until(Ready)
        assert serves is (phase in PHASES[3:]), both.engine.poll()
        if serves:
            both.ask()
            assert both.until(Tokens) is (phase != "prefill")
        if phase == "close":
            both.engine.stop()
        else:
            assert not both.until(())
        assert both.other.over.wait(LIMIT)
        check_end(at, both.family)
        said = [both.engine.poll(), both.other.poll()]
        for number, one in enumerate(said):
            if number == rank or phase != "close":
                told(one, number, rank, phase, how.split()[0])
        assert time.time() - float(at.read_text()) < LIMIT + 5


def told(said, node, rank, phase, how):
    """What is read on a node."""
    if how == "stop" and node == 0 and "cannot be reached" in said:
        assert said.startswith("rank 1 on node 1 (127.0.0.1) has left"), said
    else:
        check_told(said.removesuffix(" (on node 1)"), rank, phase, how)
        assert said.endswith("(on node 1)") == (rank == 1 and node == 0), said


@pytest.mark.slow
def test_the_first_cause_is_read_on_every_node_of_several(tmp_path, monkeypatch):
    """The one that was killed breaks the connections of the others, who fail as well."""
    env, at = environment(tmp_path, 2, "decode", "kill gloo")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    config = EngineConfig(
        model="demo", platform="mortal", dtype="float32", kv_memory=32_000_000, threads=1,
        context_length=128, tp=4, max_running_requests=2, disable_graph=True, nnodes=4,
        dist_init_addr=address(), dist_timeout=60,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        folders = [stack.enter_context(private_folder()) for _ in range(4)]
        front = Front.__new__(Front)
        front.made = lambda *_: EngineProcesses(config, folders[0], ("platform",), ("mortal",))
        others = [
            EngineProcesses(
                replace(config, node_rank=number), folders[number], ("platform",), ("mortal",)
            )
            for number in (1, 2, 3)
        ]
        for one in others:
            one.start()
        Front.__init__(front, folders[0], "decode")
        try:
            assert front.until(Ready), front.engine.poll()
            front.ask()
            assert front.until(Tokens) and not front.until(())
            for one in others:
                assert one.over.wait(LIMIT)
            assert time.time() - float(at.read_text()) < LIMIT
            for one in (front.engine, *others):
                assert one.poll().startswith("engine rank 2 was ended by SIGKILL"), one.poll()
        finally:
            for one in others:
                one.stop(0.0)
            front.close()
