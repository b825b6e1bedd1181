"""The native library, one instruction set after the other, against torch in float64."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from ds_runtime.errors import UnsupportedError
from ds_runtime.ops.reference.matrices.rounding import quantise_part
from ds_runtime.ops.weight import Weight, WeightPart
from ds_runtime_cpu import experts, kernels, native, small
from ds_runtime_cpu.platform import CpuPlatform
from ds_runtime_kit.checks.conformance import facts_for

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 6e-3}
DTYPES = sorted(TOLERANCE, key=str)


@pytest.fixture(params=native.runnable())
def isa(request):
    """Every variant that was built and runs here, not only the best."""
    with native.using(request.param):
        yield request.param


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape and not got.isnan().any()
    error = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)
    assert error <= TOLERANCE[got.dtype], float(error)


def facts(dtype: torch.dtype):
    return facts_for(CpuPlatform().info(), str(dtype).removeprefix("torch."))


def dense(name: str, values: torch.Tensor) -> Weight:
    return Weight((WeightPart(name, "dense", tuple(values.shape), {"weight": values}),))


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
@pytest.mark.parametrize(("tokens", "hidden", "inter"), [(1, 1800, 164), (3, 120, 2900)])
def test_experts_do_not_depend_on_threads(isa, dtype, tokens, hidden, inter):
    gate, up = (torch.randn(4, inter, hidden).to(dtype) / hidden**0.5 for _ in range(2))
    down = torch.randn(4, hidden, inter).to(dtype) / inter**0.5
    kernel = experts.ExpertsNative(facts(dtype))
    packed = kernel.pack(Source(gate, up, down), facts(dtype))
    x, weights = torch.randn(tokens, hidden).to(dtype), torch.rand(tokens, 3)
    ids = torch.stack([torch.randperm(4)[:3] for _ in range(tokens)]).int()
    same_bits(over_threads(lambda: kernel.apply(x, weights, ids, packed)))


@pytest.mark.parametrize("hidden", [1, 70])
def test_experts_take_columns_that_are_not_contiguous(isa, hidden):
    gate, up = torch.randn(2, 2, 40, hidden)
    down = torch.randn(2, hidden, 40)
    kernel = experts.ExpertsNative(facts(torch.float32))
    packed = kernel.pack(Source(gate, up, down), facts(torch.float32))
    x, weights = torch.randn(hidden, 5).T, torch.rand(5, 1)
    ids = torch.tensor([[0], [1], [1], [0], [1]], dtype=torch.int32)
    got, want = (
        kernel.apply(v, weights, ids, packed) for v in (x, torch.empty(5, hidden).copy_(x))
    )
    assert torch.equal(got, want)
    assert kernel.apply(x[:0], weights[:0], ids[:0], packed).shape == (0, hidden)


def test_experts_that_are_not_held_alike_are_named(isa):
    """Which expert, what it is stored as, what the others are, and what to do."""
    up, down = dense("e0.up", torch.randn(32, 64)), dense("e0.down", torch.randn(64, 32))
    gate, last = (quantise_part(w.parts[0], "int8_channel", 0) for w in (up, down))
    others = Weight((replace(gate, name="e1.gate"),)), Weight((gate,)), Weight((last,))

    class Mixed:
        format, num_experts, hidden, intermediate = "dense", 2, 64, 32

        def expert(self, index):
            return others if index else (up, up, down)

    with pytest.raises(UnsupportedError, match=r"e1\.gate: int8_channel.* are dense; .*alike"):
        experts.ExpertsNative(facts(torch.float32)).pack(Mixed(), facts(torch.float32))


def test_a_system_without_openmp_takes_torchs(monkeypatch, tmp_path):
    """As on images that bring no libgomp: the first attempt fails, the second one has torch's."""
    opened, path = [], tmp_path / "libds_cpu_x.so"

    def load(name, mode=0):
        opened.append(Path(name).name)
        if opened == [path.name]:
            raise OSError("libgomp.so.1: cannot open shared object file")
        return name

    lib = tmp_path / "torch" / "lib"
    lib.mkdir(parents=True)
    (lib / "libgomp-1a2b.so.1").touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "torch")])
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(native.ctypes, "CDLL", load)
    assert native._loaded(path) == str(path)
    assert opened == [path.name, "libgomp-1a2b.so.1", path.name]
    opened.clear()
    (lib / "libgomp-1a2b.so.1").unlink()
    with pytest.raises(OSError, match="libgomp"):
        native._loaded(path)


def test_a_library_without_openmp_is_said(monkeypatch, caplog):
    monkeypatch.setattr(native, "threads", lambda: 1)
    before = torch.get_num_threads()
    CpuPlatform().init_worker(0, 1, 2)
    torch.set_num_threads(before)
    native.calls().set_threads(before)
    assert "built without OpenMP" in caplog.text and "one thread of 2" in caplog.text


def test_without_libraries_every_native_kernel_refuses(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "library_folder", lambda: tmp_path)
    native.runnable.cache_clear()
    try:
        offers = kernels.ATTENTION + kernels.MOE + kernels.LINEAR_KERNELS + kernels.SMALL_OPS
        some = facts(torch.float32)
        refused = {k.name: k.refuse(some) for k in offers}
        assert refused["cpu.linear_native"] == native.NOT_BUILT
        assert refused["cpu.add_rms_norm"] == native.NOT_BUILT
        assert refused["cpu.linear_plain"] is None
        assert refused["cpu.mla_decode_matmul"] is None
        assert "compiler" in native.NOT_BUILT
        for name in ("libds_cpu_sve.so", "other_libds_cpu_generic.so", "ds_cpu_generic.txt"):
            (tmp_path / name).touch()
        native.runnable.cache_clear()
        said = "native library: built for sve only, none of which this processor runs; reinstall"
        assert all(str(k.refuse(some)).startswith(said) for k in kernels.SMALL_OPS)
        with native.using(None), pytest.raises(UnsupportedError, match=said):
            native.library()
    finally:
        native.runnable.cache_clear()


def test_a_file_that_is_no_library_is_named(tmp_path):
    odd = tmp_path / "libds_cpu_odd.so"
    odd.write_text("not a library")
    found = native.open_library(odd)
    assert isinstance(found, native.NotAvailable) and "libds_cpu_odd.so" in found.reason


def test_threads_are_shared_with_torch():
    """One OpenMP runtime in the process, torch's; else two pools fight for the cores."""
    if not native.runnable() or sys.platform != "linux":
        assert native.why_not() or sys.platform != "linux"
        return
    code = """
from ds_runtime_cpu import native
native.library()
import torch
maps = open("/proc/self/maps").read().splitlines()
print(len({line.split()[-1] for line in maps if "omp" in line.split("/")[-1]}))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(out.stdout) <= 1
