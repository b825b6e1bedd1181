"""The CUDA plugin's kernels over FP8 weights in about 7.3 bits, on a GPU."""

from __future__ import annotations

import pytest
import torch
from vendor_doubles import fp8_compressed as double

from ds_runtime.ops.contract import DeviceInfo
from ds_runtime.ops.weight import Packed
from ds_runtime_cuda import experts_streaming, fp8_compressed, nvrtc
from ds_runtime_cuda.gates import MOST_OTHERS, OTHERS_AT
from ds_runtime_kit.checks.conformance import facts_for

pytestmark = pytest.mark.gpu
FP8 = torch.float8_e4m3fn
FACTS = facts_for(DeviceInfo("cuda", "a GPU", "sm90", frozenset({"triton"})), "bfloat16")


def weight(*shape: int, std: float = 60.0, odd: int = 400) -> torch.Tensor:
    """One in `odd` is any number at all, but NaN."""
    values = torch.empty(*shape, device="cuda", dtype=FP8)
    for own in values.flatten(0, -2).split(1 << 14):
        own.copy_((torch.randn(*own.shape, device="cuda") * std).clamp(-448, 448))
    bits = values.view(torch.uint8).view(-1)
    at = torch.randint(0, bits.numel(), (bits.numel() // odd,), device="cuda")
    any_at_all = torch.randint(0, 254, (len(at),), device="cuda")
    bits[at] = (any_at_all + (any_at_all > 126)).to(torch.uint8)
    return values


@pytest.mark.parametrize("std", [0.01, 8.0, 60.0, 110.0])
@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (384, 256)])
def test_tiles_are_what_they_are_to_be(rows, columns, std):
    torch.manual_seed(rows)
    values = weight(rows, columns, std=std)
    values.view(torch.uint8).view(-1)[:2] = torch.tensor([0x7F, 0xFF], device="cuda")
    coded = fp8_compressed.encode(values, "nothing")
    assert coded is not None
    bits, tiles = values.view(torch.uint8).cpu(), coded.tiles.view(-1, coded.stride).cpu()
    steps = columns // 128
    assert torch.equal(double.stacked(coded.tiles, coded.stride, coded.base, steps), bits)
    for i, tile in enumerate(tiles):
        block, k = divmod(i, steps)
        own = bits[block * 128 : block * 128 + 128, k * 128 : k * 128 + 128]
        assert torch.equal(tile, double.encoded(own, coded.base, coded.stride))


def test_a_warp_may_have_all_entries_of_the_longest_list():
    torch.manual_seed(6)
    plain = experts(2, 128, 256)
    bits = plain.tensors["gate_up"].view(torch.uint8)
    bits[:, :, :128] = 0x50 + torch.randint(0, 8, bits[:, :, :128].shape, device="cuda").byte()
    bits[:, 32:36, :112] = torch.randint(1, 7, (2, 4, 112), device="cuda").byte()  # 448 numbers
    coded = experts_streaming.ExpertsBlock7(FACTS).hold_second_form(plain)
    assert coded.tensors[experts_streaming._HELD][0].stride == OTHERS_AT + 2 * MOST_OTHERS
    x = torch.randn(5, 256, device="cuda").bfloat16()
    ids = torch.zeros(5, 1, dtype=torch.int32, device="cuda")
    chosen = torch.ones(5, 1, device="cuda")
    want = experts_streaming.ExpertsFp8(FACTS).apply(x, chosen, ids, plain)
    assert torch.equal(experts_streaming.ExpertsBlock7(FACTS).apply(x, chosen, ids, coded), want)


def test_stacks_of_two_matrices():
    torch.manual_seed(1)
    values = weight(3, 512, 384)
    coded = fp8_compressed.encode(values, "nothing", halves=2)
    assert coded is not None
    got = double.stacked(coded.tiles, coded.stride, coded.base, 3, 2, 2)
    assert torch.equal(got, values.view(torch.uint8).view(-1, 384).cpu())


def experts(count: int, inter: int, hidden: int, lower: float = 60.0) -> Packed:
    tensors: dict = {"ue8m0": False}
    for name, rows, columns, std in (
        ("gate_up", 2 * inter, hidden, 60.0),
        ("down", hidden, inter, lower),
    ):
        tensors[name] = weight(count, rows, columns, std=std)
        scale = torch.rand(count, rows // 128, columns // 128, device="cuda") + 0.5
        tensors[f"{name}_scale"] = scale / 3000
    return Packed("fp8_experts.v1", (count, hidden, inter), tensors, 0)


@pytest.mark.parametrize("cores", [None, 1, 3])
@pytest.mark.parametrize(
    ("count", "inter", "hidden", "top_k", "lower"),
    [(40, 384, 1024, 5, 60.0), (8, 128, 128, 2, 8.0), (300, 256, 7168, 8, 8.0)],
)
def test_results_are_those_of_plain_weights_bit_for_bit(
    monkeypatch, count, inter, hidden, top_k, lower, cores
):
    """lower: of `down`, whose exponents begin elsewhere; cores: so few blocks that each takes units
    of both matmuls, one behind the other."""
    if cores is not None:
        monkeypatch.setattr(nvrtc, "cores", lambda device: cores)
    torch.manual_seed(2)
    plain = experts(count, inter, hidden, lower)
    kernel = experts_streaming.ExpertsBlock7(FACTS)
    assert not kernel.serves(4, plain)
    coded = kernel.hold_second_form(plain)
    assert kernel.serves(4, coded) and coded.nbytes > plain.nbytes
    for tokens in (1, 3, 16, 100, 320):
        x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        ids = torch.rand(tokens, count, device="cuda").argsort(1)[:, :top_k].int().contiguous()
        chosen = torch.rand(tokens, top_k, device="cuda") + 0.1
        want = experts_streaming.ExpertsFp8(FACTS).apply(x, chosen, ids, plain)
        assert want.isfinite().all() and want.abs().max() > 0
        assert torch.equal(kernel.apply(x, chosen, ids, coded), want)


def test_one_expert_has_all_tokens():
    torch.manual_seed(3)
    plain = experts(4, 256, 512)
    coded = experts_streaming.ExpertsBlock7(FACTS).hold_second_form(plain)
    x = torch.randn(100, 512, device="cuda").bfloat16()
    chosen = torch.ones(100, 1, device="cuda")
    for expert in (0, 3):
        ids = torch.full((100, 1), expert, dtype=torch.int32, device="cuda")
        want = experts_streaming.ExpertsFp8(FACTS).apply(x, chosen, ids, plain)
        assert torch.equal(
            experts_streaming.ExpertsBlock7(FACTS).apply(x, chosen, ids, coded), want
        )


def test_nan_among_weights_and_tokens_stays_in_its_rows():
    torch.manual_seed(4)
    plain = experts(4, 128, 256)
    plain.tensors["down"].view(torch.uint8)[1, 5, 7] = 0x7F
    coded = experts_streaming.ExpertsBlock7(FACTS).hold_second_form(plain)
    x = torch.randn(20, 256, device="cuda").bfloat16()
    x[3, 4] = float("nan")
    ids = (torch.arange(20, device="cuda") % 4).int()[:, None].contiguous()
    chosen = torch.ones(20, 1, device="cuda")
    got = experts_streaming.ExpertsBlock7(FACTS).apply(x, chosen, ids, coded)
    want = experts_streaming.ExpertsFp8(FACTS).apply(x, chosen, ids, plain)
    assert torch.equal(got.isnan(), want.isnan())
    assert got[3].isnan().all() and got[1::4, 5].isnan().all() and not got[0].isnan().any()
    assert torch.equal(got.nan_to_num(), want.nan_to_num())
