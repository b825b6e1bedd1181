"""Stand-ins for the packages that the xpu plugin calls, computed in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vendor_doubles import doubles, require
from vendor_doubles.maths import attend, rows_of, spread

FP8 = torch.float8_e4m3fn
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


# ---- vllm_xpu_kernels ----


def per_token_group_fp8_quant(
    input,
    output_q,
    output_s,
    group_size,
    eps,
    fp8_min,
    fp8_max,
    scale_ue8m0,
    dummy_is_scale_transposed,
    dummy_is_tma_aligned,
):
    require(input.is_contiguous() and output_q.is_contiguous(), "contiguous rows")
    require(output_s.shape == (input.shape[0], input.shape[1] // group_size), "a scale per group")
    require(not (dummy_is_scale_transposed or dummy_is_tma_aligned), "plain scales")
    groups = input.float().view(input.shape[0], -1, group_size)
    size = groups.abs().amax(-1).clamp(min=eps) / fp8_max
    output_s.copy_(torch.exp2(torch.ceil(torch.log2(size))) if scale_ue8m0 else size)
    values = (groups / output_s.unsqueeze(-1)).clamp(fp8_min, fp8_max)
    output_q.copy_(values.view(input.shape).to(FP8))


def indexer_k_quant_and_cache(k, kv_cache, slot_mapping, quant_block_size, scale_fmt):
    blocks, page, width = kv_cache.shape
    d = width - 4
    require(kv_cache.dtype == torch.uint8 and kv_cache.is_contiguous(), "bytes of keys and scales")
    require(k.shape == (len(slot_mapping), d) and quant_block_size == d, "a scale per key")
    require(
        scale_fmt == "ue8m0" and slot_mapping.dtype == torch.int64, "powers of two, int64 slots"
    )
    size = torch.exp2(torch.ceil(torch.log2(k.float().abs().amax(-1).clamp(min=1e-4) / 448)))
    q = (k.float() / size.unsqueeze(-1)).to(FP8).view(torch.uint8)
    flat = kv_cache.view(blocks, page * width)
    for i, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            p, row = divmod(slot, page)
            flat[p, row * d : (row + 1) * d] = q[i]
            at = page * d + 4 * row
            flat[p, at : at + 4] = size[i : i + 1].view(torch.uint8)


def fp8_paged_mqa_logits(
    q_fp8, kv_cache_fp8, weights, context_lens, block_tables, schedule_metadata, max_model_len
):
    batch, ahead, heads, d = q_fp8.shape
    require(q_fp8.dtype == FP8 and q_fp8.is_contiguous() and ahead == 1, "FP8 queries")
    require(kv_cache_fp8.dtype == torch.uint8, "bytes of keys and scales")
    require(kv_cache_fp8.shape[1:] == (64, 1, d + 4), "pages of 64 keys, then 64 scales")
    require(weights.shape == (batch, heads) and weights.dtype == torch.float32, "a weight per head")
    require(context_lens.shape == (batch,) and context_lens.dtype == torch.int32, "int32 lengths")
    require(block_tables.shape[0] == batch and block_tables.dtype == torch.int32, "int32 pages")
    pages = kv_cache_fp8.flatten(1)
    keys = pages[:, : 64 * d].reshape(-1, 64, d).view(FP8).float()
    scales = pages[:, 64 * d :].contiguous().view(torch.float32)
    out = torch.full((batch, max_model_len), float("-inf"))
    for i, length in enumerate(context_lens.tolist()):
        mine = rows_of(keys, block_tables[i], length)
        scored = torch.relu(q_fp8[i, 0].float() @ mine.T)
        scale = rows_of(scales, block_tables[i], length)
        out[i, :length] = (weights[i] @ scored) * scale
    return out


class XpuFusedMoe:
    def __init__(
        self,
        w13,
        w13_scales,
        w13_bias,
        w2,
        w2_scales,
        w2_bias,
        n_experts_per_token,
        activation,
        num_experts,
    ):
        require(w13.is_contiguous() and w2.is_contiguous(), "contiguous weights")
        require(w13_bias is None and w2_bias is None and activation == "silu", "SwiGLU")
        require(w13.shape[0] == w2.shape[0] == num_experts, "all experts")
        self.top_k = n_experts_per_token
        self.upper, self.lower = self.wide(w13, w13_scales), self.wide(w2, w2_scales)
        require(self.upper.shape[2] == 2 * self.lower.shape[1], "gate and up, then down")

    @staticmethod
    def wide(w, scale):
        """The recipe by dtypes, as the package tells it: [experts, in, out] in float32."""
        if w.dtype == torch.float4_e2m1fn_x2:
            require(scale.dtype == torch.float8_e8m0fnu and scale.is_contiguous(), "e8m0 scales")
            data = w.view(torch.uint8)
            values = E2M1[torch.stack((data & 15, data >> 4), -1).flatten(-2).long()]
            require(scale.shape == (*values.shape[:2], values.shape[2] // 32), "a scale per 32")
            return spread(values, scale, 1, 32).transpose(1, 2)
        if w.dtype != FP8:
            require(scale is None and w.dtype in (torch.bfloat16, torch.float16), "dense weights")
            return w.float()
        require(scale.is_contiguous() and scale.ndim == 3, "a scale per block of each expert")
        e, k, n = w.shape
        if scale.dtype == torch.float32:
            require(scale.shape == (e, k // 128, n // 128), "blocks of 128 × 128")
            return spread(w, scale, 128, 128)
        require(scale.dtype == torch.float8_e8m0fnu, "e8m0 scales")
        require(scale.shape == (e, k // 32, n), "a scale per 32 inputs")
        return spread(w, scale, 32, 1)

    def apply(self, output, hidden_states, topk_weights, topk_ids):
        require(topk_ids.dtype == torch.int32 and topk_ids.shape[1] == self.top_k, "int32 ids")
        require(topk_weights.dtype == torch.float32, "float32 weights")
        require(output.dtype == hidden_states.dtype and output.is_contiguous(), "output as input")
        x = hidden_states.float()
        total = torch.zeros(x.shape)
        for t in range(x.shape[0]):
            for e, weight in zip(topk_ids[t].tolist(), topk_weights[t].tolist(), strict=True):
                gate, up = (x[t] @ self.upper[e]).to(output.dtype).float().chunk(2)
                hidden = (F.silu(gate) * up).to(output.dtype).float()
                total[t] += weight * (hidden @ self.lower[e])
        output.copy_(total)


# ---- sgl_kernel ----


def flash_mla_get_workspace_size(max_seq_len, num_batches, num_heads, page_size, num_kv_splits):
    require(max_seq_len > 0 and num_batches > 0 and num_kv_splits >= 1, "sizes of a step")
    return 64 + num_batches


def flash_mla_decode(
    q_nope, q_pe, kv_c_and_k_pe_cache, seq_lens, page_table, workspace, sm_scale, num_kv_splits
):
    cache, (batch, heads, _) = kv_c_and_k_pe_cache, q_nope.shape
    page = cache.shape[1]
    require(q_nope.shape[2] == 512 and q_pe.shape == (batch, heads, 64), "512 and 64")
    require(cache.shape[2] == 576 and page in (16, 32, 64, 128) and heads <= 128, "its sizes")
    require(q_nope.is_contiguous() and q_pe.is_contiguous(), "contiguous queries")
    require(q_nope.dtype == q_pe.dtype == cache.dtype, "one dtype")
    require(q_nope.dtype in (torch.float16, torch.bfloat16), "16-bit floats")
    require(seq_lens.dtype == page_table.dtype == torch.int32, "int32 lengths and pages")
    require(
        page_table.shape[0] == batch and page_table.shape[1] % (128 // page) == 0, "whole tiles"
    )
    require(workspace.dtype == torch.uint8 and workspace.numel() >= 64 + batch, "workspace")
    require(num_kv_splits == 1, "one split")
    out = torch.empty(batch, heads, 512)
    for i, length in enumerate(seq_lens.tolist()):
        keys = rows_of(cache, page_table[i], length)
        q = torch.cat((q_nope[i], q_pe[i]), -1)
        out[i] = attend(q, keys, keys[:, :512], sm_scale, length)[0]
    return out.to(q_nope.dtype)


def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v):
    rows, heads, width = q.shape
    require(q.dtype == kv.dtype == torch.bfloat16 and width == 576 and d_v == 512, "its widths")
    require(heads % 8 == 0, "eights of heads")
    require(kv.shape[1:] == (1, 576) and indices.shape[:2] == (rows, 1), "one latent head")
    require(indices.dtype == torch.int32, "int32 tokens")
    out = torch.full((rows, heads, 512), float("nan"))
    for i in range(rows):
        mine = indices[i, 0]
        keys = kv[mine[mine >= 0].long(), 0]
        if len(keys):
            out[i] = attend(q[i], keys, keys[:, :512], sm_scale, len(keys))[0]
    return out.to(q.dtype), None, None  # nobody reads the maxima and sums


# ---- torch ----


def scaled_mm(
    mat_a, mat_b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, output_dtype=torch.bfloat16
):
    """As torch on an XPU device checks and computes it; on the CPU it has no such recipe."""
    kinds = F.ScalingType
    require((scale_recipe_a, scale_recipe_b) == (kinds.BlockWise1x128, kinds.BlockWise128x128), "")
    (m, k), n = mat_a.shape, mat_b.shape[1]
    require(mat_a.dtype == mat_b.dtype == FP8, "FP8 operands")
    require(mat_a.is_contiguous() and mat_b.t().is_contiguous(), "row-major by column-major")
    require(k % 16 == 0 and n % 16 == 0, "sixteens")
    require(scale_a.shape == (m, k // 128) and scale_a.dtype == torch.float32, "scales of a")
    require(scale_b.shape == (k // 128, -(-n // 128)) and scale_b.dtype == torch.float32, "of b")
    return (spread(mat_a, scale_a, 1, 128) @ spread(mat_b, scale_b, 128, 128)).to(output_dtype)


MODULES = {
    **doubles(
        "vllm_xpu",
        per_token_group_fp8_quant,
        indexer_k_quant_and_cache,
        fp8_paged_mqa_logits,
        XpuFusedMoe,
    ),
    **doubles(
        "sgl_kernel_xpu", flash_mla_decode, flash_mla_get_workspace_size, flash_mla_sparse_fwd
    ),
}
ADAPTERS = tuple(
    f"ds_runtime_xpu.{n}" for n in ("torch_ops", "vllm_moe", "vllm_index", "sgl_kernel")
)


def install_ops(monkeypatch) -> None:
    """The ops that importing the packages would register, and torch's own for the device."""
    for name in ("_C", "_xpu_C"):
        monkeypatch.setattr(torch.ops, name, MODULES[f"vllm_xpu_kernels.{name}"], raising=False)
    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
