"""Ranks of a test, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT = 120.0  # seconds until every rank has answered


def run_ranks(
    work: Callable[..., Any],
    size: int,
    folder: Path,
    *given: Any,
    answers: int | None = None,
    limit: float = LIMIT,
) -> list[Any]:
    """What `work(rank, size, address, *given)` returns on each rank, in their order.

    `work` and its arguments are pickled. `address` is for torch.distributed. answers: how many
    ranks return (default: all); the others are killed. Fails with the traceback of the first rank
    that raises. Raises queue.Empty if no answer comes for `limit` seconds.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    address = f"file://{folder}/meet"
    ranks = [
        context.Process(
            target=_answer, args=(results, work, rank, size, address, *given), daemon=True
        )
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    try:
        found = {}
        for _ in range(answers or size):
            rank, raised, answer = results.get(timeout=limit)
            assert not raised, f"rank {rank}: {raised}"  # the others may wait for it for ever
            found[rank] = answer
        if answers is None:
            for process in ranks:
                process.join(limit)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [found[rank] for rank in sorted(found)]


def _answer(
    results: Any, work: Callable[..., Any], rank: int, size: int, address: str, *given: Any
) -> None:
    try:
        results.put((rank, "", work(rank, size, address, *given)))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
