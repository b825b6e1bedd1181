"""Rows that go to experts of other ranks as the codes that these would make of them: the same bits
in half the bytes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from model_harness import decide

from ds_runtime.assembly.crossing import Crossing, takes_codes
from ds_runtime.engine.step.transfer import Upload
from ds_runtime.model.layers import Codes, ExpertsLayer
from ds_runtime.model.moe import MoeMlp
from ds_runtime.ops.binding.bound import BoundOps
from ds_runtime.parallel.world import World
from ds_runtime.weights.load import load_model
from ds_runtime.weights.loader import Loader
from ds_runtime_kit.models.tiny import write_tiny_fp8
from examples import examples
from thread_members import Member, Shared, in_threads

CPU, HIDDEN, K = torch.device("cpu"), 256, 4
PIN = ("experts=reference.Fp8W8A8Experts",)


class Counting(Member):
    """Notes what is gathered: (dtype, bytes of a row)."""

    def split(self, groups):
        own = super().split(groups)
        return Counting(own.shared, own.ranks, own.ranks[own.rank])

    def gather_rows(self, x):
        self.shared["seen"].append((self.ranks, x.dtype, x.nbytes // x.shape[0]))
        return super().gather_rows(x)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("coded")
    write_tiny_fp8(made, "v3", hidden_size=HIDDEN, moe_intermediate_size=128)
    return made


def decided(folder, ranks, pin=PIN, **more):
    flags = {"tp": ranks, "ep": ranks, "enable_dp_attention": True, "dtype": "bfloat16"}
    return decide(folder, "cpu", pin=pin, disable_graph=True, **flags, **more)


class Ranks:
    """Every rank's experts, in threads."""

    def __init__(self, assembly):
        self.assembly, self.seen = assembly, []
        size = assembly.mesh.size
        shared = {"": Shared(size), "seen": self.seen}

        def load(rank):
            world = World(assembly.mesh, Counting(shared, tuple(range(size)), rank))
            return load_model(assembly, BoundOps(assembly.binding), world, CPU)

        self.models = self._each(load)

    def _each(self, function):
        with ThreadPoolExecutor(self.assembly.mesh.size) as pool:
            done = [pool.submit(function, rank) for rank in range(self.assembly.mesh.size)]
        return [one.result() for one in done]

    def layer(self, rank):
        return next(b.mlp for b in self.models[rank].blocks if isinstance(b.mlp, MoeMlp))

    def run(self, rows, coded):
        """rows: each rank's own, bfloat16 [n, hidden] → of each rank its rows behind the layer."""
        self.seen.clear()
        lengths = [len(x) for x in rows]
        works = [
            SimpleNamespace(group=g, length=n, logit_rows=1, adapter=-1)
            for g, n in enumerate(lengths)
            if n
        ]

        def one(rank):
            mlp, sent = self.layer(rank), Upload(CPU)
            order = mlp.exchange.order(works, sent)
            sent.send()
            slots = torch.zeros(lengths[rank])
            batch = SimpleNamespace(order=order(), adapters=None, slots=slots, input_ids=None)
            mlp.coded = coded
            return mlp(rows[rank].clone(), batch)

        return self._each(one)


def lines(size):
    """Bytes of whole lines of memory that hold so many."""
    return -(-size // 64) * 64


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, folder):
    return Ranks(decided(folder, request.param))


@given(data=st.data())
@settings(max_examples=examples(8), deadline=None)
def test_codes_give_the_same_bits_in_half_the_bytes(ranks, data):
    size = ranks.assembly.mesh.size
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=size, max_size=size).filter(any))
    make = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    scale = data.draw(st.sampled_from([1e-6, 1.0, 300.0]))
    rows = [torch.randn(n, HIDDEN, generator=make).mul(scale).bfloat16() for n in lengths]
    plain = ranks.run(rows, coded=False)
    sent = {(dtype, each) for _, dtype, each in ranks.seen}
    coded = ranks.run(rows, coded=True)
    found = {(dtype, each) for _, dtype, each in ranks.seen}
    k = ranks.assembly.model.routing.top_k
    assert sent == {(torch.int32, lines(2 * HIDDEN + 8 * k))}
    assert found == {(torch.int32, lines(HIDDEN + 8 * k + 4 * (HIDDEN // 128)))}
    for one, other, x in zip(plain, coded, rows, strict=True):
        assert one.shape == x.shape and torch.equal(one, other)


def test_they_are_agreed_on_when_weights_are_read(folder):
    fresh = Ranks(decided(folder, 2))
    assert all(fresh.layer(rank).coded for rank in range(2))
    own = Ranks(decided(folder, 2, pin=()))
    assert not any(own.layer(rank).coded for rank in range(2))


class Says(ExpertsLayer):
    """Experts that make these codes of calls by their rows; None: of those they make none."""

    def __init__(self, by_rows):
        self.by_rows = by_rows

    def quantized(self, rows, x):
        assert x.shape == (1, HIDDEN)
        made = self.by_rows.get(rows, self.by_rows[0])
        return None if made is None else Codes(x.mul(made).round().to(torch.int8), x[:, :1])


def agreed(tables):
    """What each rank finds, given what it makes by the rows of a call."""

    def one(member):
        loader = SimpleNamespace(
            config=SimpleNamespace(hidden=HIDDEN), device=CPU, dtype=torch.float32, comm=member
        )
        given = tables[member.rank]
        experts = Says(given) if given is not None else SimpleNamespace()
        return Loader.agree_on_codes(loader, experts)

    return in_threads(len(tables), one)


CODE = st.sampled_from([None, None, 3.0, 5.0])
PROBED = (1, 3, 7, 16, 17, 64, 256, 4096, 32768)


@given(
    table=st.fixed_dictionaries({0: CODE, **dict.fromkeys(PROBED, CODE)}),
    others=st.lists(st.none() | st.tuples(st.sampled_from(PROBED), CODE), min_size=1, max_size=3),
)
@example(table=dict.fromkeys((0, *PROBED), 3.0), others=[(1, None)])
@example(table=dict.fromkeys((0, *PROBED), 3.0), others=[None, (16, 5.0)])
@example(table={0: None, **dict.fromkeys(PROBED, 3.0)}, others=[None])
@example(table=dict.fromkeys((0, *PROBED), 3.0), others=[(7, None)])
@settings(max_examples=examples(60), deadline=None)
def test_ranks_that_differ_at_one_number_of_rows_use_no_codes(table, others):
    """Kernels may change with the rows of a call, and on one machine elsewhere than on another."""
    tables = [table, *(table if one is None else table | dict([one]) for one in others)]
    same = all(one == table for one in tables)
    makes = any(found is not None for found in table.values())
    assert agreed(tables) == [same and makes] * len(tables)


def test_a_rank_whose_experts_make_no_codes_keeps_all_from_them():
    table = dict.fromkeys((0, *PROBED), 3.0)
    assert agreed([table, None]) == agreed([None, None]) == [False, False]
    assert agreed([table, table]) == [True, True]


def test_the_arithmetic_of_the_wire_knows(folder):
    by_pin = {pin: decided(folder, 2, pin=pin) for pin in (PIN, ())}
    assert [takes_codes(found) for found in by_pin.values()] == [True, False]
    coded, plain = (Crossing.of(found) for found in by_pin.values())
    layers = by_pin[()].model.layers
    saved = plain.wire(layers).row - coded.wire(layers).row
    moe = sum(map(by_pin[()].model.is_moe, range(layers)))
    choices = 8 * by_pin[()].model.routing.top_k
    whole, codes = 2 * HIDDEN + choices, HIDDEN + 4 * HIDDEN // 128 + choices
    assert saved == pytest.approx(moe * 0.5 * (lines(whole) - lines(codes)))
