"""Conformance finds faults: each wrong kernel here differs from a right one in one thing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ds_runtime.ops.batch import Batch, Segments
from ds_runtime.ops.contract import DeviceInfo, Dims, Facts, Kernel, Layout, Offers, Routing
from ds_runtime.ops.reference import norm, sampling
from ds_runtime.ops.reference.attention import cache
from ds_runtime.ops.reference.attention import dense as attention
from ds_runtime.ops.reference.matrices import linear, moe
from ds_runtime.ops.table import OPS
from ds_runtime.ops.weight import Packed, Weight, WeightPart
from ds_runtime_kit.checks.conformance import check_kernel, facts_for

HOST = DeviceInfo("cpu", "host", "any")
ALL = frozenset({"prefill", "decode", "verify"})


def renamed_parameter(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return norm.rms_norm(x, gamma, eps)


def ignores_strides(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norm.rms_norm(x.as_strided(x.shape, (x.shape[1], 1)), weight, eps)


def returns_float32(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norm.rms_norm(x.float(), weight, eps)


def works_in_place(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = norm.rms_norm(x, weight, eps)
    x.copy_(out)
    return out


def forgets_the_odd_row(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    even = x.shape[0] // 2 * 2
    out[:even] = norm.rms_norm(x[:even], weight, eps)
    return out


def one_row_is_a_little_off(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    normed, summed = norm.add_rms_norm(x, residual, weight, eps)
    normed[-1:] *= 1.04  # small in the norm of many rows
    return normed, summed


def rounds_statistics(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    mean = (x.bfloat16() * x.bfloat16()).mean(-1, keepdim=True)
    return (x * torch.rsqrt(mean + eps) * weight).to(x.dtype)


def is_never_the_same(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norm.rms_norm(x, weight, eps) * (1 + 1e-6 * torch.rand(()))


def adds_without_the_sum(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    normed, _ = norm.add_rms_norm(x, residual, weight, eps)
    return normed, residual


def reads_foreign_rows(
    cache: Tensor,
    page_table: Tensor,
    starts: Tensor,
    segs: Segments,
    kv_lora: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    parts = []
    for pages, start, n in zip(page_table, starts.tolist(), segs.lens, strict=True):
        rows = cache[pages.long()].flatten(0, 1)
        mask = torch.zeros(n, rows.shape[0], dtype=rows.dtype)
        mask[torch.arange(n), start + torch.arange(n)] = 1
        parts.append(mask @ rows)  # zero times NaN
    dense = torch.cat([cache.new_empty(0, cache.shape[2]), *parts]).to(dtype)
    return dense[:, :kv_lora], dense[:, kv_lora:]


def writes_padding(cache: Tensor, latent: Tensor, k_rope: Tensor, slots: Tensor) -> None:
    flat = cache.view(-1, cache.shape[2])
    flat[slots] = torch.cat((latent, k_rope), -1)


def swaps_latent_and_rope(cache: Tensor, latent: Tensor, k_rope: Tensor, slots: Tensor) -> None:
    real = slots >= 0
    flat = cache.view(-1, cache.shape[2])
    flat[slots[real]] = torch.cat((k_rope, latent), -1)[real]


def masks_groups_with_zero(
    logits: Tensor, bias: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    _, choice = moe.scores_and_choice(logits, bias, routing)
    masked = moe.mask_groups(choice, routing)
    masked = masked.masked_fill(masked == float("-inf"), 0.0)
    ids = masked.topk(routing.top_k, -1).indices
    weights = moe.scores_and_choice(logits, bias, routing)[0].gather(1, ids)
    if routing.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * routing.scale, ids.int()


def keeps_bias_in_weights(
    logits: Tensor, bias: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    _, ids = moe.route(logits, bias, routing)
    weights = moe.scores_and_choice(logits, bias, routing)[1].gather(1, ids.long())
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * routing.scale, ids


def merges_nothing_into_nan(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = (lse_a - lse).exp(), (lse_b - lse).exp()
    return (out_a * weight_a[..., None] + out_b * weight_b[..., None]).to(out_a.dtype), lse


def breaks_ties_upwards(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    flipped = sampling.sample(logits.flip(-1), temperature, top_k, top_p, min_p, uniform)
    return logits.shape[1] - 1 - flipped


class ForgetsTheOffset(linear.ReferenceLinear):
    def pack(self, weight: Weight, facts: Facts) -> Packed:
        parts = tuple(
            WeightPart(p.name, p.format, p.shape, p.tensors, p.block) for p in weight.parts
        )
        return super().pack(Weight(parts), facts)


class TakesAnyPacked(linear.ReferenceLinear):
    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        return x @ packed.tensors.get("weight", x).T


class LacksAMethod:
    def __init__(self, facts: Facts) -> None:
        pass

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        raise AssertionError


class KeepsAnOldPageTable(attention.ReferenceMlaDecode):
    def prepare(self, state: Any, batch: Batch) -> None:
        if not state.rows:
            super().prepare(state, batch)
        state.rows = attention.rows_of(batch.decode) if batch.decode is not None else ()


class AttendsOneTooFew(attention.ReferenceMlaDecode):
    def prepare(self, state: Any, batch: Batch) -> None:
        super().prepare(state, batch)
        state.rows = tuple((i, max(1, n - 1)) for i, n in state.rows)


WRONG = [
    ("rms_norm", renamed_parameter, "takes (x, gamma, eps), not (x, weight, eps)"),
    ("rms_norm", ignores_strides, "NaN"),
    ("rms_norm", returns_float32, "dtype torch.float32, not torch.bfloat16"),
    ("rms_norm", works_in_place, "modifies its argument 0"),
    ("rms_norm", forgets_the_odd_row, "NaN in the result"),
    ("add_rms_norm", one_row_is_a_little_off, "a row's relative error"),
    ("rms_norm", rounds_statistics, "relative error"),
    ("rms_norm", is_never_the_same, "two runs differ"),
    ("add_rms_norm", adds_without_the_sum, "relative error"),
    ("cache_gather", reads_foreign_rows, "NaN in the result"),
    ("cache_write", writes_padding, "changes cache rows"),
    ("cache_write", swaps_latent_and_rope, "cache: "),
    ("route", masks_groups_with_zero, "chooses other experts"),
    ("route", keeps_bias_in_weights, "relative error"),
    ("merge_state", merges_nothing_into_nan, "NaN in the result"),
    ("sample", breaks_ties_upwards, "integers differ"),
    ("linear", ForgetsTheOffset, "relative error"),
    ("linear", TakesAnyPacked, "must raise TypeError"),
    ("linear", LacksAMethod, "has no method apply"),
    ("mla_decode", KeepsAnOldPageTable, "call 4 (run)"),
    ("mla_decode", AttendsOneTooFew, "relative error"),
]
FLOAT32_ONLY = {rounds_statistics, is_never_the_same}


@pytest.mark.parametrize(("op", "fn", "says"), WRONG, ids=lambda v: getattr(v, "__name__", None))
def test_a_wrong_kernel_is_found(op: str, fn: Any, says: str) -> None:
    kernel = Kernel(
        OPS[op],
        f"{__name__}:{fn.__name__}",
        "wrong",
        formats=frozenset({"dense", "fp8_block"}),
        layouts=frozenset({"latent_pages.v1"}),
        phases=ALL,
    )
    facts = facts_for(HOST, "float32" if fn in FLOAT32_ONLY else "bfloat16")
    failures = [r.failure for r in check_kernel(kernel, facts) if not r.ok]
    assert failures
    assert any(says in failure for failure in failures), failures


# A third party's layout: rope first, one tensor row per slot.


def rope_first_pages(num_pages: int, facts: Facts, device: Any) -> Tensor:
    width = facts.dims["kv_lora"] + facts.dims["qk_rope"]
    dtype = getattr(torch, facts.kv_dtype)
    return torch.empty(num_pages, facts.page_size, width, dtype=dtype, device=device)


def rope_first_write(cache: Tensor, latent: Tensor, k_rope: Tensor, slots: Tensor) -> None:
    swaps_latent_and_rope(cache, latent, k_rope, slots)


def _latent_first(stored: Tensor, kv_lora: int) -> Tensor:
    return stored.roll(kv_lora, -1)


def rope_first_gather(
    cache: Tensor,
    page_table: Tensor,
    starts: Tensor,
    segs: Segments,
    kv_lora: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    plain = _latent_first(cache, kv_lora)
    return _gather(plain, page_table, starts, segs, kv_lora, dtype)


_gather = cache.cache_gather


class RopeFirstDecode(attention.ReferenceMlaDecode):
    def run(self, state: Any, q: Tensor, cache: Tensor, scale: float) -> Tensor:
        return super().run(state, q, _latent_first(cache, self.kv_lora), scale)


def _rope_first(op: str, fn: Any) -> Kernel:
    tags = frozenset({"rope_first.v1"})
    return Kernel(OPS[op], f"{__name__}:{fn.__name__}", "third", layouts=tags, phases=ALL)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_foreign_cache_layout_is_written_and_read_through_its_own_kernels(dtype: str) -> None:
    layout = Layout("rope_first", 1, f"{__name__}:rope_first_pages", lambda f: 0)
    kernels = (
        _rope_first("cache_write", rope_first_write),
        _rope_first("cache_gather", rope_first_gather),
        _rope_first("mla_decode", RopeFirstDecode),
    )
    offers = Offers(kernels, (layout,))
    for kernel in kernels:
        for result in check_kernel(kernel, facts_for(HOST, dtype), offers):
            assert result.ok, result
    alone = check_kernel(kernels[2], facts_for(HOST, dtype), Offers(kernels[2:], (layout,)))
    assert "no layout with cache_write and cache_gather is offered" in alone[1].failure


def test_a_coarse_kernel_names_its_tolerance_and_an_unknown_name_fails() -> None:
    fn = "ds_runtime.ops.reference.matrices.linear:Fp8W8A8Linear"
    fp8 = frozenset({"fp8_block"})
    facts = Facts(HOST, Dims({}), dtype="bfloat16")
    for numerics, fine in (("fp8_w8a8", True), ("", False), ("int3", False)):
        kernel = Kernel(OPS["linear"], fn, "me", formats=fp8, numerics=numerics)
        results = check_kernel(kernel, facts)
        assert len(results) > 5
        assert all(r.ok for r in results) is fine
