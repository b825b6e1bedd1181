"""Logits of ranks that divide the vocabulary: by one kernel up to a size, or by the library."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_sums_by_size import of_ranks

from ds_runtime.parallel.mesh import Mesh
from ds_runtime.parallel.sums.kinds import Sums, SumSizes
from ds_runtime.parallel.sums.logits import Logits
from ds_runtime.parallel.world import World
from thread_members import Member


class Plain(Member):
    """A thread's communicator."""

    used = ()

    def all_gather(self, x):
        self.used = [*self.used, "all_gather"]
        return torch.cat(self.gather_objects(x), -1)


class Gathering(Plain):
    """The same with such a kernel, and notes of what served. lacking: ranks that cannot set it
    up."""

    def __init__(self, shared, ranks, rank, lacking=()):
        super().__init__(shared, ranks, rank)
        self.used, self.asked, self.lacking = [], [], lacking

    def split(self, groups):
        made = super().split(groups)
        return Gathering(made.shared, made.ranks, made.ranks[made.rank], self.lacking)

    def gather_logits(self, nbytes):
        self.asked.append(nbytes)

        def gather(x, out):
            assert x.is_contiguous() and x.dtype == torch.bfloat16 and x.shape[1] % 8 == 0
            assert 2 * x.numel() <= nbytes and out.dtype == torch.float32
            self.used.append("kernel")
            out.copy_(torch.cat(self.gather_objects(x), 1)[:, : out.shape[1]])

        return None if self.rank in self.lacking else gather


def gathering(size, run, lacking=()):
    made = lambda comm: Gathering(comm.shared, comm.ranks, comm.rank, lacking)  # noqa: E731
    return of_ranks(size, lambda comm: run(made(comm)))


def part(rank, rows, n, dtype=torch.bfloat16):
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(rows, n, generator=draw).to(dtype)


@given(
    st.sampled_from([2, 3, 4]),
    st.integers(0, 5),
    st.sampled_from([1, 8, 12, 24]),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.booleans(),
    st.booleans(),
)
def test_every_size_has_the_values_of_all_parts(size, rows, n, dtype, given_out, strided):
    most, width = size * 2 * 24 * 3, size * n - min(n - 1, 3)

    def run(comm):
        x = part(comm.rank, n, rows, dtype).T if strided else part(comm.rank, rows, n, dtype)
        out = torch.full((rows, width), -1.0) if given_out else None
        found = Logits(comm, most)(x, width, out)
        assert out is None or found is out
        return found, x, comm.used, comm.asked

    every = gathering(size, run)
    want = torch.cat([x for _, x, *_ in every], 1).float()[:, :width]
    kernel = dtype == torch.bfloat16 and n % 8 == 0 and rows * n <= 24 * 3
    for found, _, used, asked in every:
        assert found.dtype == torch.float32 and torch.equal(found, want)
        assert used == ["kernel" if kernel else "all_gather"] and asked == [2 * 24 * 3]


@pytest.mark.parametrize("lacking", [(0,), (1,), (0, 1)])
def test_a_rank_without_it_leaves_all_with_the_library(lacking):
    def run(comm):
        logits = Logits(comm, 1 << 10)
        logits(part(comm.rank, 1, 8), 16)
        return logits.most, comm.used

    assert gathering(2, run, lacking) == [(0, ["all_gather"])] * 2


def test_a_communicator_from_before_the_contract_had_it():
    def run(comm):
        plain = Plain(comm.shared, comm.ranks, comm.rank)
        logits = Logits(plain, 1 << 10)
        return logits.most, logits(part(0, 1, 8), 16).shape

    assert of_ranks(2, run) == [(0, (1, 16))] * 2


@pytest.mark.parametrize("in_order", [False, True])
def test_whatever_makes_sums_the_group_itself_is_asked(in_order):
    """Also where it was written before the contract had this gather."""

    def run(old, comm):
        own = Plain(comm.shared, comm.ranks, comm.rank) if old else comm
        sums = Sums(SumSizes((("one_shot", 64),)), gathered=1 << 10)
        world = World(Mesh(2), own, in_order, sums, shares=False)
        return world.sums.gathered, world.logits(part(comm.rank, 1, 8), 16)

    for old in (False, True):
        for gathered, found in gathering(2, partial(run, old)):
            assert gathered == (0 if old else 1 << 10)
            assert torch.equal(found, torch.cat([part(r, 1, 8) for r in range(2)], 1).float())


@pytest.mark.parametrize("most", [0, 1 << 10])
@pytest.mark.parametrize("lacking", [(), (1,)])
def test_no_rows_are_gathered_too(most, lacking):
    found = gathering(2, lambda comm: Logits(comm, most)(part(0, 0, 8), 16).shape, lacking)
    assert found == [(0, 16)] * 2
    assert World.alone().logits(part(0, 0, 8), 8).shape == (0, 8)


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("wanted", [0, 1 << 10])
def test_all_ranks_that_divide_the_vocabulary_gather(dp, wanted):
    """However attention is divided; nothing is set up where it is not wanted."""

    def run(comm):
        world = World(Mesh(4, dp), comm, sums=Sums(gathered=wanted))
        found = world.logits(part(comm.rank, 2, 8), 31)
        return world.sums.gathered, found, comm.asked

    for gathered, found, asked in gathering(4, run):
        assert torch.equal(found, torch.cat([part(r, 2, 8) for r in range(4)], 1)[:, :31].float())
        assert gathered == wanted and asked == ([wanted // 4] if wanted else [])
