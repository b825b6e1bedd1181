"""Communicators of threads, one for each rank: collectives without processes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch


class Shared:
    """What threads of one group leave for each other."""

    def __init__(self, size):
        self.values, self.barrier = [None] * size, threading.Barrier(size, timeout=60)


class Member:
    """The communicator of one thread."""

    def __init__(self, shared, ranks, rank):
        self.shared, self.ranks = shared, ranks
        self.rank, self.size = ranks.index(rank), len(ranks)

    def split(self, groups):
        own = next(group for group in groups if self.rank in group)
        with LOCK:
            shared = self.shared.setdefault(tuple(own), Shared(len(own)))
        return Member(self.shared | {"": shared}, own, self.rank)

    def gather_objects(self, value):
        shared = self.shared[""]
        shared.values[self.rank] = value
        shared.barrier.wait()
        values = list(shared.values)
        shared.barrier.wait()
        return values

    def all_reduce(self, x):
        return torch.stack(self.gather_objects(x)).sum(0)

    def all_gather(self, x):
        return torch.cat(self.gather_objects(x), dim=-1)

    def gather_rows(self, x):
        assert x.shape[0], "no rows"
        return torch.cat(self.gather_objects(x))

    def reduce_scatter(self, x):
        return self.all_reduce(x).chunk(self.size)[self.rank]

    def close(self):
        pass


def in_threads(size, run, make=Member):
    """What `run(communicator)` returns of each rank. Raises the first error of one; ranks that wait
    for it end, too. make: the communicator, of `Shared` by name, all ranks and a rank."""
    shared, ranks = {"": Shared(size)}, tuple(range(size))

    def work(rank):
        try:
            return run(make(shared, ranks, rank))
        except BaseException:
            for some in [*shared.values()]:
                some.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        done = [pool.submit(work, rank) for rank in ranks]
    errors = [error for one in done if (error := one.exception())]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [one.result() for one in done]


LOCK = threading.Lock()
