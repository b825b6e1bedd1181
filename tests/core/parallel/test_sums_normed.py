"""Sums that are one kernel with the add and the norm behind them: which, and with which bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_sums_by_size import Fast, of_ranks

from ds_runtime.model.layers import Codes, RmsNormLayer
from ds_runtime.ops.contracts.linear import Groups
from ds_runtime.ops.reference import norm
from ds_runtime.parallel.exchange import exchange_of
from ds_runtime.parallel.mesh import Mesh
from ds_runtime.parallel.sums.by_size import BySize, later
from ds_runtime.parallel.sums.kinds import FAST, ONE_SHOT, TWO_SHOT, Sums, SumSizes
from ds_runtime.parallel.sums.normed import WIDEST, Unsummed
from ds_runtime.parallel.world import World
from thread_members import Member, Shared

WIDTH = 16
LIMITS = SumSizes(((ONE_SHOT, 4 * WIDTH * 2), (TWO_SHOT, 8 * WIDTH * 2)))


class Norming(Fast):
    """A thread's communicator whose one-shot sums may be fused, with notes of them."""

    def __init__(self, shared, ranks, rank, kinds=FAST, able=True):
        super().__init__(shared, ranks, rank, kinds)
        self.able, self.room = able, []

    def split(self, groups):
        made = super().split(groups)
        return Norming(made.shared, made.ranks, made.ranks[made.rank], self.kinds, self.able)

    def normed_sum(self, nbytes):
        self.room.append(nbytes)
        return Composed(self) if self.able else None


class Composed:
    """Of a communicator, in torch."""

    def __init__(self, comm):
        self.comm = comm

    def __call__(self, x, *rest):
        self.comm.used.append("normed")
        return norm.add_rms_norm(self._sum(x), *rest)

    def quantized(self, x, residual, weight, eps, ue8m0):
        self.comm.used.append("quantised")
        return norm.add_rms_norm_quantize(self._sum(x), residual, weight, eps, 128, ue8m0)

    def _sum(self, x):
        assert x.is_contiguous() and x.numel() * 2 <= self.comm.room[0]
        total = torch.zeros(x.shape)
        for part in self.comm.gather_objects(x):
            total = total + part.float()
        return total.to(x.dtype)


class Reference:
    """The platform's kernels."""

    add_rms_norm = staticmethod(norm.add_rms_norm)
    add_rms_norm_quantize = staticmethod(norm.add_rms_norm_quantize)


def norming(size, run, able=None):
    """What `run(communicator)` returns of each rank of one group."""
    each = iter(able or [True] * size)
    given = dict(zip(range(size), each, strict=True))

    def made(comm):
        own = Norming(comm.shared, comm.ranks, comm.rank, able=given[comm.rank])
        return run(own)

    return of_ranks(size, made)


def whole(rank, rows, width=WIDTH, dtype=torch.bfloat16):
    """Small whole numbers, whose sums are exact."""
    draw = torch.Generator().manual_seed(rank)
    return torch.randint(-9, 9, (rows, width), generator=draw).to(dtype)


@given(st.integers(0, 9), st.sampled_from([2, 4]), st.sampled_from([8, 12, 16]), st.booleans())
def test_a_fused_sum_has_the_bits_of_its_parts(rows, size, width, wide):
    dtype = torch.float32 if wide else torch.bfloat16
    residual, weight = whole(99, rows, width, dtype), whole(98, 1, width, dtype)[0]
    layer = RmsNormLayer(Reference, weight, 1e-6)

    def run(comm):
        group = BySize(comm, LIMITS)
        x = whole(comm.rank, rows, width, dtype)
        plain = layer.add(group.all_reduce(x), residual.clone())
        del comm.used[:]
        held = later(group, x)
        return [type(held)], plain, layer.add(held, residual.clone()), comm.used

    total = sum(whole(rank, rows, width, dtype).double() for rank in range(size))
    nbytes = rows * width * dtype.itemsize
    fused = not wide and width % 8 == 0 and LIMITS.kind(nbytes) == ONE_SHOT
    for before, plain, found, used in norming(size, run):
        assert torch.equal(found[1].double(), total + residual.double())
        assert all(map(torch.equal, plain, found))
        assert used[-1:] == (["normed"] if fused else [LIMITS.kind(nbytes)])
        assert (before[-1] is Unsummed) == fused and len(used) == 1


def test_rows_are_chosen_before_they_are_summed():
    """As where the last layer goes on with the rows whose logits are wanted."""
    residual, weight = whole(99, 3), whole(98, 1)[0]
    layer, rows = RmsNormLayer(Reference, weight, 1e-6), torch.tensor([0, 2])

    def run(comm):
        held = later(BySize(comm, LIMITS), whole(comm.rank, 3))
        assert held.shape == (3, WIDTH) and held[rows].shape == (2, WIDTH)
        return layer.add(held[rows], residual[rows])

    total = sum(whole(rank, 3) for rank in range(2))
    want = norm.add_rms_norm(total[rows], residual[rows], weight, 1e-6)
    for found in norming(2, run):
        assert all(map(torch.equal, found, want))


@pytest.mark.parametrize("groups", [Groups(128, False), Groups(128, True), Groups(64, False)])
def test_a_norm_that_is_quantised_is_fused_where_its_groups_are(groups):
    residual, weight = whole(99, 1, 128), whole(98, 1, 128)[0]
    layer = RmsNormLayer(Reference, weight, 1e-6)
    limits = SumSizes(((ONE_SHOT, 256),))

    def run(comm):
        held = later(BySize(comm, limits), whole(comm.rank, 1, 128))
        assert isinstance(held, Unsummed)
        return layer.add_quantized(held, residual.clone(), groups), comm.used

    total = sum(whole(rank, 1, 128) for rank in range(2))
    want = norm.add_rms_norm_quantize(total, residual, weight, 1e-6, *groups)
    for (codes, summed), used in norming(2, run):
        assert isinstance(codes, Codes)
        assert used == ["quantised" if groups.size == 128 else ONE_SHOT]
        assert torch.equal(codes.q.view(torch.uint8), want[0].view(torch.uint8))
        assert torch.equal(codes.scale, want[1]) and torch.equal(summed, want[2])


@pytest.mark.parametrize("without", range(3))
def test_a_rank_that_lacks_it_lets_all_compose(without):
    """Else the others would wait for it."""

    def run(comm):
        group = BySize(comm, LIMITS)
        found = later(group, whole(comm.rank, 1))
        return isinstance(found, torch.Tensor), group.norms, comm.used

    able = [rank != without for rank in range(3)]
    assert norming(3, run, able) == [(True, False, [ONE_SHOT])] * 3


def test_what_is_asked_for_has_room_for_a_one_shot_sum():
    def run(comm):
        BySize(comm, LIMITS)
        BySize(comm, SumSizes(((TWO_SHOT, 256),)))
        BySize(comm, SumSizes())
        return comm.room

    assert norming(2, run) == [[4 * WIDTH * 2]] * 2


def test_wide_rows_and_other_groups_are_summed_at_once():
    limits = SumSizes(((ONE_SHOT, 1 << 20),))

    def run(comm):
        group = BySize(comm, limits)
        kinds = [type(later(group, whole(comm.rank, 1, w))) for w in (WIDEST, WIDEST + 8)]
        return kinds, type(later(comm, whole(comm.rank, 1)))

    for found in norming(2, run):
        assert found == ([Unsummed, torch.Tensor], torch.Tensor)


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_the_way_of_rows_holds_a_sum_back_where_one_group_has_all(dp, wanted):
    def run(comm):
        world = World(Mesh(4, dp), comm, sums=Sums(LIMITS, normed=wanted))
        exchange, heads = exchange_of(world), world.group("attn_tp")
        held = dp == 1 and exchange.leave_later(whole(comm.rank, 2), None, 2, whole(comm.rank, 2))
        if isinstance(held, Unsummed):
            return world.sums, held.summed(), held.part
        return world.sums, isinstance(heads, BySize) and heads.norms, exchange.leave_later

    for rank, (sums, *found) in enumerate(norming(4, run)):
        assert sums.normed == (wanted and dp < 4)
        if dp == 1 and wanted:
            assert torch.equal(found[0], 2 * sum(whole(r, 2) for r in range(4)))
            assert torch.equal(found[1], 2 * whole(rank, 2))
        else:
            assert found[0] == (wanted and dp == 2)


def test_a_communicator_from_before_the_contract_had_normed_sum():
    def run(comm):
        group = BySize(comm, LIMITS)
        return group.norms, isinstance(later(group, whole(comm.rank, 1)), torch.Tensor)

    assert of_ranks(2, run) == [(False, True)] * 2
    shared = {"": Shared(1)}
    assert later(Member(shared, [0], 0), whole(0, 1)).shape == (1, WIDTH)
