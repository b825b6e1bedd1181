"""The native library, one instruction set after the other, against torch in float64."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_runtime.ops.batch import Batch, DecodePart, Limits
from ds_runtime.ops.weight import Weight, WeightPart
from ds_runtime.testing.conformance import facts_for
from ds_runtime_cpu import attention, experts, kernels, linear, native, packing, small
from ds_runtime_cpu.platform import CpuPlatform

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 6e-3}
DTYPES = sorted(TOLERANCE, key=str)


class OneLibrary:
    """A folder that holds one library only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def is_dir(self) -> bool:
        return True

    def iterdir(self):
        return iter([self.path])


def runnable() -> list[native.Library]:
    """Every library that was built and can run here: generic and avx2 too, not only the best."""
    found = [native.open_best(OneLibrary(p)) for p in native._candidates(native.library_folder())]
    return [library for library in found if isinstance(library, native.Library)]


@pytest.fixture(params=runnable(), ids=lambda library: library.isa)
def isa(request, monkeypatch):
    monkeypatch.setattr(native, "library", lambda: request.param)
    return request.param.isa


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape and not got.isnan().any()
    error = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)
    assert error <= TOLERANCE[got.dtype], float(error)


def facts(dtype: torch.dtype):
    return facts_for(CpuPlatform().info(), str(dtype).removeprefix("torch."))


def dense(name: str, values: torch.Tensor) -> Weight:
    return Weight((WeightPart(name, "dense", tuple(values.shape), {"weight": values}),))


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 19), k=st.integers(1, 130), dtype=st.sampled_from(DTYPES))
def test_packing_round_trip(rows, k, dtype):
    values = torch.randn(rows, k).to(dtype)
    packed = torch.full((packing.packed_elements(rows, k, dtype),), float("nan"), dtype=dtype)
    packing.pack_into(packed, values)
    assert torch.equal(packing.unpack(packed, rows, k), values)
    assert packed.double().sum().isclose(values.double().sum(), atol=1e-6)  # padding is zero


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 7, 13, 50])
@pytest.mark.parametrize(("rows", "k"), [(1, 1), (9, 31), (64, 128), (37, 1409), (12, 3300)])
def test_linear(isa, dtype, tokens, rows, k):
    weight = (torch.randn(rows, k) / k**0.5).to(dtype)
    x = torch.randn(tokens, k + 5).to(dtype)[:, 2 : k + 2]  # strided, and not aligned
    kernel = linear.LinearNative(facts(dtype))
    packed = kernel.pack(dense("w", weight), facts(dtype))
    close(kernel.apply(x, packed), x.double() @ weight.double().T)
    assert torch.equal(packed.dequantise(), weight.float())


def reference_experts(x, weights, ids, gate, up, down):
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for k in range(ids.shape[1]):
            e = int(ids[t, k])
            row = x[t].double()
            act = F.silu(gate[e].double() @ row) * (up[e].double() @ row)
            out[t] += float(weights[t, k]) * (down[e].double() @ act)
    return out


class Source:
    """An ExpertSource over stacked tensors."""

    format = "dense"

    def __init__(self, gate, up, down) -> None:
        self.stacks = (gate, up, down)
        self.num_experts, self.intermediate, self.hidden = gate.shape

    def expert(self, index: int):
        return tuple(dense(f"e{index}", s[index]) for s in self.stacks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "count", "top_k", "hidden", "inter"),
    [
        (1, 4, 2, 32, 48),
        (5, 3, 3, 129, 37),
        (40, 8, 2, 64, 100),
        (0, 4, 2, 32, 16),
        (3, 64, 6, 65, 5),
    ],
)
def test_experts(isa, dtype, tokens, count, top_k, hidden, inter):
    gate, up = (torch.randn(count, inter, hidden).to(dtype) / hidden**0.5 for _ in range(2))
    down = torch.randn(count, hidden, inter).to(dtype) / inter**0.5
    ids = torch.stack([torch.randperm(count)[:top_k] for _ in range(tokens)] or [torch.empty(0)])
    ids = ids.reshape(tokens, top_k).int()
    weights, x = torch.rand(tokens, top_k), torch.randn(tokens, hidden + 3).to(dtype)[:, :hidden]
    kernel = experts.ExpertsNative(facts(dtype))
    packed = kernel.pack(Source(gate, up, down), facts(dtype))
    got = kernel.apply(x, weights, ids, packed)
    want = reference_experts(x, weights, ids, gate, up, down)
    assert got.shape == want.shape
    if tokens:
        error = (got.double() - want).norm() / want.norm()
        assert error < 2 * TOLERANCE[dtype], float(error)  # activations round once more
    assert torch.equal(packed.dequantise(), torch.cat((gate, up), dim=1).float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 3, 8, 21])
@pytest.mark.parametrize(("lora", "rope", "page"), [(512, 64, 16), (37, 9, 3), (1024, 2, 1)])
def test_mla_decode_reads_only_its_own_rows(isa, dtype, heads, lora, rope, page):
    lens = (1, 63, 64, 65, 200)
    width, tables = lora + rope, [-(-n // page) for n in lens]
    pages = torch.randperm(sum(tables) + 5).int()
    cache = torch.full((len(pages), page, width), float("nan"), dtype=dtype)
    table = torch.zeros(len(lens), max(tables), dtype=torch.int32)
    own = []
    for i, (length, used) in enumerate(zip(lens, tables, strict=True)):
        start = sum(tables[:i])
        table[i, :used] = pages[start : start + used]
        own.append(torch.randn(length, width).to(dtype))
        for j in range(length):
            cache[table[i, j // page], j % page] = own[-1][j]
    q = torch.randn(len(lens), heads + 2, width + 6).to(dtype)[:, 1 : heads + 1, 3 : width + 3]
    part = DecodePart(table, torch.tensor(lens, dtype=torch.int32), lens)
    empty = torch.empty(0, dtype=torch.int64)
    kernel = attention.MlaDecodeNative(
        facts_for(CpuPlatform().info(), str(dtype)[6:], {"kv_lora": lora})  # type: ignore[arg-type]
    )
    state = kernel.state(Limits(8, 8, max(tables) + 2, page, heads, "cpu"))
    kernel.prepare(state, Batch(empty, empty, empty, empty, decode=part))
    got = kernel.run(state, q, cache, 0.11)
    keys = [k.double() for k in own]
    want = [(q[i].double() @ k.T * 0.11).softmax(-1) @ k[:, :lora] for i, k in enumerate(keys)]
    close(got, torch.stack(want))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "n"), [(0, 8), (1, 1), (3, 129), (70, 2048)])
def test_norms_and_activation(isa, dtype, rows, n):
    x, residual = (torch.randn(rows, 2 * n + 1).to(dtype)[:, 1:] for _ in range(2))
    weight = torch.rand(n) + 0.5
    for w in (weight, weight.to(torch.bfloat16)):
        normed = small.rms_norm(x[:, :n], w, 1e-6)
        want = F.rms_norm(x[:, :n].double(), (n,), w.double(), 1e-6)
        assert normed.shape == want.shape
        if rows:
            close(normed, want)
    summed = x[:, :n] + residual[:, :n]
    for w in (weight, weight.to(torch.bfloat16)):
        normed, total = small.add_rms_norm(x[:, :n], residual[:, :n].clone(), w, 1e-6)
        assert torch.equal(total, summed)
        if rows:
            close(normed, F.rms_norm(summed.double(), (n,), w.double(), 1e-6))
    if rows:
        close(small.silu_mul(x), F.silu(x[:, :n].double()) * x[:, n:].double())


def test_activation_at_the_extremes(isa):
    gate = torch.tensor([[-200.0, -87.5, -1e-30, 0.0, 1e-30, 87.5, 200.0, 3e38]])
    got = small.silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    assert torch.allclose(got, F.silu(gate.double()).float(), rtol=1e-6, atol=1e-30)


def test_nan_comes_through(isa):
    """A fault in the weights must show, not vanish."""
    x = torch.ones(2, 64)
    x[1, 5] = float("nan")
    assert small.rms_norm(x, torch.ones(64), 1e-6)[1].isnan().all()
    assert small.silu_mul(x)[1, 5].isnan()
    assert small.rms_norm(x.bfloat16(), torch.ones(64), 1e-6)[1].isnan().all()


def over_threads(call) -> list[torch.Tensor]:
    """The same call on one, two and three threads."""
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(call())
    finally:
        torch.set_num_threads(before)
    return results


def same_bits(results: list[torch.Tensor]) -> None:
    assert not results[0].isnan().any()
    for other in results[1:]:
        assert torch.equal(results[0], other), int((results[0] != other).sum())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 5, 13])
@pytest.mark.parametrize(("rows", "k"), [(36, 8192), (515, 2048), (9, 30001)])
def test_linear_does_not_depend_on_threads(isa, dtype, tokens, rows, k):
    kernel = linear.LinearNative(facts(dtype))
    packed = kernel.pack(dense("w", torch.randn(rows, k).to(dtype)), facts(dtype))
    x = torch.randn(tokens, k).to(dtype)
    same_bits(over_threads(lambda: kernel.apply(x, packed)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "hidden", "inter"), [(1, 1800, 164), (3, 120, 2900)])
def test_experts_do_not_depend_on_threads(isa, dtype, tokens, hidden, inter):
    gate, up = (torch.randn(4, inter, hidden).to(dtype) / hidden**0.5 for _ in range(2))
    down = torch.randn(4, hidden, inter).to(dtype) / inter**0.5
    kernel = experts.ExpertsNative(facts(dtype))
    packed = kernel.pack(Source(gate, up, down), facts(dtype))
    x, weights = torch.randn(tokens, hidden).to(dtype), torch.rand(tokens, 3)
    ids = torch.stack([torch.randperm(4)[:3] for _ in range(tokens)]).int()
    same_bits(over_threads(lambda: kernel.apply(x, weights, ids, packed)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 4])
def test_absorb_does_not_depend_on_threads(isa, dtype, tokens):
    heads, n, k = 5, 52, 2100  # threads' pieces cross heads
    dims = {"heads": heads, "qk_nope": k, "qk_rope": 8, "v": n, "kv_lora": k}
    kernel = attention.MlaAbsorbNative(facts_for(CpuPlatform().info(), str(dtype)[6:], dims))
    values = torch.randn(heads, n, k).to(dtype)
    packed = packing.empty_packed(heads, n, k, dtype)
    for h in range(heads):
        packing.pack_into(packed[h], values[h])
    x = torch.randn(tokens, heads, k).to(dtype)
    results = over_threads(lambda: kernel._heads(x, packed, n))
    same_bits(results)
    close(results[0], torch.einsum("thk,hnk->thn", x.double(), values.double()))


def decode(q, cache, lens, lora, page):
    """The native decode of rows whose pages lie one after the other in the cache."""
    tables = [-(-n // page) for n in lens]
    table = torch.zeros(len(lens), max(tables), dtype=torch.int32)
    for i, used in enumerate(tables):
        table[i, :used] = torch.arange(used) + sum(tables[:i])
    part = DecodePart(table, torch.tensor(lens, dtype=torch.int32), lens)
    empty = torch.empty(0, dtype=torch.int64)
    kernel = attention.MlaDecodeNative(
        facts_for(CpuPlatform().info(), str(q.dtype)[6:], {"kv_lora": lora})
    )
    state = kernel.state(Limits(8, 8, max(tables), page, q.shape[1], "cpu"))
    kernel.prepare(state, Batch(empty, empty, empty, empty, decode=part))
    return kernel.run(state, q, cache, 0.11)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_does_not_depend_on_threads(isa, dtype):
    cache, q = torch.randn(85, 16, 169).to(dtype), torch.randn(3, 21, 169).to(dtype)
    same_bits(over_threads(lambda: decode(q, cache, (600, 7, 629), 160, 16)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_nan_in_the_cache_comes_through_attention(isa, dtype):
    """A NaN score must not be taken for a very small one."""
    cache, q = torch.randn(16, 16, 41).to(dtype), torch.randn(2, 3, 41).to(dtype)
    for place in (0, 70, 99):  # in the first block, a later one, and its last row
        spoilt = cache.clone()
        spoilt[place // 16, place % 16, 40] = float("nan")  # of the rotated part: no value has it
        got = decode(q, spoilt, (100, 140), 32, 16)
        assert got[0].isnan().all() and not got[1].isnan().any()


def test_without_libraries_every_native_kernel_refuses(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "library_folder", lambda: tmp_path)
    native.why_not.cache_clear()
    try:
        offers = kernels.ATTENTION + kernels.MOE + kernels.LINEAR_KERNELS + kernels.SMALL_OPS
        some = facts(torch.float32)
        refused = {k.name: k.refuse(some) for k in offers}
        assert refused["cpu.linear_native"] == native.NOT_BUILT
        assert refused["cpu.add_rms_norm"] == native.NOT_BUILT
        assert refused["cpu.linear_plain"] is None
        assert refused["cpu.mla_decode_matmul"] is None
        assert "compiler" in native.NOT_BUILT
    finally:
        native.why_not.cache_clear()


def test_libraries_that_cannot_be_used_are_named(tmp_path):
    assert native.open_best(tmp_path / "nowhere") == native.NotAvailable(native.NOT_BUILT)
    (tmp_path / "libds_cpu_odd.so").write_text("not a library")
    found = native.open_best(tmp_path)
    assert isinstance(found, native.NotAvailable) and "libds_cpu_odd.so" in found.reason


def test_threads_are_shared_with_torch():
    """One OpenMP runtime in the process, torch's; else two pools fight for the cores."""
    if not runnable() or sys.platform != "linux":
        assert native.why_not() or sys.platform != "linux"
        return
    code = """
from ds_runtime_cpu import native
native.library()
import torch
maps = open("/proc/self/maps").read().splitlines()
print(len({line.split()[-1] for line in maps if "gomp" in line or "iomp" in line}))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(out.stdout) <= 1
