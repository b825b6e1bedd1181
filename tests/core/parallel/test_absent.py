"""Ranks that wait for one that does not come end when their time is over, and name it."""

from __future__ import annotations

import re
import time

import pytest
import torch

from ds_runtime.parallel.group import TorchCommunicator
from ds_runtime.parallel.skew import absent
from parts import mostly_slow
from rank_processes import run_ranks

TIMEOUT, SIZE, LATE = 3.0, 3, 1
WAITS = {
    "all_reduce_async": lambda group: group.all_reduce_async(torch.ones(4))(),
    "all_reduce": lambda group: group.all_reduce(torch.ones(4)),
    "all_gather": lambda group: group.all_gather(torch.ones(4)),
    "gather_rows": lambda group: group.gather_rows(torch.ones(4)),
    "reduce_scatter": lambda group: group.reduce_scatter(torch.ones(SIZE)),
    "all_to_all": lambda group: group.all_to_all(torch.ones(SIZE)),
    "broadcast": lambda group: group.broadcast(torch.ones(4), LATE),
    "receive": lambda group: group.receive((4,), torch.float32, LATE),
    "barrier": lambda group: group.barrier(),
    "gather_objects": lambda group: group.gather_objects("x"),
    "one comes late": lambda group: group.receive((4,), torch.float32, LATE),
}


def wait(rank, size, address, kind):
    torch.set_num_threads(1)
    group = TorchCommunicator("gloo", rank, size, address, TIMEOUT)
    group.barrier()
    if rank == LATE:
        time.sleep(60)
    if kind == "one comes late":
        time.sleep(rank)  # more than the second that ranks have to give up together
    begin = time.monotonic()
    try:
        WAITS[kind](group)
        said = "nothing"
    except Exception as e:
        said = f"{type(e).__name__}: {e}"
    return rank, time.monotonic() - begin, said


def waited(tmp_path, kind):
    """(rank, seconds that it waited, what it said) of the ranks that came."""
    return run_ranks(wait, SIZE, tmp_path, kind, answers=SIZE - 1, limit=50)


@pytest.mark.parametrize("kind", mostly_slow([*WAITS][:-1], 1))
def test_the_others_name_the_rank_that_does_not_come(tmp_path, kind):
    found = waited(tmp_path, kind)
    for (rank, seconds, said), wanted in zip(found, (0, 2), strict=True):
        assert rank == wanted and seconds < TIMEOUT + 5
        form = rf"EngineDeadError: engine rank {LATE} did not come within 3 s \(--dist-timeout\) .*"
        assert re.fullmatch(form + rf"engine rank {rank} waits for: .*", said), said


def test_one_that_comes_late_is_not_said_to_be_absent_for_sure(tmp_path):
    first, later = waited(tmp_path, "one comes late")
    some = "at least one of engine rank 1 and engine rank 2 did not come within 3 s"
    assert first[0] == 0 and some in first[2]
    assert later[0] == 2 and f": engine rank {LATE} did not come within 3 s" in later[2]


class Board(dict):
    def set(self, key, value):
        self[key] = value

    def check(self, keys):
        return all(key in self for key in keys)


def test_nobody_is_named_where_all_gave_up():
    """Another fault than a late rank: what the backend says is told."""
    board = Board()
    assert absent(board, 0, range(3)) == [1, 2]
    assert absent(board, 2, range(3)) == [1]
    assert absent(board, 1, range(3)) == []


def test_only_those_are_named_for_whom_a_rank_waits():
    assert absent(Board(), 0, (0, 3)) == [3]


class Stopped(Board):
    def check(self, keys):
        time.sleep(60)


class Gone(Board):
    def set(self, key, value):
        raise RuntimeError("connection reset")


@pytest.mark.parametrize("board", [Stopped(), Gone()], ids=type)
def test_a_board_that_does_not_answer_names_nobody_and_holds_nobody_up(board):
    begin = time.monotonic()
    assert absent(board, 0, range(3)) == [] and time.monotonic() - begin < 10
