"""Stand-ins for the libraries that the CUDA plugin calls: their signatures, layouts and refusals,
computed in torch in float32.

Signatures are recorded in cuda_signatures.json, which names the release that each was read from.
"""

from __future__ import annotations

import types
from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn


def spread(values: Tensor, scale: Tensor, rows: int, cols: int) -> Tensor:
    """Values times scales of `rows` × `cols` each, in float32."""
    wide = scale.float().repeat_interleave(rows, -2)[..., : values.shape[-2], :]
    return values.float() * wide.repeat_interleave(cols, -1)[..., : values.shape[-1]]


def check_operands(a, b):
    (q, q_scale), (w, w_scale) = a, b
    assert q.dtype == w.dtype == FP8 and q_scale.dtype == w_scale.dtype == torch.float32
    assert q.is_contiguous() and w.is_contiguous(), "K-major operands"
    k = q.shape[-1]
    assert k % 128 == 0 and q_scale.shape == (*q.shape[:-1], k // 128)
    assert q_scale.stride(-2) == 1 and q_scale.stride(-1) % 4 == 0, "transposed, 16-byte columns"
    assert w_scale.shape == (*w.shape[:-2], -(-w.shape[-2] // 128), k // 128)
    return spread(q, q_scale, 1, 128), spread(w, w_scale, 128, 128)


# ---- deep_gemm ----


def fp8_gemm_nt(
    a, b, d, c=None, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="",
    disable_ue8m0_cast=False,
):  # fmt: skip
    x, w = check_operands(a, b)
    assert d.dtype == torch.bfloat16 and d.shape == (x.shape[0], w.shape[0])
    assert d.shape[1] % 8 == 0, "rows of whole 16 bytes"
    d.copy_(x @ w.T)


def m_grouped_fp8_gemm_nt_contiguous(
    a, b, d, grouped_layout, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="nk",
    disable_ue8m0_cast=False, use_psum_layout=False, ensure_zero_padding=True,
    expected_m_for_psum_layout=None,
):  # fmt: skip
    x, w = check_operands(a, b)
    assert grouped_layout.dtype == torch.int32 and grouped_layout.shape == (x.shape[0],)
    assert x.shape[0] % 128 == 0
    for block in range(0, x.shape[0], 128):
        owners = set(grouped_layout[block : block + 128].tolist())
        assert len(owners) == 1, "an expert's rows fill whole blocks"
        (expert,) = owners
        if expert >= 0:
            d[block : block + 128] = (x[block : block + 128] @ w[expert].T).to(d.dtype)


# ---- attention in float32 ----


def attend(q, keys, values, scale, seen):
    """q [h, d], keys [n, d], values [n, v]: the first `seen` keys; out [h, v] and natural lse."""
    scores = q.float() @ keys[:seen].float().T * scale
    return scores.softmax(-1) @ values[:seen].float(), scores.logsumexp(-1)


def varlen(q, k, v, cu_q, cu_k, scale, causal):
    """(out [Tq, h, dv], lse [Tq, h]); queries without keys give 0 and +inf, as the libraries do."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2])
    lse = torch.full(q.shape[:2], float("inf"))
    pairs = zip(cu_q.tolist(), cu_q.tolist()[1:], cu_k.tolist(), cu_k.tolist()[1:], strict=False)
    for q0, q1, k0, k1 in pairs:
        for i in range(q0, q1):
            seen = (k1 - k0) - (q1 - 1 - i) if causal else k1 - k0
            for h in range(q.shape[1] if seen > 0 else 0):
                got = attend(q[i, h : h + 1], k[k0:k1, h], v[k0:k1, h], scale, seen)
                out[i, h], lse[i, h] = got[0][0], got[1][0]
    return out.to(q.dtype), lse


def rows_of(cache, table, length):
    """The cached rows of one sequence: cache [pages, page, …]."""
    pages = -(-length // cache.shape[1])
    return cache[table[:pages].long()].flatten(0, 1)[:length]


# ---- flash_mla ----


@dataclass
class FlashMLASchedMeta:
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None


def get_mla_metadata(*args, **kwargs):
    return FlashMLASchedMeta(), None


def get_mla_decoding_metadata(
    seqlens_k, num_q_tokens_per_head_k, h_k, h_q=None, is_fp8_kvcache=False, topk=None,
    use_legacy=False,
):  # fmt: skip
    assert use_legacy and seqlens_k.dtype == torch.int32 and num_q_tokens_per_head_k == h_q
    tiles = torch.full((4, 8), int(seqlens_k.sum()), dtype=torch.int32)
    return tiles, torch.arange(seqlens_k.shape[0] + 1, dtype=torch.int32)


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
    softmax_scale=None, causal=False, is_fp8_kvcache=None, indices=None, attn_sink=None,
    extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None,
    enable_batch_invariant=False, use_legacy=False, kv_format=None, descale_q=None,
    descale_k=None,
):  # fmt: skip
    batch, queries, heads, width = q.shape
    assert use_legacy and q.is_contiguous() and queries == 1 and width == 576
    assert k_cache.shape[1:] == (64, 1, 576) and head_dim_v == 512 and q.dtype == k_cache.dtype
    assert block_table.dtype == cache_seqlens.dtype == torch.int32
    assert block_table.stride(-1) == 1 and block_table.shape[0] == batch
    plan = tile_scheduler_metadata
    assert (plan.tile_scheduler_metadata == int(cache_seqlens.sum())).all(), "an old schedule"
    assert plan.num_splits.shape == (batch + 1,) and num_splits is None
    out, lse = torch.empty(batch, 1, heads, 512), torch.empty(batch, heads, 1)
    for i, length in enumerate(cache_seqlens.tolist()):
        keys = rows_of(k_cache, block_table[i], length)[:, 0]
        out[i, 0], lse[i, :, 0] = attend(q[i, 0], keys, keys[:, :512], softmax_scale, length)
    return out.to(q.dtype), lse


# ---- sgl_kernel ----


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None,
    seqused_k=None, page_table=None, softmax_scale=None, causal=False, qv=None, q_descale=None,
    k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
    num_splits=1, pack_gqa=None, only_qv=False, sm_margin=0, return_softmax_lse=False, sinks=None,
    score_mod=None, aux_tensors=None, ver=3, out=None,
):  # fmt: skip
    assert all(t.stride(-1) == 1 for t in (q, k, v)) and return_softmax_lse
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_q == max(cu_seqlens_q.diff()) and max_seqlen_k == max(cu_seqlens_k.diff())
    found, lse = varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal)
    return found, lse.T.contiguous()


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
    cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
    cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), attention_chunk=None, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, only_qv=False, sm_margin=0,
    return_softmax_lse=False, sinks=None, score_mod=None, aux_tensors=None, ver=3, out=None,
):  # fmt: skip
    assert q.shape[1] == 1 and q.shape[3] == 64 and qv.shape[3] == 512 and causal
    assert k_cache.shape[2:] == (1, 64) and v_cache.shape[2:] == (1, 512)
    assert page_table.dtype == cache_seqlens.dtype == torch.int32
    found = torch.empty(q.shape[0], 1, q.shape[2], 512)
    for i, length in enumerate(cache_seqlens.tolist()):
        rope = rows_of(k_cache, page_table[i], length)[:, 0]
        latent = rows_of(v_cache, page_table[i], length)[:, 0]
        both = torch.cat((qv[i, 0], q[i, 0]), -1), torch.cat((latent, rope), -1)
        found[i, 0] = attend(*both, latent, softmax_scale, length)[0]
    return found.to(q.dtype)


# ---- flashinfer ----


class BatchMLAPagedAttentionWrapper:
    def __init__(
        self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None,
        kv_indices=None, kv_len_arr=None, backend="auto",
    ):  # fmt: skip
        assert float_workspace_buffer.nbytes >= 1 << 20 and backend in ("fa2", "fa3")
        self.indices = kv_indices

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe,
        page_size, causal, sm_scale, q_data_type, kv_data_type, use_profiler=False,
    ):  # fmt: skip
        assert all(t.dtype == torch.int32 for t in (qo_indptr, kv_indptr, kv_indices, kv_len_arr))
        assert qo_indptr.tolist() == list(range(len(qo_indptr)))
        pages = -(-kv_len_arr // page_size)
        assert kv_indptr.tolist() == [0, *pages.cumsum(0).tolist()], "exact page counts"
        assert kv_indices.shape == (kv_indptr[-1],)
        self.plan_of = kv_indptr.tolist(), kv_len_arr.tolist(), kv_indices, sm_scale

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache):
        begins, lens, indices, scale = self.plan_of
        assert q_nope.is_contiguous() and q_pe.is_contiguous() and len(lens) == len(q_nope)
        found = torch.empty(q_nope.shape)
        for i, length in enumerate(lens):
            pages = indices[begins[i] : begins[i + 1]]
            latent, rope = rows_of(ckv_cache, pages, length), rows_of(kpe_cache, pages, length)
            both = torch.cat((q_nope[i], q_pe[i]), -1), torch.cat((latent, rope), -1)
            found[i] = attend(*both, latent, scale, length)[0]
        return found.to(q_nope.dtype)


class BatchPrefillWithRaggedKVCacheWrapper:
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False):
        assert kv_layout == "NHD"

    def plan(
        self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None,
        custom_mask=None, packed_custom_mask=None, causal=False, pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False, window_left=-1, logits_soft_cap=None, sm_scale=None,
        rope_scale=None, rope_theta=None, q_data_type="float16",
    ):  # fmt: skip
        assert (head_dim_qk, head_dim_vo) == (192, 128) and num_qo_heads == num_kv_heads
        assert q_data_type in (torch.bfloat16, torch.float16)
        self.args = qo_indptr, kv_indptr, sm_scale, causal

    def run(self, q, k, v, return_lse=False):
        assert return_lse and v.is_contiguous()
        found, lse = varlen(q, k, v, *self.args)
        empty = torch.isinf(lse)  # this library says −inf, in base 2
        return found, (lse / 0.6931471805599453).masked_fill(empty, float("-inf"))


def trtllm_batch_decode_with_kv_cache_mla(
    query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim,
    block_tables, seq_lens, max_seq_len, sparse_mla_top_k=0, out=None, bmm1_scale=1.0,
    bmm2_scale=1.0,
):  # fmt: skip
    assert not workspace_buffer.any(), "zeroed before first use"
    assert (qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim) == (128, 512, 64)
    assert kv_cache.shape[1] in (32, 64) and bmm2_scale == 1.0 and query.shape[1] == 1
    assert block_tables.dtype == seq_lens.dtype == torch.int32
    assert int(seq_lens.max()) <= max_seq_len
    found = torch.empty(*query.shape[:3], 512)
    for i, length in enumerate(seq_lens.tolist()):
        keys = rows_of(kv_cache, block_tables[i], length)
        found[i, 0] = attend(query[i, 0], keys, keys[:, :512], bmm1_scale, length)[0]
    return found.to(query.dtype)


def gemm_fp8_nt_groupwise(
    a, b, a_scale, b_scale, scale_major_mode=None, mma_sm=1, scale_granularity_mnk=(1, 128, 128),
    out=None, out_dtype=None, backend="cutlass",
):  # fmt: skip
    assert scale_major_mode == "MN" and a.shape[0] % 4 == 0 and out_dtype == torch.bfloat16
    assert a_scale.shape == (a.shape[1] // 128, a.shape[0])
    assert b_scale.shape == (b.shape[1] // 128, b.shape[0] // 128) and b_scale.is_contiguous()
    x, w = spread(a, a_scale.T, 1, 128), spread(b, b_scale.T, 128, 128)
    return (x @ w.T).to(out_dtype)


def trtllm_fp8_block_scale_routed_moe(
    topk_ids, routing_bias, hidden_states, hidden_states_scale, gemm1_weights,
    gemm1_weights_scale, gemm2_weights, gemm2_weights_scale, num_experts, top_k, n_group,
    topk_group, intermediate_size, local_expert_offset, local_num_experts, routed_scaling_factor,
    routing_method_type=0, use_shuffled_weight=False, weight_layout=0, do_finalize=True,
):  # fmt: skip
    ids, weights = topk_ids
    assert ids.dtype == torch.int32 and weights.dtype == torch.bfloat16
    assert hidden_states_scale.shape == (hidden_states.shape[1] // 128, ids.shape[0])
    assert hidden_states_scale.is_contiguous() and local_num_experts == num_experts
    x = spread(hidden_states, hidden_states_scale.T, 1, 128)
    out = torch.zeros(x.shape)
    for t in range(x.shape[0]):
        for e, weight in zip(ids[t].tolist(), weights[t].float().tolist(), strict=True):
            w1 = spread(gemm1_weights[e], gemm1_weights_scale[e], 128, 128)
            w2 = spread(gemm2_weights[e], gemm2_weights_scale[e], 128, 128)
            up, gate = (x[t] @ w1.T).chunk(2)
            out[t] += weight * ((torch.nn.functional.silu(gate) * up) @ w2.T)
    return [out.to(torch.bfloat16)]


def _scaled_mm(
    input, mat2, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None,
    use_fast_accum=False,
):  # fmt: skip
    assert (
        input.shape[0] % 16 == 0
        and input.shape[1] % 512 == 0
        and scale_a.stride() == (1, input.shape[0])
    )
    weight, scale = mat2.t(), scale_b.t()
    assert weight.is_contiguous() and scale.stride() == (scale.shape[1], 1)
    return (spread(input, scale_a, 1, 128) @ spread(weight, scale, 128, 128).T).to(out_dtype)


def module(name: str, **members) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(members)
    return made


MODULES = {
    made.__name__: made
    for made in (
        module(
            "deep_gemm",
            fp8_gemm_nt=fp8_gemm_nt,
            m_grouped_fp8_gemm_nt_contiguous=m_grouped_fp8_gemm_nt_contiguous,
        ),
        module(
            "flash_mla",
            get_mla_metadata=get_mla_metadata,
            get_mla_decoding_metadata=get_mla_decoding_metadata,
            flash_mla_with_kvcache=flash_mla_with_kvcache,
        ),
        module("sgl_kernel"),
        module(
            "sgl_kernel.flash_attn",
            flash_attn_varlen_func=flash_attn_varlen_func,
            flash_attn_with_kvcache=flash_attn_with_kvcache,
        ),
        module(
            "flashinfer",
            BatchPrefillWithRaggedKVCacheWrapper=BatchPrefillWithRaggedKVCacheWrapper,
        ),
        module(
            "flashinfer.mla",
            BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper,
            trtllm_batch_decode_with_kv_cache_mla=trtllm_batch_decode_with_kv_cache_mla,
        ),
        module("flashinfer.gemm", gemm_fp8_nt_groupwise=gemm_fp8_nt_groupwise),
        module(
            "flashinfer.fused_moe",
            trtllm_fp8_block_scale_routed_moe=trtllm_fp8_block_scale_routed_moe,
        ),
    )
}
