"""The CUDA plugin's own experts on a GPU: blocks that take many units, captured and replayed."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from ds_runtime.ops.contract import DeviceInfo
from ds_runtime.ops.weight import Packed
from ds_runtime_cuda import experts_streaming, grouped_fp8, nvrtc
from ds_runtime_kit.checks.conformance import facts_for

pytestmark = pytest.mark.gpu
SHAPES = (  # experts, intermediate, hidden, choices of a token
    (40, 384, 1024, 5),
    (8, 128, 128, 2),
    (300, 256, 7168, 8),  # several blocks sort and quantise a row; more tiles than blocks
)
FACTS = facts_for(DeviceInfo("cuda", "a GPU", "sm90", frozenset({"triton"})), "bfloat16")
# FP8: the op's tolerance. Exact FP8 arithmetic over these draws is up to 0.0638 off.
FORMATS = {True: ("fp8_experts.v1", 0.08), False: ("dense_experts.v1", 0.006)}


Streamed = experts_streaming.ExpertsFp8 | experts_streaming.ExpertsDense
Coded = experts_streaming.ExpertsFp8 | grouped_fp8.ExpertsGrouped
BESIDE = experts_streaming.ExpertsBlock7 | experts_streaming.ExpertsDense12


def weights(fp8: bool, experts: int, inter: int, hidden: int, powers: bool = False) -> Packed:
    tensors: dict = {}
    device = torch.device("cuda")
    for name, rows, columns in (("gate_up", 2 * inter, hidden), ("down", hidden, inter)):
        values = torch.randn(experts, rows, columns, device=device)
        if fp8:
            tensors[name] = (values * 64).clamp(-400, 400).to(torch.float8_e4m3fn)
            scale = torch.rand(experts, rows // 128, columns // 128, device=device) + 0.5
            scale = torch.exp2(torch.round(torch.log2(scale))) / 64 if powers else scale * 0.02
            tensors[f"{name}_scale"] = scale / 64
        else:
            tensors[name] = (values * 0.02).bfloat16()
    if fp8:
        tensors["ue8m0"] = powers
    return Packed(FORMATS[fp8][0], (experts, hidden, inter), tensors, 0)


def wide(packed: Packed, name: str, expert: int) -> torch.Tensor:
    values = packed.tensors[name][expert].double()
    if f"{name}_scale" not in packed.tensors:
        return values
    scale = packed.tensors[f"{name}_scale"][expert].double()
    return values * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)


def expected(x, chosen, ids, packed) -> torch.Tensor:
    inter = packed.shape[2]
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for e in torch.unique(ids[ids >= 0]).tolist():
        tokens, k = (ids == e).nonzero(as_tuple=True)
        both = x[tokens].double() @ wide(packed, "gate_up", e).T
        hidden = torch.nn.functional.silu(both[:, :inter]) * both[:, inter:]
        out.index_add_(0, tokens, hidden @ wide(packed, "down", e).T * chosen[tokens, k, None])
    return out


def inputs(tokens: int, experts: int, top_k: int, hidden: int, absent: bool):
    """absent: of half the pairs another rank has the expert, and of every third token of all."""
    ids = torch.rand(tokens, experts, device="cuda").argsort(1)[:, :top_k].int().contiguous()
    if absent:
        ids[torch.rand(ids.shape, device="cuda") < 0.5] = -1
        ids[::3] = -1
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    return x, torch.rand(tokens, top_k, device="cuda") + 0.1, ids


def compare_replays(
    kernel: Streamed | Coded, packed: Packed, top_k: int, counts: tuple[int, ...], limit: float
) -> None:
    experts, hidden, _ = packed.shape
    for tokens, absent in product(counts, (False, True)):
        x, chosen, ids = inputs(tokens, experts, top_k, hidden, absent)
        apart = torch.full((tokens, hidden + 64), float("nan"), device="cuda", dtype=x.dtype)
        strided = apart[:, :hidden]
        strided.copy_(x)
        kernel.apply(strided, chosen, ids, packed)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = kernel.apply(strided, chosen, ids, packed)
        for _ in range(3):
            for held, new in zip(
                (strided, chosen, ids),
                inputs(tokens, experts, top_k, hidden, absent),
                strict=True,
            ):
                held.copy_(new)
            chosen[ids < 0] = float("nan")  # it is not read
            out.fill_(float("nan"))
            graph.replay()
            want = expected(strided, chosen, ids, packed)
            assert (out - want).norm().item() <= limit * want.norm().item()
            assert torch.equal(out, kernel.apply(strided, chosen, ids, packed))


KERNELS: dict[str, type[Streamed]] = {
    "fp8": experts_streaming.ExpertsFp8,
    "7 bits": experts_streaming.ExpertsBlock7,
    "dense": experts_streaming.ExpertsDense,
    "12 bits": experts_streaming.ExpertsDense12,
}
OF_CODES: dict[str, type[Coded]] = {
    "fp8": experts_streaming.ExpertsFp8,
    "7 bits": experts_streaming.ExpertsBlock7,
    "many tokens": grouped_fp8.ExpertsGrouped,
}


@pytest.mark.parametrize("cores", [None, 1, 3])
@pytest.mark.parametrize("form", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_replays_compute_new_inputs(monkeypatch, shape, form, cores):
    """cores: so few blocks that each takes units of both matmuls, one behind the other."""
    if cores is not None:
        monkeypatch.setattr(nvrtc, "cores", lambda device: cores)
    torch.manual_seed(0)
    experts, inter, hidden, top_k = shape
    fp8, coded = form in ("fp8", "7 bits"), "bits" in form
    packed, limit = weights(fp8, experts, inter, hidden), FORMATS[fp8][1]
    kernel = KERNELS[form](FACTS)
    if coded:
        assert isinstance(kernel, BESIDE)
        plain = packed.nbytes
        packed = kernel.hold_second_form(packed)
        assert packed.nbytes > plain, "they fit"
    compare_replays(kernel, packed, top_k, (1, 2, 3, 4, 7, 33, 100, 300), limit)


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("cores", [None, 1, 3])
@pytest.mark.parametrize("shape", [(8, 128, 256, 2), *SHAPES[::2]])
def test_replays_of_many_tokens_compute_new_inputs(monkeypatch, shape, cores, powers):
    if cores is not None:
        monkeypatch.setattr(nvrtc, "cores", lambda device: cores)
    torch.manual_seed(1)
    experts, inter, hidden, top_k = shape
    packed, limit = weights(True, experts, inter, hidden, powers), FORMATS[True][1]
    kernel = grouped_fp8.ExpertsGrouped(FACTS)
    compare_replays(kernel, packed, top_k, (1, 7, 64, 300, 1100), limit)


def test_one_expert_has_all_rows():
    torch.manual_seed(2)
    packed = weights(True, 300, 128, 512)
    kernel = grouped_fp8.ExpertsGrouped(FACTS)
    for tokens in (63, 64, 65, 128, 129, 2000):
        x, chosen, _ = inputs(tokens, 300, 1, 512, False)
        for expert in (0, 137, 299):
            ids = torch.full((tokens, 1), expert, dtype=torch.int32, device="cuda")
            want = expected(x, chosen, ids, packed)
            got = kernel.apply(x, chosen, ids, packed)
            assert ((got - want).norm() / want.norm()).item() < FORMATS[True][1]


@pytest.mark.parametrize("powers", [False, True])
def test_other_tokens_do_not_matter(powers):
    """NaN and infinity stay in their rows, and inputs may lie in any strides."""
    torch.manual_seed(3)
    packed = weights(True, 8, 256, 512, powers)
    x, chosen, ids = inputs(1000, 8, 2, 512, False)
    kernel = grouped_fp8.ExpertsGrouped(FACTS)
    clean = kernel.apply(x, chosen, ids, packed)
    x[17], x[500, 3] = float("nan"), float("inf")
    spoiled = kernel.apply(x, chosen, ids, packed)
    others = torch.ones(1000, dtype=torch.bool, device="cuda")
    others[[17, 500]] = False
    assert torch.equal(clean[others], spoiled[others]) and spoiled[17].isnan().all()
    gathered = kernel.apply(x.t().contiguous().t(), chosen, ids, packed)
    assert torch.equal(gathered[others], clean[others])


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("form", OF_CODES)
def test_codes_give_the_bits_of_rows(form, powers):
    """As columns of wider tensors, where they arrive from other ranks; of half the pairs another
    rank has the expert."""
    torch.manual_seed(4)
    experts, inter, hidden, top_k = 40, 384, 1024, 5
    packed = weights(True, experts, inter, hidden, powers)
    kernel = OF_CODES[form](FACTS)
    packed = kernel.hold_second_form(packed) if isinstance(kernel, BESIDE) else packed
    for tokens in (17, 40, 256, 1500):
        x, chosen, ids = inputs(tokens, experts, top_k, hidden, True)
        codes = kernel.quantize(tokens, x, packed)
        assert codes is not None
        q, scale = codes
        outer = torch.full((tokens, hidden + 128), 255, dtype=torch.uint8, device="cuda")
        outer[:, 64:-64] = q.view(torch.uint8)
        sizes = torch.full((tokens, scale.shape[1] + 32), float("nan"), device="cuda")
        sizes[:, 16:-16] = scale
        crossed = outer[:, 64:-64].view(q.dtype), sizes[:, 16:-16]
        got = kernel.apply_quantized(*crossed, chosen, ids, packed)
        assert torch.equal(got, kernel.apply(x, chosen, ids, packed))
        want = expected(x, chosen, ids, packed)
        assert (got - want).norm().item() <= FORMATS[True][1] * want.norm().item()
