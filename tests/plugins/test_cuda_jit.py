"""The CUDA plugin's Triton kernels against its torch forms: interpreted, or on a GPU that is here.

The interpreter converts to e4m3 by itself and sometimes to another neighbour, so that encoded
values are compared by what they stand for.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from interpreter import run_apart

CHECKS = """
from contextlib import nullcontext
import torch
from interpreter import patched_once
from ds_runtime_cuda import grouped, jit, quant

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
exact = device.type == "cuda"
interpreted = nullcontext() if exact else patched_once()
interpreted.__enter__()  # for the rest of this process
torch.manual_seed(0)

def values(q, scale):
    return q.float().cpu() * scale.cpu().repeat_interleave(128, 1)

def near(got, want, of, rtol=1e-6):
    error = (values(*got) - of).norm() / of.norm()
    assert error < (0.03 if exact else 0.2), error
    assert torch.allclose(got[1].cpu(), want[1].cpu(), rtol=rtol)

for tokens, n in ((1, 128), (3, 1408), (17, 2048)):
    wide = torch.randn(tokens, n + 64).bfloat16().to(device)
    x = wide[:, :n]
    x[1:2, :128] = 0
    want = quant.quantise(x.cpu())
    got = torch.empty(tokens, n, dtype=torch.float8_e4m3fn, device=device)
    scale = quant.scale_columns(tokens, n // 128, device)
    jit.quantise_rows(x, got, scale)
    near((got, scale), want, x.float().cpu())
    if exact:
        assert (got.view(torch.uint8).cpu() != want[0].view(torch.uint8)).float().mean() < 1e-3
    if tokens == 3:
        jit.quantise_rows(x, got, scale, powers=True)
        near((got, scale), quant.quantise(x.cpu(), powers=True), x.float().cpu(), rtol=0)

for tokens, experts, top_k, align in (
    (1, 4, 2, 128), (7, 9, 4, 16), (33, 5, 5, 1), (300, 37, 4, 128), (130, 1, 1, 64),
    (1300, 1500, 4, 1),  # more blocks than are looked at together
    (41, 9, 3, -16), (2, 5, 4, -1),  # of some pairs, and of all, another rank has the expert
):
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int()
    if align < 0:
        align = -align
        ids[torch.rand(ids.shape) < 0.4] = -1
        ids[::3] = -1
    absent, ids = ids.flatten() < 0, ids.to(device)
    rows = grouped.sort_rows(ids, experts, align)
    placed = torch.empty_like(rows.of), torch.empty_like(rows.owner), torch.empty_like(rows.ends)
    jit.place_pairs(ids, align, *placed)
    for one, want in zip(placed, grouped.sort_rows(ids.cpu(), experts, align), strict=True):
        assert torch.equal(one.cpu(), want)
    if tokens > 100:
        continue
    flat = rows.of.flatten().cpu()
    assert torch.equal(flat < 0, absent)
    flat = flat[~absent]
    assert len(set(flat.tolist())) == len(flat)
    assert torch.equal(rows.owner.cpu()[flat], ids.flatten().cpu()[~absent])
    assert rows.owner.shape[0] == grouped.most_rows(tokens * top_k, experts, align)
    x = torch.randn(tokens, 256).bfloat16().to(device)
    count = rows.owner.shape[0]
    q = torch.empty(count, 256, dtype=torch.float8_e4m3fn, device=device)
    scale = quant.scale_columns(count, 2, device)
    jit.quantise_to(x, rows.of, q, scale)
    spread = x.float().cpu().repeat_interleave(top_k, 0)[~absent]
    near((q.cpu()[flat], scale.cpu()[flat]), (None, quant.quantise(spread)[1]), spread)
    crossed = torch.zeros(tokens, 384, dtype=torch.uint8)
    crossed[:, 64:320] = torch.randint(256, (tokens, 256))
    sizes = torch.rand(tokens, 34)[:, 16:18]
    bytes_at, sizes_at = torch.zeros_like(q).view(torch.uint8), scale.clone()
    given = crossed.to(device)[:, 64:320], sizes.to(device)
    jit.codes_to(*given, rows.of, bytes_at, sizes_at)
    spread = crossed[:, 64:320].repeat_interleave(top_k, 0)[~absent]
    assert torch.equal(bytes_at.cpu()[flat], spread)
    assert torch.equal(sizes_at.cpu()[flat], sizes.repeat_interleave(top_k, 0)[~absent])
    h = torch.randn(count, 512).bfloat16().to(device)
    jit.silu_quantise(h, rows.owner, q, scale)
    gate, up = h.cpu().float().chunk(2, -1)
    own = rows.owner.cpu() >= 0
    product = (torch.nn.functional.silu(gate) * up).bfloat16().float()[own]
    near((q.cpu()[own], scale.cpu()[own]), (None, quant.quantise(product)[1]), product, 1e-2)
    y, weights = torch.randn(count, 300).bfloat16().to(device), torch.rand(tokens, top_k).to(device)
    out = torch.empty(tokens, 300, dtype=y.dtype, device=device)
    jit.combine_rows(y, weights, rows.of, out)
    shares = weights.double().cpu().masked_fill(rows.of.cpu() < 0, 0).unsqueeze(-1)
    exact_sum = (y.double().cpu()[rows.of.cpu()] * shares).sum(1)
    assert (out.double().cpu() - exact_sum).norm() <= 4e-3 * exact_sum.norm()
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_agree_with_torch():
    run_apart(CHECKS)
