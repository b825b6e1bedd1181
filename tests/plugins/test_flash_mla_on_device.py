"""FlashMLA between kernels that let their successors begin early: it reads what they have written,
and they read what it has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.gpu
HEADS, WIDTH = 128, 576


def adapter():
    """(MlaDecode, its state of no sequences)."""
    pytest.importorskip("flash_mla")
    from ds_runtime.api import Limits
    from ds_runtime_cuda.flash_mla import MlaDecode

    limits = Limits(
        max_tokens=256, max_sequences=256, max_pages_per_sequence=40, page_size=64, heads=HEADS,
        device=torch.device("cuda"), max_queries=1,
    )  # fmt: skip
    kernel = MlaDecode(SimpleNamespace(dims={"heads": HEADS}))
    return kernel, kernel.state(limits)


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
    out = []

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
