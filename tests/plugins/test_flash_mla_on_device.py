"""FlashMLA between kernels that let their successors begin early: it reads what they have written,
and they read what it has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ds_runtime.ops.batch import Batch, DecodePart, Limits
from ds_runtime.ops.contract import DeviceInfo, Dims
from ds_runtime_kit.checks.conformance import TRUE_DIMS, facts_for

if TYPE_CHECKING:
    from ds_runtime_cuda.flash_mla import MlaDecode, State

pytestmark = pytest.mark.gpu
HEADS, WIDTH = 128, 576


def adapter() -> tuple[MlaDecode, State]:
    """(MlaDecode, its state of no sequences)."""
    pytest.importorskip("flash_mla")
    from ds_runtime_cuda.flash_mla import MlaDecode

    limits = Limits(
        max_tokens=256, max_sequences=256, max_pages_per_sequence=40, page_size=64, heads=HEADS,
        device=torch.device("cuda"), max_queries=1,
    )  # fmt: skip
    device = DeviceInfo("cuda", "a GPU", "sm90")
    kernel = MlaDecode(facts_for(device, "bfloat16", Dims({**TRUE_DIMS, "heads": HEADS}), 64))
    return kernel, kernel.state(limits)


def test_it_is_planned_beside_a_step_and_for_all_lengths():
    kernel, state = adapter()
    lens = torch.tensor([0, 1, 64, 65, 2500, 1, 700], dtype=torch.int32, device="cuda")
    pages = torch.randperm(7 * 40, device="cuda", dtype=torch.int32).view(7, 40)
    cache = torch.randn(7 * 40, 64, WIDTH, device="cuda").bfloat16()
    q = torch.randn(7, HEADS, WIDTH, device="cuda").bfloat16()
    part = DecodePart(page_table=pages, kv_lens=lens, host_kv_lens=tuple(lens.tolist()))
    none = torch.empty(0, dtype=torch.int64, device="cuda")
    kernel.prepare(state, Batch(none, none, none, none, decode=part))
    found = kernel.run(state, q, cache, 0.05)
    assert not found[0].any()
    want = expected(q[1:], cache, pages[1:], lens[1:])
    assert torch.allclose(found[1:].float().cpu(), want, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("rows", [1, 64, 66, 128])
def test_sparse_decode_is_waited_for(rows, captured):
    from pdl_kernels import copy_now

    pytest.importorskip("flash_mla")
    from ds_runtime.ops.reference.attention.scaled import encoded
    from ds_runtime_cuda.flash_mla import scaled_sparse_mla

    torch.manual_seed(rows)
    bf16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    cache = encoded(torch.randn(4096, 512, **bf16), torch.randn(4096, 64, **bf16)).view(64, 64, -1)
    slots = torch.stack([torch.randperm(4096, device="cuda")[:2048] for _ in range(rows)]).int()
    q = torch.randn(rows, HEADS, WIDTH, **bf16)
    want = scaled_sparse_mla(q, cache, slots, 512, 0.05).clone()
    torch.cuda.synchronize()
    read = torch.empty_like(want)
    out: list[torch.Tensor] = []

    def step():
        out[:] = [scaled_sparse_mla(q, cache, slots, 512, 0.05)]
        copy_now(out[0].contiguous(), read)

    step()
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            step()
    for _ in range(20):
        read.fill_(float("nan")), out[0].fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay() if captured else step()
        torch.cuda.synchronize()
        assert torch.equal(read, want)


def expected(q, cache, table, lens):
    out = torch.empty(len(q), HEADS, 512)
    for i, n in enumerate(lens.tolist()):
        keys = cache[table[i, : -(-n // 64)].long()].flatten(0, 1)[:n].float()
        out[i] = ((q[i].float() @ keys.T * 0.05).softmax(-1) @ keys[:, :512]).cpu()
    return out


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("rows", "length"), [(1, 513), (8, 600), (64, 600), (66, 40), (130, 70)])
def test_it_waits_and_is_waited_for(rows, length, captured):
    from pdl_kernels import copy_late, copy_now

    kernel, state = adapter()
    torch.manual_seed(rows)
    pages = -(-length // 64)
    cache = torch.randn(rows * pages, 64, WIDTH, device="cuda").bfloat16()
    table = torch.randperm(rows * pages, device="cuda", dtype=torch.int32).view(rows, pages)
    lens = torch.full((rows,), length, dtype=torch.int32, device="cuda")
    lens[::3] -= 1
    state.queries.table, state.queries.lens, state.queries.count = table, lens, rows
    given = torch.randn(rows, HEADS, WIDTH, device="cuda").bfloat16()
    q, read = torch.empty_like(given), torch.empty(rows, HEADS, 512, device="cuda").bfloat16()
    out: list[torch.Tensor] = []

    def step():
        kernel._plan(state)
        copy_late(given, q)
        out[:] = [kernel.run(state, q, cache, 0.05)]
        copy_now(out[0], read)

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            step()
    want = expected(given, cache, table, lens)
    for _ in range(5):
        q.fill_(float("nan")), read.fill_(float("nan")), out[0].fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay() if captured else step()
        torch.cuda.synchronize()
        assert torch.equal(read, out[0])
        assert torch.allclose(read.float().cpu(), want, atol=0.02, rtol=0.02)
