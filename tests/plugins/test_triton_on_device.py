"""Triton's configurations for one architecture as they run there: what the interpreter cannot
show, with the sizes that they are for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ds_runtime.ops.batch import Batch, DecodePart, Limits
from ds_runtime.ops.contract import DeviceInfo, Dims, Facts
from ds_runtime.ops.reference.attention import dense as attention
from ds_runtime.ops.reference.cases import Maker, SampleExperts
from ds_runtime.ops.reference.matrices import moe
from ds_runtime.ops.weight import Weight
from ds_runtime_kit.checks.numerics import relative_error
from ds_runtime_triton.config import Sizes, tuned

pytestmark = pytest.mark.gpu
DIMS = {"heads": 128, "qk_nope": 128, "qk_rope": 64, "v": 128, "kv_lora": 512}


def facts(dtype="bfloat16", heads=128) -> Facts:
    device = DeviceInfo("cuda", "here", "sm90", cores=132)
    return Facts(device, Dims({**DIMS, "heads": heads}), dtype, dtype, page_size=64)


def there(weight: Weight) -> Weight:
    """The same on the device."""
    on = {name: t.cuda() for name, t in weight.parts[0].tensors.items()}
    return Weight((replace(weight.parts[0], tensors=on),))


@pytest.mark.parametrize("at", [16, 48])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("heads", [128, 20])
def test_decode_of_many_heads(at, tree, heads):
    """Lengths around whole blocks and pages, NaN behind them, and trees whose last tokens lie in
    two blocks."""
    from ds_runtime_triton.mla import MlaDecode

    torch.manual_seed(at)
    kernel, oracle = MlaDecode(facts(heads=heads)), attention.ReferenceMlaDecode(facts("float64"))
    kernel.sizes = Sizes((1,), (tuned("sm90", "mla_decode", "H=128").at(at),))
    lens = (3, 63, 64, 65, 128, 700, 1000, 2049)
    pages = torch.randperm(8 * 40, device="cuda").int().view(8, 40)
    cache = torch.full((8 * 40, 64, 576), float("nan"), device="cuda", dtype=torch.bfloat16)
    for row, length in zip(pages.long(), lens, strict=True):
        for i in range(0, length, 64):
            count = min(64, length - i)
            cache[row[i // 64], :count] = torch.randn(count, 576, device="cuda").bfloat16()
    rows, each = (24, 3) if tree else (8, 1)
    part = DecodePart(
        page_table=pages,
        kv_lens=torch.tensor(lens, device="cuda", dtype=torch.int32),
        host_kv_lens=lens,
        q_lens=(each,) * 8 if tree else (),
        tree=torch.randint(-(2**62), 2**62, (rows,), device="cuda") | (1 << 61) if tree else None,
    )
    limits = Limits(rows, 8, 40, 64, heads, torch.device("cuda"), max_queries=each)
    q = torch.randn(rows, heads, 576, device="cuda").bfloat16()
    none = torch.empty(0, dtype=torch.int64, device="cuda")
    batch = Batch(none, none, none, none, decode=part)
    state, exact = kernel.state(limits), oracle.state(limits)
    kernel.prepare(state, batch)
    oracle.prepare(exact, batch)
    got = kernel.run(state, q, cache, 0.05)
    want = oracle.run(exact, q.double(), cache.double(), 0.05)
    assert got.isfinite().all()
    assert relative_error(got, want) < 6e-3


def whole(values: torch.Tensor) -> torch.Tensor:
    return values.clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("experts", [256, 257])
@pytest.mark.parametrize("tokens", [1, 2, 5, 14, 40, 270, 520, 900])
def test_narrow_experts(experts, tokens):
    """A rank's part of V3 over eight: every entry of the shape, experts without a token and one
    that all tokens take, rows of x that do not follow each other."""
    from ds_runtime_triton.experts import ExpertsFp8

    make = Maker(facts(), f"narrow {tokens}")
    shapes = ((256, 7168), (256, 7168), (7168, 256))

    def one() -> tuple[Weight, Weight, Weight]:
        gate, up, down = (there(make.weight(*s, "fp8_block")) for s in shapes)
        return gate, up, down

    few = [one() for _ in range(3)]
    kernel, wide = ExpertsFp8(facts()), moe.ReferenceExperts(facts("float64"))
    held = kernel.pack(SampleExperts([few[e % 3] for e in range(experts)]), facts())
    oracle = wide.pack(SampleExperts(few), facts("float64"))
    layer = held.tensors["layer"]
    assert layer.sizes is tuned("sm90", "experts_fp8", f"E={experts},N=256,K=7168")
    torch.manual_seed(tokens)
    x = torch.randn(tokens, 2, 7168, device="cuda").bfloat16()[:, 0]
    ids = torch.stack([torch.randperm(experts - 9, device="cuda")[:8] for _ in range(tokens)])
    ids[:, 3] = experts - 1
    weights = torch.rand(tokens, 8, device="cuda")
    got = kernel.apply(x, weights, ids.int(), held)
    codes = kernel.quantize(tokens, x, held)
    assert codes is not None or tokens <= 18
    if codes is not None:  # as columns of wider tensors, where they arrive from other ranks
        q, scale = (torch.cat((t.view(torch.uint8),) * 2, 1) for t in map(whole, codes))
        crossed = q.view(torch.float8_e4m3fn)[:, :7168], scale.view(torch.float32)[:, :56]
        assert torch.equal(kernel.apply_quantized(*crossed, weights, ids.int(), held), got)
    summed = torch.zeros(tokens, 3, device="cuda", dtype=torch.float64)
    summed.scatter_add_(1, ids % 3, weights.double())
    each = torch.arange(3, device="cuda", dtype=torch.int32).expand(tokens, 3)
    want = wide.apply(x.double(), summed, each, oracle)
    assert relative_error(got, want) < 6e-2
