"""Communicators of threads, one for each rank: collectives without processes."""

from __future__ import annotations

import threading

import torch


class Shared:
    """What threads of one group leave for each other."""

    def __init__(self, size):
        self.values, self.barrier = [None] * size, threading.Barrier(size, timeout=30)


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

    def gather_rows(self, x):
        assert x.shape[0], "no rows"
        return torch.cat(self.gather_objects(x))

    def reduce_scatter(self, x):
        return self.all_reduce(x).chunk(self.size)[self.rank]


LOCK = threading.Lock()
