"""Which kind of all-reduce serves which size, and that groups use it."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime.parallel.mesh import Mesh
from ds_runtime.parallel.sums.by_size import BySize
from ds_runtime.parallel.sums.in_order import InOrder
from ds_runtime.parallel.sums.kinds import (
    FAST,
    LIBRARY,
    MOST,
    ONE_SHOT,
    TWO_SHOT,
    Sums,
    SumSizes,
    chosen,
    received,
)
from ds_runtime.parallel.world import World
from thread_members import Member, in_threads

SIZES = [1 << power for power in range(12, 18)]
seconds = st.floats(1e-6, 1e-3)
curve = st.lists(seconds, min_size=len(SIZES), max_size=len(SIZES)).map(
    lambda took: dict(zip(SIZES, took, strict=True))
)


def loss(sizes, curves):
    """How many times the fastest, over all sizes."""
    return sum(curves[sizes.kind(at)][at] / min(one[at] for one in curves.values()) for at in SIZES)


@given(st.fixed_dictionaries({LIBRARY: curve}, optional={ONE_SHOT: curve, TWO_SHOT: curve}))
def test_no_other_limits_are_faster(curves):
    found = chosen(curves)
    assert {kind for kind, _ in found.upto} <= {*curves}
    ends = [most for _, most in found.upto]
    assert ends == sorted(set(ends)) and set(ends) <= {*SIZES}
    fast = [kind for kind in FAST if kind in curves]
    for limits in itertools.product([0, *SIZES], repeat=len(fast)):
        other = SumSizes(tuple(zip(fast, limits, strict=True)))
        assert loss(found, curves) <= loss(other, curves) + 1e-9


def test_limits_of_curves_that_cross():
    """As on GPUs: one-shot is the fastest to 256 KiB, two-shot to 1 MiB."""
    sizes = [1 << power for power in range(12, 28)]
    curves = {
        LIBRARY: {n: max(17e-6, n / 3e11) for n in sizes},
        ONE_SHOT: {n: 6e-6 + n / 1e11 for n in sizes},
        TWO_SHOT: {n: 9e-6 + n / 2.5e11 for n in sizes if n <= MOST},
    }
    found = chosen(curves)
    assert found.upto == ((ONE_SHOT, 1 << 18), (TWO_SHOT, 1 << 20))
    assert (
        str(found)
        == "one_shot up to 256 KiB, two_shot up to 1 MiB, all_reduce of the library above"
    )
    assert found.most == 1 << 20
    assert [found.kind(n) for n in (16, 1 << 18, (1 << 18) + 16, (1 << 20) + 16)] == [
        ONE_SHOT,
        ONE_SHOT,
        TWO_SHOT,
        LIBRARY,
    ]
    assert {found.kind(n) for n in (0, 8, 24, 1 << 24)} == {LIBRARY}  # whole 16 bytes


def test_equal_times_are_the_librarys():
    same = dict.fromkeys(SIZES, 1e-5)
    found = chosen({LIBRARY: same, ONE_SHOT: same, TWO_SHOT: same})
    assert found == SumSizes() and str(found) == LIBRARY and found.most == 0


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_that_a_rank_receives(ranks):
    assert received(ONE_SHOT, ranks) == ranks - 1
    assert received(TWO_SHOT, ranks) == received(LIBRARY, ranks) == 2 * (ranks - 1) / ranks


class Fast(Member):
    """A thread's communicator with both kinds, which notes who sums what."""

    def __init__(self, shared, ranks, rank, kinds=FAST):
        super().__init__(shared, ranks, rank)
        self.kinds, self.asked, self.used = kinds, [], []

    def split(self, groups):
        made = super().split(groups)
        return Fast(made.shared, made.ranks, made.ranks[made.rank], self.kinds)

    def fast_sums(self, nbytes):
        self.asked.append(nbytes)
        return {kind: lambda x, kind=kind: self._fast(kind, x) for kind in self.kinds}

    def _fast(self, kind, x):
        assert x.is_contiguous()
        self.used.append(kind)
        return super().all_reduce(x)

    def all_reduce(self, x):
        self.used.append(LIBRARY)
        return super().all_reduce(x)


class Plain(Member):
    """As before the contract had `fast_sums`, with the same notes."""

    def __init__(self, shared, ranks, rank):
        super().__init__(shared, ranks, rank)
        self.asked, self.used = [], []

    def split(self, groups):
        made = super().split(groups)
        return Plain(made.shared, made.ranks, made.ranks[made.rank])

    def all_reduce(self, x):
        self.used.append(LIBRARY)
        return super().all_reduce(x)


def of_ranks(size, run, kinds=FAST, lacking=None):
    """What `run(communicator)` returns of each rank. lacking: by rank, its kinds, where they
    differ; None is of a communicator without `fast_sums`.
    """

    def make(shared, ranks, rank):
        own = kinds if lacking is None else lacking[rank]
        return (Plain if own is None else partial(Fast, kinds=own))(shared, list(ranks), rank)

    return in_threads(size, run, make)


LIMITS = SumSizes(((ONE_SHOT, 64), (TWO_SHOT, 256)))
CASES = [  # (shape, dtype, kind)
    ((1, 16), torch.float32, ONE_SHOT),
    ((2, 16), torch.bfloat16, ONE_SHOT),
    ((1, 17), torch.float32, LIBRARY),  # 68 bytes
    ((2, 4, 8), torch.float32, TWO_SHOT),
    ((8, 16), torch.bfloat16, TWO_SHOT),
    ((8, 9), torch.float32, LIBRARY),  # 288
    ((1, 16), torch.float16, LIBRARY),
    ((1, 8), torch.float64, LIBRARY),
    ((0, 8), torch.float32, LIBRARY),
]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("kinds", "served"), [(FAST, FAST), ((), ()), ((TWO_SHOT,), (TWO_SHOT,))])
def test_a_sum_is_of_the_kind_of_its_size(size, kinds, served):
    def run(comm):
        group = BySize(comm, LIMITS)
        sums = []
        for shape, dtype, _ in CASES:
            x = torch.full(shape, 1.0 + comm.rank, dtype=dtype)
            sums.append(group.all_reduce(x.transpose(0, -1).contiguous().transpose(0, -1)))
        rows = group.gather_rows(torch.full((1, 2), float(comm.rank)))
        return comm, sums, rows

    for comm, sums, rows in of_ranks(size, run, kinds=kinds):
        assert comm.asked == [256]
        smaller = {ONE_SHOT: TWO_SHOT if TWO_SHOT in served else LIBRARY}
        want = [k if k in served else smaller.get(k, LIBRARY) for *_, k in CASES]
        assert comm.used == want
        for (shape, dtype, _), found in zip(CASES, sums, strict=True):
            assert found.shape == shape and found.dtype == dtype
            assert bool((found == size * (size + 1) / 2).all())
        assert rows[:, 0].tolist() == list(map(float, range(size)))


def test_a_communicator_from_before_the_contract_had_fast_sums():
    def run(comm):
        old = Member(comm.shared, comm.ranks, comm.rank)
        return BySize(old, LIMITS).all_reduce(torch.ones(4)).tolist()

    assert of_ranks(2, run) == [[2.0] * 4] * 2


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_ranks_that_divide_heads_sum_by_size(dp):
    """And no others: a buffer that nobody uses takes memory."""

    def run(comm):
        return comm, World(Mesh(4, dp), comm, sums=Sums(LIMITS))

    for comm, world in of_ranks(4, run):
        heads = world.group("attn_tp")
        assert isinstance(heads, BySize) == (dp < 4)
        others = [world.group(axis) for axis in ("tp", "attn_dp")]
        assert not any(isinstance(one, BySize) for one in others if one is not heads)
        assert len(comm.asked) == (dp == 1)


def test_sums_in_order_have_no_other_kinds():
    world = of_ranks(2, lambda comm: World(Mesh(2), comm, True, Sums(LIMITS)))[0]
    assert isinstance(world.group("tp"), InOrder) and not world.everyone.asked


KINDS_OF_A_RANK = st.none() | st.lists(st.sampled_from(FAST), unique=True).map(tuple)


@given(st.lists(KINDS_OF_A_RANK, min_size=2, max_size=4))
def test_a_kind_that_one_rank_lacks_serves_none(lacking):
    """Ranks of different kinds would wait for each other."""

    def run(comm):
        group = BySize(comm, LIMITS)
        sums = [group.all_reduce(torch.full((1, n), 1.0 + comm.rank)) for n in (4, 32, 128)]
        return comm.used, group.sizes, [float(x.max()) for x in sums]

    common = set(FAST).intersection(*(one or () for one in lacking))
    left = SumSizes(tuple(one for one in LIMITS.upto if one[0] in common))
    size = len(lacking)
    for used, sizes, sums in of_ranks(size, run, lacking=lacking):
        assert sizes == left
        assert used == [left.kind(n * 4) for n in (4, 32, 128)]
        assert sums == [size * (size + 1) / 2] * 3


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("without", range(4))
def test_every_rank_knows_what_the_group_of_rank_0_could_set_up(dp, without):
    lacking = [(ONE_SHOT,) if rank == without else FAST for rank in range(4)]

    def run(comm):
        world = World(Mesh(4, dp), comm, sums=Sums(LIMITS))
        group = world.group("attn_tp")
        return world.sums.sizes, group.sizes, float(group.all_reduce(torch.ones(32))[0])

    left = SumSizes(((ONE_SHOT, 64),))
    each, found = 4 // dp, of_ranks(4, run, lacking=lacking)
    for rank, (known, own, total) in enumerate(found):
        assert own == (left if rank // each == without // each else LIMITS)
        assert known == (left if without < each else LIMITS) and total == each


def test_a_world_without_other_kinds_knows_it():
    worlds = of_ranks(2, lambda comm: World(Mesh(2), comm, True, Sums(LIMITS)).sums)
    worlds += of_ranks(2, lambda comm: World(Mesh(2), comm).sums)
    assert worlds == [Sums()] * 4
