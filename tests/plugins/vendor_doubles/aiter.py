"""Stand-ins for AITER, computed in float32.

Layouts and refusals are those of github.com/ROCm/aiter at e4048607a5: aiter/mla.py and
csrc/py_itfs_cu/asm_mla.cu, aiter/fused_moe.py, aiter/ops/{topk,shuffle,quant,gemm_*}.py,
csrc/kernels/topk_softmax_kernels_group.cu. `GFX` is the architecture that they stand on.
"""

from __future__ import annotations

import itertools
import types

import torch

from vendor_doubles import doubles, require
from vendor_doubles.maths import attend, spread, varlen

GFX = "gfx942"
FP4 = torch.float4_e2m1fn_x2
E8M0 = torch.float8_e8m0fnu
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def fp8() -> torch.dtype:
    return torch.float8_e4m3fnuz if GFX == "gfx942" else torch.float8_e4m3fn


# ---- attention ----


def mla_decode_fwd(
    q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, sm_scale
):
    rows, heads, width = q.shape
    require(q.is_contiguous(), "only support Q.is_contiguous() for now")
    require(heads in (8, 16, 32, 64, 128), f"cannot find suitable kernel for {heads} heads")
    require(width == 576 and o.shape == (rows, heads, 512), "576 in, 512 out")
    require(kv_buffer.shape[1:] == (1, 1, 576), "[slots, page 1, kv heads 1, 576]")
    require(q.dtype == kv_buffer.dtype == o.dtype == torch.bfloat16, f"unsupport Q {q.dtype}")
    lists = (qo_indptr, kv_indptr, kv_indices, kv_last_page_lens)
    require(all(t.dtype == torch.int32 for t in lists), "int32 metadata")
    require(qo_indptr.tolist() == list(range(rows + 1)) and max_seqlen_q == 1, "a query per list")
    require(kv_last_page_lens.tolist() == [1] * rows and kv_indptr.shape == (rows + 1,), "pages")
    bounds = kv_indptr.tolist()
    require(bounds[0] == 0 and bounds[-1] <= len(kv_indices), "lists inside the indices")
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        require(end > begin, "no empty list")
        keys = kv_buffer[kv_indices[begin:end].long()].flatten(1)
        o[i] = attend(q[i], keys, keys[:, :512], sm_scale, end - begin)[0].to(o.dtype)
    return None, None


def mla_prefill_fwd(
    q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, sm_scale
):
    rows, heads, width = q.shape
    require(q.is_contiguous(), "only support Q.is_contiguous() for now")
    require(heads in (16, 128), "only support num_q_heads/num_kv_heads==16 or 128 for now")
    require(width == 576 and o.shape == (rows, heads, 512), "576 in, 512 out")
    require(kv_buffer.shape[1:] == (1, 1, 576), "[slots, page 1, kv heads 1, 576]")
    require(q.dtype == kv_buffer.dtype == o.dtype == torch.bfloat16, f"unsupport Q {q.dtype}")
    lists = (qo_indptr, kv_indptr, kv_indices, kv_last_page_lens)
    require(all(t.dtype == torch.int32 for t in lists), "int32 metadata")
    queries, bounds = qo_indptr.tolist(), kv_indptr.tolist()
    require(len(queries) == len(bounds) == len(kv_last_page_lens) + 1, "of each sequence")
    require(bool((kv_last_page_lens == 1).all()) and queries[-1] == rows, "pages")
    require(max_seqlen_q >= int(qo_indptr.diff().max()), "max_seqlen_q")
    pairs = zip(itertools.pairwise(queries), itertools.pairwise(bounds), strict=True)
    for (first, last), (begin, end) in pairs:
        keys = kv_buffer[kv_indices[begin:end].long()].flatten(1)
        for row in range(first, last):  # causal, aligned at the ends
            seen = end - begin - (last - 1 - row)
            require(seen > 0, "a query without keys")
            o[row] = attend(q[row], keys, keys[:, :512], sm_scale, seen)[0].to(o.dtype)
    return o, None


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
    return_lse,
):  # fmt: skip
    require(all(t.stride(-1) == 1 for t in (q, k, v)), "last dimensions contiguous")
    require(q.dtype == k.dtype == v.dtype in (torch.bfloat16, torch.float16), f"dtype {q.dtype}")
    require(cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and return_lse, "int32")
    require(max_seqlen_q >= max(cu_seqlens_q.diff()), "max_seqlen_q")
    require(max_seqlen_k >= max(cu_seqlens_k.diff()), "max_seqlen_k")
    found, lse = varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal)
    return found, lse.masked_fill(torch.isinf(lse), float("-inf")).T.contiguous()


# ---- layouts ----


def shuffle_weight(x, layout):
    require(layout == (16, 16) and x.dim() >= 2, "16 × 16")
    require(x.shape[-2] % 16 == 0, f"{x.shape[-2]} % 16")
    require(x.shape[-1] % 32 == 0, f"{x.shape[-1]} % 32")
    most = 16 // x.element_size()
    codes = x.view(torch.uint8) if x.element_size() == 1 else x
    tiles = codes.view(-1, x.shape[-2] // 16, 16, x.shape[-1] // 32, 32 // most, most)
    out = tiles.permute(0, 1, 3, 4, 2, 5).contiguous().view(x.shape).view(x.dtype)
    out.is_shuffled = True
    return out


def _plain(x):
    """What shuffle_weight was given."""
    most = 16 // x.element_size()
    codes = x.view(torch.uint8) if x.element_size() == 1 else x
    shape = (-1, x.shape[-2] // 16, x.shape[-1] // 32, 32 // most, 16, most)
    return codes.view(shape).permute(0, 1, 4, 2, 3, 5).reshape(x.shape).view(x.dtype)


def e8m0_shuffle(scale):
    require(scale.dim() == 2 and scale.element_size() == 1, "scale must be a 2D tensor")
    rows, cols = scale.shape
    padded = torch.zeros(-(-rows // 256) * 256, -(-cols // 8) * 8, dtype=torch.uint8)
    padded[:rows, :cols] = scale.view(torch.uint8)
    tiles = padded.view(padded.shape[0] // 32, 2, 16, padded.shape[1] // 8, 2, 4)
    return tiles.permute(0, 3, 5, 2, 4, 1).reshape(padded.shape).view(scale.dtype)


def _plain_scale(shuffled, rows, cols):
    """[rows, cols] float32 of what e8m0_shuffle was given."""
    require(shuffled.shape == (-(-rows // 256) * 256, -(-cols // 8) * 8), "padded exponents")
    tiles = shuffled.view(torch.uint8).view(shuffled.shape[0] // 32, -1, 4, 16, 2, 2)
    bytes_ = tiles.permute(0, 5, 3, 1, 4, 2).reshape(shuffled.shape)[:rows, :cols]
    return _power(bytes_)


def _power(exponents):
    """Of e8m0 bytes, of which the last is no number."""
    return torch.exp2(exponents.float() - 127).masked_fill(exponents == 255, float("nan"))


# ---- rounding ----


def per_group_quant_hip(x, quant_dtype, transpose_scale):
    require(x.is_contiguous() and x.shape[-1] % 128 == 0, "whole groups of 128")
    require(quant_dtype == fp8(), f"{GFX} has no {quant_dtype}")
    groups = x.float().view(*x.shape[:-1], -1, 128)
    scale = groups.abs().amax(-1).clamp(min=1e-10) / torch.finfo(quant_dtype).max
    q = (groups / scale.unsqueeze(-1)).to(quant_dtype).view(x.shape)
    if transpose_scale:  # the shape stays, the numbers lie column by column
        scale = scale.T.contiguous().view(scale.shape)
    return q, scale


def _fp4(x):
    """(codes [rows, cols] uint8, exponents [rows, cols / 32] uint8), rounded up as AITER does."""
    groups = x.float().view(x.shape[0], -1, 32)
    most = groups.abs().amax(-1).clamp(min=2.0**-120)
    exponent = torch.ceil(torch.log2(most / 6.0)).clamp(-127, 127)
    scaled = groups / torch.exp2(exponent).unsqueeze(-1)
    steps = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = torch.bucketize(scaled.abs(), steps) + 8 * (scaled < 0)
    bytes_ = torch.where(most.isnan(), 255, exponent.nan_to_num() + 127)
    return codes.flatten(1).to(torch.uint8), bytes_.to(torch.uint8)


def _spread_fp4(packed, scale):
    """float32 [..., rows, cols] of two codes a byte and a scale per 32."""
    bytes_ = packed.view(torch.uint8)
    codes = torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(-2)
    return _E2M1[codes.long()] * scale.repeat_interleave(32, -1)


def per_1x32_f4_quant_hip(x, shuffle):
    require(GFX == "gfx950", f"no FP4 on {GFX}")
    require(x.is_contiguous() and x.shape[1] % 32 == 0 and shuffle, "whole groups of 32")
    codes, exponents = _fp4(x)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return packed.view(FP4), e8m0_shuffle(exponents).view(E8M0)


# ---- matmuls ----


def _blockscale(XQ, WQ, x_scale, w_scale, dtype):
    require(XQ.shape[0] > 0, "CK fails on no rows")
    require(XQ.dtype == WQ.dtype == fp8(), f"{GFX} multiplies {fp8()}")
    require(dtype in (torch.bfloat16, torch.float16), f"Output {dtype=} is not supported")
    require(x_scale.shape == (XQ.shape[0], XQ.shape[1] // 128), "a scale per token and group")
    require(w_scale.shape == (-(-WQ.shape[0] // 128), WQ.shape[1] // 128), "a scale per block")
    require(x_scale.dtype == w_scale.dtype == torch.float32, "float32 scales")
    return (spread(XQ, x_scale, 1, 128) @ spread(WQ, w_scale, 128, 128).T).to(dtype)


def gemm_a8w8_blockscale(XQ, WQ, x_scale, w_scale, dtype):
    return _blockscale(XQ, WQ, x_scale, w_scale, dtype)


def gemm_a8w8_blockscale_bpreshuffle(XQ, WQ, x_scale, w_scale, dtype):
    rows, groups = x_scale.shape
    columns = x_scale.contiguous().view(groups, rows).T
    return _blockscale(XQ, _plain(WQ), columns, w_scale, dtype)


def gemm_a4w4(A, B, A_scale, B_scale, dtype):
    require(GFX == "gfx950", f"A4W4 GEMM kernel is not supported on {GFX}!")
    require(A.dtype == B.dtype == FP4 and A.shape[1] == B.shape[1], "two codes a byte")
    require(A_scale.dtype == B_scale.dtype == E8M0, "e8m0 scales")
    groups = A.shape[1] // 16
    x = _spread_fp4(A, _plain_scale(A_scale, A.shape[0], groups))
    w = _spread_fp4(_plain(B.view(torch.uint8)), _plain_scale(B_scale, B.shape[0], groups))
    out = torch.full((-(-A.shape[0] // 32) * 32, B.shape[0]), float("nan"), dtype=dtype)
    out[: A.shape[0]] = x @ w.T
    return out


# ---- experts ----


class ActivationType:
    Silu = "ActivationType.Silu"


class QuantType:
    No, per_128x128, per_1x32 = "No", "per_128x128", "per_1x32"


def fused_moe(hidden_states, w1, w2, topk_weight, topk_ids, quant_type, w1_scale, w2_scale):
    require(hidden_states.dtype in (torch.bfloat16, torch.float16), "unsupported out dtype")
    require(hidden_states.is_contiguous() and hidden_states.shape[0] > 0, "rows")
    require(topk_ids.dtype == torch.int32 and topk_weight.dtype == torch.float32, "int32, float32")
    require(w1.is_shuffled and w2.is_shuffled, "tuned kernels read shuffled weights")
    experts, hidden = w1.shape[0], hidden_states.shape[1]
    if quant_type is None or quant_type == QuantType.No:
        require(w1_scale is w2_scale is None and w1.dtype == hidden_states.dtype, "no scales")
        wide = [_plain(w1).float(), _plain(w2).float()]
        round_ = torch.Tensor.float
    elif quant_type == QuantType.per_128x128:
        require(w1.dtype == w2.dtype == fp8(), f"{GFX} multiplies {fp8()}")
        require(w1_scale.shape == (experts, w1.shape[1] // 128, w1.shape[2] // 128), "blocks")
        wide = [spread(_plain(w), s, 128, 128) for w, s in ((w1, w1_scale), (w2, w2_scale))]
        round_ = _rounded_fp8
    else:
        require(quant_type == QuantType.per_1x32 and GFX == "gfx950", f"no FP4 on {GFX}")
        require(w1.dtype == w2.dtype == FP4, "two codes a byte")
        wide = [_experts_fp4(w, s) for w, s in ((w1, w1_scale), (w2, w2_scale))]
        round_ = _rounded_fp4
    x, out = round_(hidden_states), torch.zeros(hidden_states.shape)
    for e in topk_ids.unique().tolist():
        rows, places = (topk_ids == e).nonzero(as_tuple=True)
        gate, up = (x[rows] @ wide[0][e].T).chunk(2, -1)
        inner = round_((torch.nn.functional.silu(gate) * up).to(hidden_states.dtype))
        shares = topk_weight[rows, places].unsqueeze(1)
        out.index_add_(0, rows, shares * (inner @ wide[1][e].T))
    require(wide[1].shape[1] == hidden, "down-projection")
    return out.to(hidden_states.dtype)


def _experts_fp4(w, scale):
    experts, rows, half = w.shape
    plain = _plain_scale(scale, experts * rows, half // 16).view(experts, rows, -1)
    return _spread_fp4(_plain(w.view(torch.uint8)), plain)


def _rounded_fp8(x):
    q, scale = per_group_quant_hip(x.contiguous(), fp8(), False)
    return spread(q, scale, 1, 128)


def _rounded_fp4(x):
    codes, exponents = _fp4(x)
    scale = _power(exponents).repeat_interleave(32, 1)
    return _E2M1[codes.long()] * scale


def _choose(scores, choice, topk_weights, topk_ids, groups, kept, best, closed, renorm, factor):
    require(groups in (1, 2, 4, 8), f"Unsupported num_expert_group: {groups}")
    require(1 <= kept <= groups, "topk_grp must be in [1, num_expert_group]")
    require(topk_weights.dtype == torch.float32 and topk_ids.dtype == torch.int32, "types")
    parts = choice.view(len(choice), groups, -1)
    value = parts.topk(min(best, parts.shape[2]), -1).values.sum(-1)
    open_ = torch.zeros_like(value).scatter_(1, value.topk(kept).indices, 1).bool()
    found = (
        parts.masked_fill(~open_.unsqueeze(-1), closed).flatten(1).topk(topk_ids.shape[1]).indices
    )
    weights = scores.gather(1, found)
    if renorm:
        weights = weights / weights.sum(-1, keepdim=True)
    topk_weights.copy_(weights * factor)
    topk_ids.copy_(found)


def biased_grouped_topk(
    gating_output, correction_bias, topk_weights, topk_ids, num_expert_group, topk_group,
    need_renorm, routed_scaling_factor,
):  # fmt: skip
    require(gating_output.stride(1) == 1, "gating_output last dimension must be contiguous")
    require(gating_output.dtype == correction_bias.dtype, "the bias in the gate's dtype")
    require(need_renorm or len(gating_output) <= 212 * 256, "Renormalization is required")
    scores = gating_output.float().sigmoid()
    _choose(
        scores, scores + correction_bias, topk_weights, topk_ids, num_expert_group, topk_group, 2,
        float("-inf"), need_renorm, routed_scaling_factor,
    )  # fmt: skip


def grouped_topk(
    gating_output, topk_weights, topk_ids, num_expert_group, topk_group, need_renorm, is_softmax,
    routed_scaling_factor,
):  # fmt: skip
    require(is_softmax, "softmax")
    scores = gating_output.float().softmax(-1)
    _choose(
        scores, scores, topk_weights, topk_ids, num_expert_group, topk_group, 1, 0.0, need_renorm,
        routed_scaling_factor,
    )  # fmt: skip


MODULES = doubles(
    "aiter",
    mla_decode_fwd,
    mla_prefill_fwd,
    flash_attn_varlen_func,
    shuffle_weight,
    e8m0_shuffle,
    per_group_quant_hip,
    per_1x32_f4_quant_hip,
    gemm_a8w8_blockscale,
    gemm_a8w8_blockscale_bpreshuffle,
    gemm_a4w4,
    fused_moe,
    biased_grouped_topk,
    grouped_topk,
    aiter={
        "QuantType": QuantType,
        "ActivationType": ActivationType,
        "dtypes": types.SimpleNamespace(fp4x2=FP4),
    },
)
ADAPTERS = tuple(f"ds_runtime_rocm.{name}" for name in ("aiter_gemm", "aiter_mla", "aiter_moe"))
