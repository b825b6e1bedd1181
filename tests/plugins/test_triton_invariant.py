"""Triton kernels where rows must have bits of their own: right, and the same alone as in company.

In the interpreter a tile's product is numpy's, whose bits may hang on the tile's size: what a GPU
gives is compared by benchmarks/device_invariant.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from interpreter import DEVICE, faithful, needs_triton

from ds_runtime.ops.batch import Limits
from ds_runtime.ops.contract import Dims, Facts
from ds_runtime.ops.reference.attention.dense import decode_batch
from ds_runtime.ops.reference.attention.scaled import decoded, encoded
from ds_runtime.ops.reference.attention.sparse import attend_slots
from ds_runtime.ops.reference.cases import Maker
from ds_runtime.ops.table import OPS
from ds_runtime_kit.checks import rows
from ds_runtime_kit.checks.conformance import (
    SMALL_DIMS,
    case_id,
    cases_for,
    check_case,
    facts_for,
)
from ds_runtime_triton.kernels import ALL, ORDERED
from ds_runtime_triton.quant import quantize_group

pytestmark = needs_triton
ELEMENTWISE = frozenset({"sample", "route", "logprobs", "mask_logits"})  # slow here, and as ever
OWN = [k for k in (*ALL, *ORDERED) if k.promises.batch_invariant and k.op.name not in ELEMENTWISE]


def cases(dtype):
    facts = replace(facts_for(DEVICE, dtype, SMALL_DIMS, 4, ""), batch_invariant=True)
    for kernel, case in cases_for(OWN, facts):
        yield pytest.param(kernel, case, id=f"{case_id(kernel)}-{case_id(case)}")


CASES = [*cases("bfloat16")]


@pytest.mark.parametrize(("kernel", "case"), CASES)
def test_it_is_right(kernel, case):
    """Once: running in the interpreter is always repeatable."""
    once = replace(kernel, promises=replace(kernel.promises, deterministic=False))
    with faithful():
        result = check_case(once, case)
    assert not result.failure, result


@pytest.mark.parametrize(("kernel", "case"), CASES)
def test_rows_alone(kernel, case):
    if not rows.can_be_taken_apart(kernel.op):
        pytest.fail(f"the contract knows no rows of {kernel.op.name}")
    with faithful():
        assert not rows.is_invariant(kernel, case)


@pytest.mark.parametrize("fmt", ["dense", "fp8_block"])
def test_rows_are_multiplied_in_as_many_launches_as_there_is_room_for(fmt, monkeypatch):
    """The split of the inner dimension is the shape's, whatever the rows."""
    from ds_runtime_triton import linear

    given = {"weight_format": fmt, "shape": (192, 2048), "batch_invariant": True}
    facts = Facts(DEVICE, Dims({}), "bfloat16", **given)
    kernel = (linear.LinearDense if fmt == "dense" else linear.LinearFp8)(facts)
    make = Maker(facts, fmt)
    packed = kernel.pack(make.weight(192, 2048, fmt), facts)
    assert {config["SPLIT"] for config in packed.tensors["tuned"].configs} == {4}
    x = make.normal(150, 2048)
    with faithful():
        whole = kernel.apply(x, packed)
        monkeypatch.setattr(linear, "_HELD", 1 << 17)
        assert len(linear.slices(facts, 150, 192, packed.tensors["tuned"].at(150))) == 3
        assert torch.equal(kernel.apply(x, packed), whole)
        if groups := fmt != "dense" and kernel.quantizes(150, packed):
            codes = quantize_group(x, groups.size, groups.ue8m0)
            assert torch.equal(kernel.apply_quantized(*codes, packed), whole)


def test_attention_has_pieces_of_one_size_whatever_the_table_and_the_rows(monkeypatch):
    from ds_runtime_triton import mla

    dims = Dims({"heads": 4, "kv_lora": 64, "qk_rope": 16})
    facts = Facts(DEVICE, dims, "bfloat16", "bfloat16", page_size=64, batch_invariant=True)
    make, lens = Maker(facts, "pieces"), (1, 255, 256, 257, 700, 1100)
    cache, kernel = make.normal(30, 64, 80), mla.MlaDecode(facts)
    table = make.order(30)[:20].int().repeat(len(lens), 1)
    q = make.normal(len(lens), 4, 80)

    def run(rows, width):
        own = tuple(lens[row] for row in rows)
        limits = Limits(8, len(rows), 20, 64, 4, torch.device("cpu"))
        state, batch = kernel.state(limits), decode_batch(own, table[: len(own), :width])
        kernel.prepare(state, batch)
        return kernel.run(state, q[list(rows)], cache, 0.1)

    with faithful():
        whole = run(range(len(lens)), 20)
        for row, length in enumerate(lens):
            for width in (length // 64 + 1, 20):
                assert torch.equal(run([row], width)[0], whole[row]), (length, width)
        monkeypatch.setattr(mla, "HELD", 1)
        assert torch.equal(run(range(len(lens)), 20), whole)
    assert not (whole.isnan().any() or torch.equal(whole[3], whole[4]))


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "grouped"])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 130])
def test_chosen_tokens_are_attended_where_they_lie(fp8, count, monkeypatch):
    """No row is made up and none is copied; each has the bits that it has alone."""
    from ds_runtime_triton import sparse

    make, launched = Maker(Facts(DEVICE, Dims({}), "bfloat16"), "chosen"), []
    rows, q = make.normal(128, 144), make.normal(count, 4, 144)
    slots = torch.stack([make.order(128)[:96].int() for _ in range(count)] or [torch.zeros(96)])
    slots = slots[:count].int()
    cache, run = rows.view(8, 16, 144), sparse.sparse_mla_ordered
    if fp8:
        cache = encoded(rows[:, :128], rows[:, 128:]).view(8, 16, -1)
        run, rows = sparse.scaled_sparse_mla_ordered, decoded(cache.flatten(0, 1), 128)
    kernel = sparse.sparse_mla_kernel

    class Launches:
        def __getitem__(self, grid):
            def launch(q, *args, **config):
                launched.append((grid, q.data_ptr()))
                return kernel[grid](q, *args, **config)

            return launch

    with faithful():
        monkeypatch.setattr(sparse, "sparse_mla_kernel", Launches())
        whole, made = run(q, cache, slots, 128, 0.1), launched[:]
        assert [grid[2] for grid, _ in made] == [len(part) for part in q.split(64) if count]
        assert [at for _, at in made] == [q[n:].data_ptr() for n in range(0, count, 64)]
        for row in {0, count // 2, count - 1} if count else ():
            one = slice(row, row + 1)
            assert torch.equal(run(q[one], cache, slots[one], 128, 0.1), whole[one]), row
        assert {grid[:2] for grid, _ in launched} == {grid[:2] for grid, _ in made}
    want = attend_slots(q.double(), slots, 128, 0.1, lambda chosen: rows.double()[chosen])
    torch.testing.assert_close(whole.double(), want, atol=0.02, rtol=0.02)


def test_every_op_of_a_model_has_such_a_kernel():
    needed = {"embed", "linear", "rms_norm", "add_rms_norm", "mla_absorb", "mla_decode", "experts"}
    needed |= {"index_prologue", "index_scores", "index_topk", "sparse_decode"}
    needed |= {"mla_prologue", "silu_mul", "router_logits", "route", "sample", "logprobs"}
    own = {k.op.name for k in (*ALL, *ORDERED) if k.promises.batch_invariant}
    assert needed <= own <= OPS.keys()
