"""DeepGEMM: dense and grouped FP8 matmuls with 128×128 weight blocks and 1×128 activation groups,
and the scores of the lightning indexer over FP8 keys.

Source of the calls: github.com/sgl-project/DeepGEMM, the fork on PyPI as sgl-deep-gemm; they are
compiled for each weight shape when they first run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime.api import (
    FP8_ROWS,
    Facts,
    Groups,
    Packed,
    Weight,
    fp8_blocks,
    kept_in,
)
from ds_runtime_cuda import grouped
from ds_runtime_cuda.expert_weights import SortedExperts
from ds_runtime_cuda.gates import COPIED_KEYS, EXPANDED
from ds_runtime_cuda.quant import GROUP, in_columns, quantise

ALIGN = 128  # rows of one expert begin at multiples of this
_MANY = 16  # rows of a sequence that are worth a copy of its keys
_HEADS = (32, 64)  # of index queries; fewer are filled up with zeros


@cache
def _library() -> Any:
    folder = os.environ.get("DG_JIT_CACHE_DIR") or Path.home() / ".deep_gemm"
    kept_in("deep_gemm", Path(folder) / "cache", tells=False)
    return import_module("deep_gemm")


def _filled(rows: int, shape: tuple[int, ...]) -> int:
    """How many rows are multiplied. From 65 to 128 one tile of 128 rows is chosen, which is slow
    for many short rows of weights: 36 µs for V3's q_b_proj, and 21 for 129 (15 up to 64).
    """
    return 129 if 64 < rows <= 128 and shape[0] >= 16384 and shape[1] <= 2048 else rows


class LinearFp8:
    """y = x · Wᵀ in FP8. Shards that cut a block cannot keep it: they are held in bfloat16."""

    tag = "cuda.deep_gemm_linear"

    def __init__(self, facts: Facts) -> None:
        self._gemm = _library().fp8_gemm_nt

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        return fp8_blocks.packed(weight, self.tag, FP8_ROWS)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag, FP8_ROWS)
        if packed.tag != FP8_ROWS:
            return F.linear(x, packed.tensors["dense"])
        count = x.shape[0]
        q, scale = quantise(x, rows=_filled(count, packed.shape))
        return self.apply_quantized(q, scale, packed)[:count]

    def quantizes(self, rows: int, packed: Packed) -> Groups | None:
        """See QuantizedLinear: but where rows are filled up."""
        whole = packed.tag == FP8_ROWS and _filled(rows, packed.shape) == rows
        return Groups(GROUP, False) if whole else None

    def apply_quantized(self, q: Tensor, scale: Tensor, packed: Packed) -> Tensor:
        """See QuantizedLinear."""
        packed.expect(FP8_ROWS)
        out = torch.empty(q.shape[0], packed.shape[0], dtype=torch.bfloat16, device=q.device)
        if q.shape[0]:
            weight = packed.tensors["weight"], packed.tensors["scale"]
            self._gemm((q, in_columns(scale)), weight, out)
        return out


def _edge(count: int) -> bool:
    """Whether another kind of tile may serve so many rows than one fewer, or one more. Tiles have
    64, 128 or 256 rows, of few rows 16 or 32; what is chosen follows how many there are, and from
    512 rows on they are fetched together."""
    return count % 64 < 2 or (count < 64 and count % 16 < 2)


def compile_linear(facts: Facts, rows: Sequence[int]) -> None:
    """`Compiles.ahead` of LinearFp8: it compiles per shape of the weight and kind of tile. The
    largest call is first, so that the others fit in the memory that torch keeps of it. Rising ones
    each take more: all of a device's, while weights are loaded."""
    n, k = facts.shape
    values = torch.empty(n, k, dtype=torch.float8_e4m3fn, device="cuda")
    scale = torch.empty(-(-n // 128), -(-k // 128), dtype=torch.float32, device="cuda")
    packed = Packed(FP8_ROWS, (n, k), {"weight": values, "scale": scale}, 0)
    kernel = LinearFp8(facts)
    for count in sorted(filter(_edge, rows), reverse=True):
        kernel.apply(torch.zeros(count, k, dtype=torch.bfloat16, device="cuda"), packed)
    torch.cuda.synchronize()
    del values, scale, packed
    torch.cuda.empty_cache()


class MlaAbsorb:
    """kv_b: expansion as a linear of the same weight. Where it packs itself, decode's two products
    are by a copy in bfloat16."""

    def __init__(self, facts: Facts) -> None:
        dims = facts.dims
        self._heads, self._nope, self._v = dims["heads"], dims["qk_nope"], dims["v"]
        self._linear = LinearFp8(facts)

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        packed = self._linear.pack(weight, facts)
        dense = packed.tensors.get("dense")
        if dense is None:
            dense = fp8_blocks.restore(packed).to(torch.bfloat16)
            packed.nbytes += dense.nbytes
        packed.tensors["wide"] = dense.view(self._heads, self._nope + self._v, -1)
        return packed

    def expand(self, latent: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
        both = self._linear.apply(latent, packed)
        both = both.view(-1, self._heads, self._nope + self._v)
        return both[..., : self._nope], both[..., self._nope :]

    def apply_q(self, q_nope: Tensor, q_rope: Tensor, packed: Packed) -> Tensor:
        up = packed.tensors["wide"][:, : self._nope]  # [heads, nope, latent]
        return torch.cat((torch.einsum("thn,hnl->thl", q_nope, up), q_rope), 2)

    def apply_v(self, x: Tensor, packed: Packed) -> Tensor:
        up = packed.tensors["wide"][:, self._nope :]  # [heads, v, latent]
        return torch.einsum("thl,hvl->thv", x, up).contiguous()


def compile_absorb(facts: Facts, rows: Sequence[int]) -> None:
    """`Compiles.ahead` of MlaAbsorb."""
    compile_linear(facts, [count for count in rows if count >= EXPANDED])


class ExpertsFp8(SortedExperts):
    """Routed experts as two grouped matmuls over rows sorted by expert."""

    def __init__(self, facts: Facts) -> None:
        self._gemm = _library().m_grouped_fp8_gemm_nt_contiguous

    def _summed(
        self, arrange: grouped.Arrange, weights: Tensor, ids: Tensor, packed: Packed
    ) -> Tensor:
        held, (experts, hidden, inter) = packed.tensors, packed.shape
        if not ids.shape[0]:
            return torch.empty(0, hidden, dtype=torch.bfloat16, device=ids.device)
        rows = grouped.sort_rows(ids, experts, ALIGN)
        count = rows.owner.shape[0]
        gate_up = torch.empty(count, 2 * inter, dtype=torch.bfloat16, device=ids.device)
        upper, powers = (held["gate_up"], held["gate_up_scale"]), held.get("ue8m0", False)
        self._gemm(arrange(rows), upper, gate_up, rows.owner)
        out = torch.empty(count, hidden, dtype=torch.bfloat16, device=ids.device)
        lower = held["down"], held["down_scale"]
        self._gemm(grouped.silu(gate_up, rows, powers), lower, out, rows.owner)
        return grouped.combine(out, weights, rows)


def index_scores(
    q: Tensor, weights: Tensor, cache: Tensor, page_table: Tensor, owners: Tensor, lens: Tensor
) -> Tensor:
    """IndexScores over FP8 index_pages: over the pages where sequences have few rows or too many
    keys, else over a copy of their keys, which many rows then read together."""
    (rows, heads, dim), page = q.shape, cache.shape[1]
    sequences, width = page_table.shape[0], page_table.shape[1] * page
    if not rows:
        return torch.empty(0, width, dtype=torch.float32, device=q.device)
    if missing := next(n for n in _HEADS if n >= heads) - heads:
        q = F.pad(q.view(torch.uint8), (0, 0, 0, missing)).view(q.dtype)
        weights = F.pad(weights, (0, missing))
    q, weights, lib = q.contiguous(), weights.contiguous(), _library()
    scores: Tensor
    if rows >= _MANY * sequences and sequences * width <= COPIED_KEYS:
        both = cache.flatten(1).index_select(0, page_table.flatten())
        keys = both[:, : page * dim].reshape(-1, dim).view(torch.float8_e4m3fn)
        scales = both[:, page * dim :].contiguous().view(torch.float32).flatten()
        first = owners * width
        scores = lib.fp8_mqa_logits(
            q, (keys, scales), weights, first, first + lens, max_seqlen_k=width
        )
        return scores
    seen, table = lens.view(rows, 1), page_table.index_select(0, owners)
    plan = lib.get_paged_mqa_logits_metadata(seen, page, lib.get_num_sms())
    scores = lib.fp8_paged_mqa_logits(
        q.unsqueeze(1), cache.unsqueeze(2), weights, seen, table, plan, width
    )
    return scores
