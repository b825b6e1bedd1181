"""Stand-ins for the libraries that the CUDA plugin calls, computed in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_runtime.ops.reference.attention.scaled import decoded
from vendor_doubles import blackwell, doubles, require
from vendor_doubles.blackwell import packed_words
from vendor_doubles.flash_plan import check_plan
from vendor_doubles.maths import attend, rows_of, spread, varlen

FP8 = torch.float8_e4m3fn


def check_operands(a, b):
    (q, q_scale), (w, w_scale) = a, b
    require(q.dtype == w.dtype == FP8 and q_scale.dtype == torch.float32, "FP8, float32 scales")
    require(q.is_contiguous() and w.is_contiguous(), "K-major operands")
    k = q.shape[-1]
    require(k % 128 == 0 and q_scale.shape == (*q.shape[:-1], k // 128), "a scale per 128")
    dense = q_scale.stride(-2) == 1 and q_scale.stride(-1) % 4 == 0
    require(dense, "transposed, 16-byte columns")
    if w_scale.dtype == torch.int32:  # on compute capability 10
        bits = q_scale.contiguous().view(torch.int32)
        cut = (bits & 255 << 23).view(torch.float32)  # to powers, when the library packs them
        return spread(q, cut, 1, 128), spread(w, packed_words(w_scale, *w.shape[-2:]), 1, 128)
    assert w_scale.dtype == torch.float32
    assert w_scale.shape == (*w.shape[:-2], -(-w.shape[-2] // 128), k // 128)
    return spread(q, q_scale, 1, 128), spread(w, w_scale, 128, 128)


# ---- deep_gemm ----


def fp8_gemm_nt(a, b, d):
    x, w = check_operands(a, b)
    require(d.dtype == torch.bfloat16 and d.shape == (x.shape[0], w.shape[0]), "bfloat16 out")
    require(d.shape[1] % 8 == 0, "rows of whole 16 bytes")
    d.copy_(x @ w.T)


def m_grouped_fp8_gemm_nt_contiguous(a, b, d, grouped_layout):
    x, w = check_operands(a, b)
    assert grouped_layout.dtype == torch.int32 and grouped_layout.shape == (x.shape[0],)
    assert x.shape[0] % 128 == 0
    for block in range(0, x.shape[0], 128):
        owners = set(grouped_layout[block : block + 128].tolist())
        assert len(owners) == 1, "an expert's rows fill whole blocks"
        (expert,) = owners
        if expert >= 0:
            d[block : block + 128] = (x[block : block + 128] @ w[expert].T).to(d.dtype)


def mqa_scores(q, keys, scales, weights):
    """q [heads, d], keys [n, d], scales [n], weights [heads]: [n]."""
    return weights @ (q.float() @ keys.float().T).relu() * scales


def fp8_mqa_logits(q, kv, weights, ks, ke, max_seqlen_k):
    keys, scales = kv
    assert q.dtype == keys.dtype == FP8 and scales.dtype == weights.dtype == torch.float32
    assert all(t.is_contiguous() for t in (q, keys, scales, weights)) and max_seqlen_k
    assert q.shape[1] in (32, 64) and ks.dtype == ke.dtype == torch.int32
    out = torch.full((q.shape[0], max_seqlen_k), float("nan"))
    for i, (a, b) in enumerate(zip(ks.tolist(), ke.tolist(), strict=True)):
        assert b - a <= max_seqlen_k
        out[i, : b - a] = mqa_scores(q[i], keys[a:b], scales[a:b], weights[i])
    return out


def get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms):
    assert context_lens.dtype == torch.int32 and context_lens.ndim == 2 and block_kv == 64
    return torch.full((num_sms + 1, 2), int(context_lens.sum()), dtype=torch.int32)


def fp8_paged_mqa_logits(
    q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len
):
    rows, queries, heads, d = q.shape
    require(q.dtype == FP8 and queries == 1 and q.is_contiguous(), "FP8 queries, one a row")
    require(heads in (32, 64), "32 or 64 heads")
    require(kv_cache.dtype == torch.uint8 and kv_cache.shape[1:] == (64, 1, d + 4), "pages of 64")
    require(context_lens.shape == (rows, 1) and block_table.shape[0] == rows, "a length a row")
    require(context_lens.dtype == block_table.dtype == torch.int32, "int32")
    require(weights.shape == (rows, heads) and weights.is_contiguous(), "a weight per head")
    require((schedule_meta == int(context_lens.sum())).all(), "an old schedule")
    out, flat = torch.full((rows, max_context_len), float("nan")), kv_cache.flatten(1)
    keys = flat[:, : 64 * d].reshape(-1, 64, d)
    scales = flat[:, 64 * d :].contiguous().view(torch.float32)
    for i, n in enumerate(context_lens.flatten().tolist()):
        held = rows_of(keys, block_table[i], n).view(FP8)
        out[i, :n] = mqa_scores(q[i, 0], held, rows_of(scales, block_table[i], n), weights[i])
    return out


# ---- flash_mla ----


@dataclass
class FlashMLASchedMeta:
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None


def get_mla_metadata():
    return FlashMLASchedMeta(), None


def get_mla_decoding_metadata(seqlens_k, num_q_tokens_per_head_k, h_k, h_q, use_legacy):
    assert use_legacy and seqlens_k.dtype == torch.int32 and h_k == 1
    assert num_q_tokens_per_head_k == h_q and seqlens_k.tolist() == [1, 1], "asked for its parts"
    tiles = torch.zeros(4, 8, dtype=torch.int32)  # one block for each of two parts
    tiles[1, :2], tiles[2:, 0], tiles[:2, 3] = 1, 2, 1
    return tiles, torch.tensor([0, 1, 2], dtype=torch.int32)


def flash_mla_with_kvcache(
    q,
    k_cache,
    block_table,
    cache_seqlens,
    head_dim_v,
    tile_scheduler_metadata,
    num_splits,
    softmax_scale,
    causal,
    is_fp8_kvcache,
    indices,
    use_legacy,
):
    batch, queries, heads, width = q.shape
    assert use_legacy and q.is_contiguous() and queries == 1 and width == 576 and not causal
    if indices is not None:
        assert block_table is cache_seqlens is num_splits is None and is_fp8_kvcache
        assert tile_scheduler_metadata.tile_scheduler_metadata is None, "an old schedule"
        assert k_cache.dtype == torch.uint8 and k_cache.shape[1:] == (64, 1, 656)
        assert indices.shape[:2] == (batch, 1) and indices.shape[2] % 64 == 0
        keys = decoded(k_cache.flatten(0, 2), 512)
        return at_slots(q[:, 0], keys, indices[:, 0], softmax_scale).unsqueeze(1), None
    assert k_cache.shape[1:] == (64, 1, 576) and head_dim_v == 512 and q.dtype == k_cache.dtype
    assert block_table.dtype == cache_seqlens.dtype == torch.int32
    assert block_table.stride(-1) == 1 and block_table.shape[0] == batch
    plan = tile_scheduler_metadata
    check_plan(plan.tile_scheduler_metadata, plan.num_splits, cache_seqlens)
    assert num_splits is None
    out, lse = torch.empty(batch, 1, heads, 512), torch.empty(batch, heads, 1)
    for i, length in enumerate(cache_seqlens.tolist()):
        keys = rows_of(k_cache, block_table[i], length)[:, 0]
        out[i, 0], lse[i, :, 0] = attend(q[i, 0], keys, keys[:, :512], softmax_scale, length)
    return out.to(q.dtype), lse


def at_slots(q, keys, slots, scale):
    """q [n, heads, 576] over the keys at slots [n, k]; −1 is no key."""
    assert q.shape[1] in (64, 128) and q.dtype == torch.bfloat16 and slots.dtype == torch.int32
    out = torch.zeros(*q.shape[:2], 512)
    for i, row in enumerate(slots):
        held = keys[row[row >= 0].long()]
        if len(held):
            out[i] = attend(q[i], held, held[:, :512], scale, len(held))[0]
    return out.to(q.dtype)


def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, use_legacy, return_log2_lse):
    assert use_legacy and return_log2_lse is False and q.is_contiguous() and d_v == 512
    assert kv.dtype == torch.bfloat16 and kv.shape[1:] == (1, 576)
    assert indices.shape[:2] == (q.shape[0], 1) and indices.shape[2] % 128 == 0
    return at_slots(q, kv[:, 0], indices[:, 0], sm_scale), None, None


# ---- sgl_kernel ----


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    causal,
    return_softmax_lse,
):
    assert all(t.stride(-1) == 1 for t in (q, k, v)) and return_softmax_lse
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_q == max(cu_seqlens_q.diff()) and max_seqlen_k == max(cu_seqlens_k.diff())
    found, lse = varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal)
    return found, lse.T.contiguous()


def flash_attn_with_kvcache(
    q, k_cache, v_cache, qv, cache_seqlens, page_table, softmax_scale, causal
):
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
        self, float_workspace_buffer, use_cuda_graph, qo_indptr, kv_indptr, kv_indices, kv_len_arr,
        backend,
    ):  # fmt: skip
        buffers = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        assert all((b is not None) == use_cuda_graph for b in buffers)
        assert float_workspace_buffer.nbytes >= 1 << 20 and backend in ("fa2", "fa3", "cutlass")
        self.backend = backend

    def plan(
        self, *, metadata, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale,
        q_data_type, kv_data_type, query_layout, kv_cache_layout,
    ):  # fmt: skip
        if self.backend == "cutlass":
            self.plan_of = planned_cutlass(
                metadata, num_heads, (head_dim_ckv, head_dim_kpe), page_size, sm_scale,
                (q_data_type, kv_data_type), (query_layout, kv_cache_layout),
            )  # fmt: skip
            return
        qo_indptr, kv_indptr, kv_indices, kv_len_arr = metadata
        assert (head_dim_ckv, head_dim_kpe, causal) == (512, 64, False) and num_heads > 0
        assert q_data_type == kv_data_type and query_layout == kv_cache_layout == "split"
        assert all(t.dtype == torch.int32 for t in (qo_indptr, kv_indptr, kv_indices, kv_len_arr))
        assert qo_indptr.tolist() == list(range(len(qo_indptr)))
        pages = -(-kv_len_arr // page_size)
        assert kv_indptr.tolist() == [0, *pages.cumsum(0).tolist()], "exact page counts"
        assert kv_indices.shape == (kv_indptr[-1],)
        self.plan_of = kv_indptr.tolist(), kv_len_arr.tolist(), kv_indices, sm_scale

    def run(self, *, query, kv_cache, kv_len, page_table):
        if self.backend == "cutlass":
            return run_cutlass(self.plan_of, query, kv_cache, kv_len, page_table)
        assert kv_len is page_table is None
        (q_nope, q_pe), (ckv_cache, kpe_cache) = query, kv_cache
        begins, lens, indices, scale = self.plan_of
        assert q_nope.is_contiguous() and q_pe.is_contiguous() and len(lens) == len(q_nope)
        found = torch.empty(q_nope.shape)
        for i, length in enumerate(lens):
            pages = indices[begins[i] : begins[i + 1]]
            latent, rope = rows_of(ckv_cache, pages, length), rows_of(kpe_cache, pages, length)
            both = torch.cat((q_nope[i], q_pe[i]), -1), torch.cat((latent, rope), -1)
            found[i] = attend(*both, latent, scale, length)[0]
        return found.to(q_nope.dtype)


def planned_cutlass(metadata, heads, widths, page_size, scale, dtypes, layouts):
    """What its backend checks when it plans: (rows, page size, dtype)."""
    cum_seq_lens_q, block_tables, seq_lens = metadata
    require(heads == 128 and widths == (512, 64), "128 heads of 512 and 64")
    require(page_size <= 128 and 128 % page_size == 0, "pages that divide 128")
    require(abs(scale * 192**0.5 - 1) < 1e-5, "a fixed scale")
    require(dtypes[0] == dtypes[1] in (torch.float16, torch.bfloat16), "one dtype of 16 bits")
    require(layouts == ("packed", "packed"), "packed queries and cache")
    require(bool((cum_seq_lens_q.diff() == 1).all()), "a query a request")
    require(len(block_tables) == len(seq_lens) == len(cum_seq_lens_q) - 1, "rows")
    require(block_tables.shape[1] % (128 // page_size) == 0, "whole 128 tokens of table")
    return len(seq_lens), page_size, dtypes[0]


def run_cutlass(planned, query, kv_cache, kv_len, page_table):
    rows, page_size, dtype = planned
    require(query.shape == (rows, 128, 576) and query.is_contiguous(), "queries as planned")
    require(kv_cache.shape[1:] == (page_size, 576) and kv_cache.is_contiguous(), "the cache")
    require(query.dtype == kv_cache.dtype == dtype, "dtypes as planned")
    require(kv_len.dtype == page_table.dtype == torch.int32, "int32")
    require(page_table.shape[1] % (128 // page_size) == 0, "whole 128 tokens of table")
    found = torch.empty(rows, 128, 512)
    for i, length in enumerate(kv_len.tolist()):
        keys = rows_of(kv_cache, page_table[i], length)
        found[i] = attend(query[i], keys, keys[:, :512], 192**-0.5, length)[0]
    return found.to(dtype)


class MLAPlanMetadata:
    def csr(cls, qo_indptr, kv_indptr, kv_indices, kv_len_arr):
        return qo_indptr, kv_indptr, kv_indices, kv_len_arr

    def dense(cls, cum_seq_lens_q, block_tables, seq_lens):
        return cum_seq_lens_q, block_tables, seq_lens


class TopKTieBreak:
    NONE, SMALL, LARGE = 0, 1, 2


def top_k_page_table_transform(
    input, src_page_table, lengths, k, row_to_batch, tie_break, dsa_graph_safe, page_size
):
    require(input.dtype == torch.float32 and input.stride(1) == 1, "float32 rows")
    ints = (src_page_table, lengths, row_to_batch)
    require(all(t.dtype == torch.int32 for t in ints), "int32")
    require(page_size & (page_size - 1) == 0, "pages of a power of two")
    require(dsa_graph_safe and k <= 2048, "FilteredTopK's limit")
    assert tie_break == 1
    out = torch.full((len(input), k), -1, dtype=torch.int32)
    for i, length in enumerate(lengths.tolist()):
        best = input[i, :length].sort(descending=True, stable=True).indices[:k]
        pages = src_page_table[row_to_batch[i]][best // page_size]
        out[i, : len(best)] = pages * page_size + best.to(torch.int32) % page_size
    return out


class BatchPrefillWithRaggedKVCacheWrapper:
    def __init__(self, float_workspace_buffer, kv_layout):
        assert kv_layout == "NHD" and float_workspace_buffer.nbytes >= 1 << 20

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        head_dim_vo,
        causal,
        sm_scale,
        q_data_type,
    ):
        assert (head_dim_qk, head_dim_vo) == (192, 128) and num_qo_heads == num_kv_heads
        assert q_data_type in (torch.bfloat16, torch.float16)
        self.args = qo_indptr, kv_indptr, sm_scale, causal

    def run(self, q, k, v, return_lse):
        assert return_lse and v.is_contiguous()
        found, lse = varlen(q, k, v, *self.args)
        empty = torch.isinf(lse)  # this library says −inf, in base 2
        return found, (lse / 0.6931471805599453).masked_fill(empty, float("-inf"))


def trtllm_batch_decode_with_kv_cache_mla(
    query,
    kv_cache,
    workspace_buffer,
    qk_nope_head_dim,
    kv_lora_rank,
    qk_rope_head_dim,
    block_tables,
    seq_lens,
    max_seq_len,
    sparse_mla_top_k,
    bmm1_scale,
    bmm2_scale,
):
    require(not workspace_buffer.any(), "zeroed before first use")
    widths = (qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim)
    require(widths == (128, 512, 64), "128, 512 and 64")
    require(kv_cache.shape[1] in (32, 64), "pages of 32 or 64")
    require(bmm2_scale == 1.0 and query.shape[1] == 1, "a query a row")
    require(block_tables.dtype == seq_lens.dtype == torch.int32, "int32")
    require(int(seq_lens.max()) <= max_seq_len, "max_seq_len")
    require(query.dtype == kv_cache.dtype and query.is_contiguous(), "one dtype, no gaps")
    require(query.dtype in (torch.bfloat16, torch.float8_e4m3fn), f"dtype {query.dtype}")
    require(query.shape[2] <= 64 or query.shape[2] == 128, "no heads between 64 and 128")
    if isinstance(bmm1_scale, torch.Tensor):  # which FP8 alone takes
        assert query.dtype == torch.float8_e4m3fn and bmm1_scale.dtype == torch.float32
        bmm1_scale = float(bmm1_scale.reshape(()))
    found = torch.empty(*query.shape[:3], 512)
    if sparse_mla_top_k:
        assert block_tables.shape == (len(query), 1, sparse_mla_top_k)
    for i, length in enumerate(seq_lens.tolist()):
        if sparse_mla_top_k:  # the first `length` slots of the row
            keys = kv_cache.flatten(0, 1)[block_tables[i, 0, :length].long()]
        else:
            keys = rows_of(kv_cache, block_tables[i], length)
        found[i, 0] = attend(query[i, 0], keys, keys[:, :512], bmm1_scale, length)[0]
    return found.to(torch.bfloat16)


def gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, scale_major_mode, out_dtype):
    assert scale_major_mode == "MN" and a.shape[0] % 4 == 0 and out_dtype == torch.bfloat16
    assert a_scale.shape == (a.shape[1] // 128, a.shape[0])
    assert b_scale.shape == (b.shape[1] // 128, b.shape[0] // 128) and b_scale.is_contiguous()
    x, w = spread(a, a_scale.T, 1, 128), spread(b, b_scale.T, 128, 128)
    return (x @ w.T).to(out_dtype)


def trtllm_fp8_block_scale_routed_moe(
    topk_ids,
    hidden_states,
    hidden_states_scale,
    gemm1_weights,
    gemm1_weights_scale,
    gemm2_weights,
    gemm2_weights_scale,
    routing_bias,
    num_experts,
    top_k,
    n_group,
    topk_group,
    intermediate_size,
    local_expert_offset,
    local_num_experts,
    routed_scaling_factor,
):
    ids, weights = topk_ids
    assert routing_bias is n_group is topk_group is routed_scaling_factor is None  # routed before
    assert top_k == ids.shape[1] and local_expert_offset == 0 and num_experts % 4 == 0
    assert gemm1_weights.shape[1] == 2 * intermediate_size
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


MODULES = {
    **doubles(
        "deep_gemm",
        fp8_gemm_nt,
        fp8_mqa_logits,
        fp8_paged_mqa_logits,
        get_paged_mqa_logits_metadata,
        m_grouped_fp8_gemm_nt_contiguous,
        deep_gemm={"get_num_sms": lambda: 132},  # of its binary, so with no signature
    ),
    **doubles(
        "flash_mla",
        flash_mla_sparse_fwd,
        flash_mla_with_kvcache,
        get_mla_decoding_metadata,
        get_mla_metadata,
    ),
    **doubles("sgl_kernel", flash_attn_varlen_func, flash_attn_with_kvcache),
    **doubles(
        "flashinfer",
        BatchPrefillWithRaggedKVCacheWrapper,
        BatchMLAPagedAttentionWrapper,
        MLAPlanMetadata,
        top_k_page_table_transform,
        trtllm_batch_decode_with_kv_cache_mla,
        gemm_fp8_nt_groupwise,
        trtllm_fp8_block_scale_routed_moe,
        *blackwell.FLASHINFER,
        flashinfer={"SfLayout": blackwell.SfLayout, "TopKTieBreak": TopKTieBreak},
    ),
}
_OF = ("deep_gemm", "flash_mla", "flashinfer", "flashinfer_cutlass", "flashinfer_fp4", "sgl_kernel")
ADAPTERS = tuple(f"ds_runtime_cuda.{n}" for n in _OF)
