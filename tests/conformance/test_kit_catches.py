"""The kit finds faults: for each of its questions a kernel that is wrong in that way alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_runtime.ops.batch import Batch
from ds_runtime.ops.contract import RANK_PORTABLE, DeviceInfo, Facts, Kernel, Offers
from ds_runtime.ops.kernel import Footprint, Promises
from ds_runtime.ops.reference import norm, sampling
from ds_runtime.ops.reference.attention import dense as attention
from ds_runtime.ops.reference.attention.cache import cache_write as reference_write
from ds_runtime.ops.reference.matrices import linear, moe
from ds_runtime.ops.reference.matrices.coded_experts import Fp8W8A8Experts
from ds_runtime.ops.table import OPS
from ds_runtime.ops.weight import Packed, Weight
from ds_runtime_kit.checks.conformance import CaseResult, facts_for
from ds_runtime_kit.checks.replay import ReplayBackend
from ds_runtime_kit.kit import CHECKS, WIDTHS, Subject, check_all

HOST = DeviceInfo("cpu", "host", "any")


# Edges: what the samples of an op hold.


def needs_a_token(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    assert x.shape[0] > 0, "launched with an empty grid"
    return norm.rms_norm(x, weight, eps)


class DividesByTokensOfAnExpert(moe.ReferenceExperts):
    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        counts = torch.bincount(ids.flatten().long(), minlength=packed.shape[0])
        share = (counts / counts).mean()  # NaN where an expert has no token
        return super().apply(x, weights, ids, packed) * share.to(x.dtype)


class TakesTheNearestOfOthers(moe.ReferenceExperts):
    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        return super().apply(x, weights, ids.clamp(min=0), packed)


class WritesOnlyTokensWithExperts(moe.ReferenceExperts):
    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        out = super().apply(x, weights, ids, packed)
        return torch.where((ids >= 0).any(1, keepdim=True), out, x)


class AssumesPagesInARow(attention.ReferenceMlaDecode):
    def prepare(self, state: Any, batch: Batch) -> None:
        super().prepare(state, batch)
        pages = torch.arange(state.page_table.shape[1], dtype=torch.int32)
        state.page_table.copy_(state.page_table[:, :1] + pages)
        state.page_table.clamp_(max=3)


class LosesTheLastFullPage(attention.ReferenceMlaDecode):
    def prepare(self, state: Any, batch: Batch) -> None:
        super().prepare(state, batch)
        page = 4
        state.rows = tuple(
            (i, n - page if n % page == 0 and n > page else n) for i, n in state.rows
        )


class MasksByMultiplying(attention.ReferenceMlaDecode):
    def run(self, state: Any, q: Tensor, cache: Tensor, scale: float) -> Tensor:
        out = super().run(state, q, cache, scale)
        return out + (0 * cache).sum().to(out.dtype)  # zero times NaN


def splits_pages_in_halves(cache: Tensor, latent: Tensor, k_rope: Tensor, slots: Tensor) -> None:
    half = cache.shape[1] // 2
    real = slots[slots >= 0]
    assert not len(real) or int((real % cache.shape[1] // half).max()) < 2
    reference_write(cache, latent, k_rope, slots)


# Weights.


class ReadsStorageInRowOrder(linear.ReferenceLinear):
    def pack(self, weight: Weight, facts: Facts) -> Packed:
        def flat(t: Tensor) -> Tensor:
            return t.as_strided(t.shape, (t.shape[1], 1), t.storage_offset()) if t.ndim == 2 else t

        parts = [
            replace(p, tensors={n: flat(t) for n, t in p.tensors.items()}) for p in weight.parts
        ]
        return super().pack(Weight(tuple(parts)), facts)


class HangsItOnTheTensor(linear.ReferenceLinear):
    def pack(self, weight: Weight, facts: Facts) -> Packed:
        packed = super().pack(weight, facts)
        packed.tensors["weight"].is_scaled = True
        return packed

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        scaled = getattr(packed.tensors.get("weight"), "is_scaled", False)
        return super().apply(x, packed) * (1 if scaled else 2)


class KeepsTheLastWeight(linear.ReferenceLinear):
    def pack(self, weight: Weight, facts: Facts) -> Packed:
        self.last = super().pack(weight, facts)
        return self.last

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        return super().apply(x, self.last)


# Bits, replay, memory.


def rounds_otherwise_in_company(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = norm.rms_norm(x, weight, eps)
    return out * (1 + 1e-7 * (x.shape[0] > 1))


class DecodesOtherwiseInCompany(attention.ReferenceMlaDecode):
    def run(self, state: Any, q: Tensor, cache: Tensor, scale: float) -> Tensor:
        return super().run(state, q, cache, scale) * (1 + 1e-6 * (len(state.rows) > 1))


def draws_for_the_batch(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    other = uniform if logits.shape[0] < 2 else uniform.roll(1)
    return sampling.sample(logits, temperature, top_k, top_p, min_p, other)


_GROWN: list[Tensor] = []


@torch.library.custom_op("ds_runtime_tests::grow", mutates_args=())
def grow(x: Tensor) -> Tensor:
    _GROWN.append(torch.empty(1 << 12))
    return x.clone()


def grows_with_every_replay(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norm.rms_norm(grow(x), weight, eps)


def copies_the_input_thrice(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    copies = [x.clone() for _ in range(3)]
    return norm.rms_norm(copies[-1], weight, eps)


class SaysHalfOfWhatItHolds(linear.ReferenceLinear):
    def pack(self, weight: Weight, facts: Facts) -> Packed:
        packed = super().pack(weight, facts)
        return replace(packed, nbytes=packed.nbytes // 2)


# Codes.


class ScalesByTheLargestRow(Fp8W8A8Experts):
    def quantize(self, rows: int, x: Tensor, packed: Packed) -> Any:
        made = super().quantize(rows, x, packed)
        if made is None:
            return None
        q, scale = made
        largest = scale.amax(0, keepdim=True).expand_as(scale) if len(scale) else scale
        wide = (q.float() * scale.repeat_interleave(128, 1)) / largest.repeat_interleave(128, 1)
        return wide.to(q.dtype), largest


class ReadsCodesAsIfTheyTouched(Fp8W8A8Experts):
    def apply_quantized(self, q: Tensor, scale: Tensor, *rest: Any) -> Tensor:
        q = torch.as_strided(q, q.shape, (q.shape[1], 1))
        return super().apply_quantized(q, scale, *rest)


class CodesInBytes(Fp8W8A8Experts):
    def quantize(self, rows: int, x: Tensor, packed: Packed) -> Any:
        made = super().quantize(rows, x, packed)
        return None if made is None else (made[0].view(torch.uint8), made[1])

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        codes = Fp8W8A8Experts.quantize(self, x.shape[0], x, packed)
        return self._summed(x, codes, weights, ids, packed)


class MakesNoCodes(Fp8W8A8Experts):
    def quantize(self, rows: int, x: Tensor, packed: Packed) -> Any:
        return None


class KeepsItsCodes(moe.ReferenceExperts):
    pass


TAKES = {
    "promises": Promises(takes_codes=True),
    "formats": frozenset({"fp8_block"}),
    "numerics": "fp8_w8a8",
}

# Honesty.


class IgnoresScales(linear.ReferenceLinear):
    def pack(self, weight: Weight, facts: Facts) -> Packed:
        parts = [replace(p, format="dense", block=None, tensors={"weight": p.tensors["weight"]})
                 for p in weight.parts]  # fmt: skip
        return super().pack(Weight(tuple(parts)), facts)


class KnowsThreeHeads(attention.ReferenceMlaDecode):
    def run(self, state: Any, q: Tensor, cache: Tensor, scale: float) -> Tensor:
        assert q.shape[1] == 3, "no such instruction"
        return super().run(state, q, cache, scale)


_CALLS = count()
DENSE = frozenset({"dense"})


def only_cpu(facts: Facts) -> str | None:
    return None if facts.device.type == "cpu" else f"runs on a cpu, not on {facts.device.type}"


def only_dense(facts: Facts) -> str | None:
    return only_cpu(facts) or ("dense alone" if facts.weight_format not in ("", "dense") else None)


def now_and_then(facts: Facts) -> str | None:
    return only_cpu(facts) or ("busy" if next(_CALLS) % 2 else None)


def fails(facts: Facts) -> str | None:
    return str(facts.dims["no such dim"])


right = norm.rms_norm
RightLinear = linear.ReferenceLinear

OWN, PART = Promises(batch_invariant=True), Promises(skips_absent=True)
WRONG: list[tuple[str, str, Any, dict[str, Any], str]] = [
    ("samples", "rms_norm", needs_a_token, {}, "empty grid"),
    ("samples", "experts", DividesByTokensOfAnExpert, {}, "NaN in the result"),
    ("samples", "experts", TakesTheNearestOfOthers, {"promises": PART}, "relative error"),
    ("samples", "experts", WritesOnlyTokensWithExperts, {"promises": PART}, "relative error"),
    ("samples", "mla_decode", AssumesPagesInARow, {}, "result 0"),
    ("samples", "mla_decode", LosesTheLastFullPage, {}, "relative error"),
    ("samples", "mla_decode", MasksByMultiplying, {}, "NaN in the result"),
    ("samples", "cache_write", splits_pages_in_halves, {}, "ZeroDivision"),
    ("weights", "linear", ReadsStorageInRowOrder, {}, "call"),
    ("weights", "linear", HangsItOnTheTensor, {}, "relative error"),
    ("weights", "linear", KeepsTheLastWeight, {}, "call"),
    ("weights", "linear", KeepsTheLastWeight, {"formats": DENSE}, "relative error"),
    ("rows", "rms_norm", rounds_otherwise_in_company, {"promises": OWN}, "alone differ"),
    ("rows", "mla_decode", DecodesOtherwiseInCompany, {"promises": OWN}, "alone differ"),
    ("rows", "cache_write", reference_write, {"promises": OWN}, "knows no rows of cache_w"),
    ("rows", "sample", draws_for_the_batch, {}, "alone differ"),
    ("codes", "experts", ScalesByTheLargestRow, TAKES, "codes of row 0 alone differ"),
    ("codes", "experts", ReadsCodesAsIfTheyTouched, TAKES, "other bits than those of apply"),
    ("codes", "experts", CodesInBytes, TAKES, "not float8_e4m3fn"),
    ("codes", "experts", MakesNoCodes, TAKES, "makes none of any sample's rows"),
    ("codes", "experts", KeepsItsCodes, TAKES, "has no attribute"),
    ("capture", "rms_norm", grows_with_every_replay, {}, "bytes that stay"),
    (
        "memory",
        "rms_norm",
        copies_the_input_thrice,
        {"footprint": Footprint(workspace=lambda facts, rows: 2 * rows * 576 * 4)},
        "are declared",
    ),
    ("memory", "linear", SaysHalfOfWhatItHolds, {}, "(nbytes)"),
    ("honesty", "rms_norm", right, {"refuse": lambda facts: None}, "accepts a device of type"),
    ("honesty", "rms_norm", right, {"refuse": now_and_then}, "for the same facts"),
    ("honesty", "rms_norm", right, {"refuse": fails}, "its refuse() raised KeyError"),
    ("honesty", "rms_norm", right, {"formats": DENSE}, "owns no weight"),
    ("honesty", "linear", RightLinear, {"refuse": only_dense}, "accepts no weight of it"),
    ("honesty", "linear", IgnoresScales, {"formats": DENSE}, "packs it, and is wrong"),
    ("honesty", "mla_decode", KnowsThreeHeads, {}, "accepts odd facts"),
]  # fmt: skip


def kernel_of(op: str, fn: Any, **declared: Any) -> Kernel:
    module = fn.__module__
    made = Kernel(
        OPS[op],
        f"{module}:{fn.__name__}",
        "wrong",
        refuse=only_cpu,
        formats=frozenset({"dense", "fp8_block"}) if op in ("linear", "experts") else frozenset(),
        layouts=frozenset({"latent_pages.v1"}) if OPS[op].layout else frozenset(),
    )
    return replace(made, **declared)


def subjects_of(kernel: Kernel, dtype: str = "float32") -> list[Subject]:
    """Small, and with pages of one token where it uses any."""
    widths = ("small", "pages of one") if kernel.op.name == "cache_write" else ("small",)
    return [
        Subject(kernel, facts_for(HOST, dtype, WIDTHS[w].dims, WIDTHS[w].page_size), Offers(), w)
        for w in widths
    ]


def failures(kernel: Kernel, checks: Sequence[str]) -> list[CaseResult]:
    found = check_all(subjects_of(kernel), ReplayBackend(), checks)
    return [r for r in found if not r.ok]


@pytest.mark.parametrize(
    ("check", "op", "fn", "declared", "says"),
    WRONG,
    ids=lambda v: getattr(v, "__name__", v if isinstance(v, str) else None),
)
def test_each_question_finds_its_fault(
    check: str, op: str, fn: Any, declared: dict[str, Any], says: str
) -> None:
    found = failures(kernel_of(op, fn, **declared), (check,))
    assert found
    assert {r.check for r in found} == {check}
    assert any(says in r.failure for r in found), found


def test_every_question_has_a_wrong_kernel() -> None:
    assert {row[0] for row in WRONG} == set(CHECKS)


@pytest.mark.parametrize("op", ["rms_norm", "linear", "mla_decode"])
def test_a_right_kernel_passes_them_all(op: str) -> None:
    fn = {"rms_norm": right, "linear": RightLinear, "mla_decode": attention.ReferenceMlaDecode}[op]
    declared = {"rank": RANK_PORTABLE, "promises": Promises(graph_safe=op != "mla_decode")}
    if op == "rms_norm":
        declared |= {
            "promises": OWN,
            "footprint": Footprint(workspace=lambda facts, rows: (rows + 1) * 576 * 32),
        }
    kernel = kernel_of(op, fn, **declared)
    results = list(check_all(subjects_of(kernel), ReplayBackend()))
    assert [r for r in results if not r.ok] == []
    ran = {r.check for r in results}
    assert {"samples", "honesty"} <= ran
    assert ("weights" in ran) is (op == "linear")
    assert ("capture" in ran) is (op != "mla_decode")
