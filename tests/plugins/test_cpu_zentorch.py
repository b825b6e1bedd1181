"""zentorch's experts: against a stand-in with that library's habits, and against itself where it is
installed."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from ds_runtime.ops.reference.matrices.rounding import quantise_part
from ds_runtime.ops.weight import Weight, WeightPart
from ds_runtime.platform.probe import installed
from ds_runtime_cpu import kernels, zen
from ds_runtime_cpu.platform import CpuPlatform
from ds_runtime_kit.checks.conformance import facts_for

EXPERTS, HIDDEN, INTER, TOP_K = 5, 96, 64, 3
TOLERANCE = {"dense": 1.5e-2, "int8_channel": 4e-2}  # of a norm, as in the contract


class StandIn:
    """Reorders bfloat16 in place, knows weights by address, adds to the result, refuses no tokens:
    as zentorch 2.13.0.2 does."""

    def __init__(self) -> None:
        self.known = {}

    def zentorch_fused_moe(self, out, x, w13, w2, b13, b2, weights, ids, skip, act, s13, s2):
        assert b13 is b2 is None and not skip and act == "silu"
        assert ids.dtype == torch.int32 and weights.dtype == torch.float32
        assert x.is_contiguous() and out.is_contiguous() and w13.is_contiguous()
        if not len(x):
            raise RuntimeError("failed with status -4")
        key = (w13.data_ptr(), w2.data_ptr())
        if key not in self.known:
            self.known[key] = (w13.float(), w2.float())
            if w13.dtype == torch.bfloat16:
                w13.zero_(), w2.zero_()
        up, down = self.known[key]
        if s13 is not None:
            up, down = up * s13.unsqueeze(-1), down * s2.unsqueeze(-1)
        for t, row in enumerate(x.float()):
            for weight, e in zip(weights[t], ids[t], strict=True):
                gate, value = (up[e] @ row).chunk(2)
                out[t] += (weight * (down[e] @ (F.silu(gate) * value))).to(out.dtype)

    def zentorch_flush_moe_weight_cache(self):
        self.known.clear()

    def zentorch_clear_weight_cache(self):
        pass


@pytest.fixture(params=["stand-in", "real"] if installed("zentorch") else ["stand-in"])
def library(request, monkeypatch):
    if request.param == "stand-in":
        made = StandIn()
        monkeypatch.setattr(zen, "library", lambda: made)
        yield made
    else:
        yield zen.library()
    gc.collect()


class Source:
    num_experts, hidden, intermediate = EXPERTS, HIDDEN, INTER

    def __init__(self, fmt: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.format = fmt
        self.values = [
            tuple(
                torch.randn(*s) / s[1] ** 0.5 for s in ((INTER, HIDDEN),) * 2 + ((HIDDEN, INTER),)
            )
            for _ in range(EXPERTS)
        ]

    def expert(self, index: int):
        return tuple(self._weight(v) for v in self.values[index])

    def _weight(self, values: torch.Tensor) -> Weight:
        shape = (values.shape[0], values.shape[1])
        part = WeightPart("w", "dense", shape, {"weight": values.bfloat16()})
        return Weight((part if self.format == "dense" else quantise_part(part, self.format, 128),))

    def expected(self, x, weights, ids):
        out = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
        for t, row in enumerate(x.double()):
            for weight, e in zip(weights[t], ids[t], strict=True):
                gate, up, down = (w.dequantise(torch.float64) for w in self.expert(int(e)))
                out[t] += weight * (down @ (F.silu(gate @ row) * (up @ row)))
        return out


def facts():
    return facts_for(CpuPlatform().info(), "bfloat16")


def check(kernel, packed, source, tokens):
    x = torch.randn(tokens, 2 * HIDDEN).bfloat16()[:, :HIDDEN]  # rows with a stride
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)]).to(torch.int32)
    weights = torch.rand(tokens, TOP_K)
    out = kernel.apply(x, weights, ids, packed)
    wanted = source.expected(x, weights, ids)
    assert out.dtype == x.dtype and out.is_contiguous()
    assert (out.double() - wanted).norm() <= TOLERANCE[source.format] * wanted.norm()


@pytest.mark.parametrize("fmt", sorted(TOLERANCE))
def test_experts_against_float64(library, fmt):
    kernel = zen.ExpertsZen(facts())
    layers = [Source(fmt, seed) for seed in (1, 2)]
    packed = [kernel.pack(source, facts()) for source in layers]
    assert packed[0].nbytes == sum(t.nbytes for t in packed[0].tensors.values())
    for tokens in (1, 7, 1, 33):
        for source, own in zip(layers, packed, strict=True):
            check(kernel, own, source, tokens)
    none = torch.empty(0, HIDDEN, dtype=torch.bfloat16)
    empty = kernel.apply(none, torch.empty(0, TOP_K), torch.empty(0, TOP_K).int(), packed[0])
    assert empty.shape == (0, HIDDEN)


@pytest.mark.parametrize("fmt", sorted(TOLERANCE))
def test_a_layer_at_an_address_that_was_used_before(library, fmt):
    """Nothing is freed while another layer lives; when none does, the library forgets all."""
    kernel = zen.ExpertsZen(facts())
    gc.collect()
    assert not zen.kept.tensors
    for seed in range(3):
        source = Source(fmt, seed)
        first, second = (kernel.pack(source, facts()) for _ in range(2))
        check(kernel, first, source, 2)
        del first
        assert len(zen.kept.tensors) == 2 * len(second.tensors)
        check(kernel, second, source, 2)
        del second
        gc.collect()
        assert not zen.kept.tensors


def refused(monkeypatch, zentorch, torch_version="2.13.0", dtype="bfloat16"):
    found = {"zentorch": zentorch, "torch": torch_version}
    monkeypatch.setattr(kernels, "installed", found.get)
    (own,) = (k for k in kernels.MOE if k.fn.endswith(":experts_zentorch"))
    info = CpuPlatform().info()
    return own.refuse(facts_for(info, dtype))


def test_why_it_is_refused(monkeypatch):
    assert "zentorch is not installed" in refused(monkeypatch, None)
    said = refused(monkeypatch, "2.14.0.1", "2.13.0+cpu")
    assert "2.14.0.1 is built for another torch than 2.13.0+cpu" in said
    assert "zentorch==2.13.*" in said
    assert "computes in bfloat16" in refused(monkeypatch, "2.13.0.2", dtype="float32")


def test_it_never_comes_before_our_own():
    ours = [k.rank for k in kernels.MOE if "experts:" in k.fn and "prepacked" not in k.fn]
    assert all(k.rank < min(ours) for k in kernels.MOE if "zen:" in k.fn)


def test_a_binary_that_cannot_be_loaded(monkeypatch, tmp_path):
    (tmp_path / "zentorch").mkdir()
    (tmp_path / "zentorch/__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.setattr(
        zen, "find_spec", lambda n: SimpleNamespace(origin=str(tmp_path / "zentorch/__init__.py"))
    )
    zen.library.cache_clear()
    with pytest.raises(zen.UnsupportedError, match=r"libzentorch\.so cannot be loaded"):
        zen.library()
    monkeypatch.setattr(zen, "find_spec", lambda n: None)
    with pytest.raises(zen.UnsupportedError, match="is not installed"):
        zen.library()
    zen.library.cache_clear()
