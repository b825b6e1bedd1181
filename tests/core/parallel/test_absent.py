"""Ranks that wait for one that does not come end when their time is over, and name it."""

from __future__ import annotations

import multiprocessing
import re
import time

import pytest
import torch

from ds_runtime.parallel.group import TorchCommunicator
from ds_runtime.parallel.skew import absent
from parts import mostly_slow

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
}


def wait(rank, address, kind, results):
    torch.set_num_threads(1)
    group = TorchCommunicator("gloo", rank, SIZE, address, TIMEOUT)
    group.barrier()
    if rank == LATE:
        time.sleep(60)
    begin = time.monotonic()
    try:
        WAITS[kind](group)
        said = "nothing"
    except Exception as e:
        said = f"{type(e).__name__}: {e}"
    results.put((rank, time.monotonic() - begin, said))


@pytest.mark.parametrize("kind", mostly_slow(WAITS, 1))
def test_the_others_name_the_rank_that_does_not_come(tmp_path, kind):
    context = multiprocessing.get_context("spawn")
    results, address = context.Queue(), f"file://{tmp_path}/meeting"
    ranks = [context.Process(target=wait, args=(r, address, kind, results)) for r in range(SIZE)]
    try:
        for process in ranks:
            process.start()
        found = sorted(results.get(timeout=50) for _ in range(SIZE - 1))
    finally:
        for process in ranks:
            process.kill()
            process.join()
    for (rank, seconds, said), wanted in zip(found, (0, 2), strict=True):
        assert rank == wanted and seconds < TIMEOUT + 5
        form = rf"EngineDeadError: engine rank {LATE} did not come within 3 s \(--dist-timeout\) .*"
        assert re.fullmatch(form + rf"engine rank {rank} waits for: .*", said), said


class Board(dict):
    def set(self, key, value):
        self[key] = value

    def check(self, keys):
        return all(key in self for key in keys)


def test_nobody_is_named_where_all_gave_up():
    """Another fault than a late rank: what the backend says is told."""
    board = Board()
    assert absent(board, 0, 3) == [1, 2]
    assert absent(board, 2, 3) == [1]
    assert absent(board, 1, 3) == []
