"""Stand-ins for torch-npu's ops, computed in float32.

Layouts and refusals are those of torch-npu 2.14's own descriptions (torch_npu/_op_plugin_docs.py);
how wide rows npu_transpose_batchmatmul turns is of op-plugin's page on it.
"""

from __future__ import annotations

import torch

from vendor_doubles import doubles, require
from vendor_doubles.maths import attend, rows_of, varlen

HALVES = (torch.bfloat16, torch.float16)
NZ = 29


def _dense(*tensors):
    require(all(t.is_contiguous() for t in tensors), "takes no tensor with gaps")


def npu_format_cast(self, acl_format):
    require(acl_format == NZ and self.is_contiguous() and self.dim() in (2, 3), "FRACTAL_NZ")
    out = self.clone()
    out.npu_format = NZ
    return out


def _fractal(weight):
    require(getattr(weight, "npu_format", 2) == NZ, "the weight must be FRACTAL_NZ")


# ---- attention ----


def npu_fused_infer_attention_score(
    query, key, value, atten_mask, actual_seq_lengths, actual_seq_lengths_kv, block_table,
    query_rope, key_rope, num_heads, scale, input_layout, num_key_value_heads, sparse_mode,
    block_size, softmax_lse_flag,
):  # fmt: skip
    require(query.dtype == key.dtype == value.dtype in HALVES, f"dtype {query.dtype}")
    _dense(query, key, value, query_rope, key_rope)
    require(query_rope.shape[-1] == key_rope.shape[-1] == 64, "64 rotated values")
    require(num_heads == query.shape[-2] and query_rope.shape[-2] == num_heads, "num_heads")
    if input_layout == "BSND":
        require(not softmax_lse_flag and actual_seq_lengths is None and sparse_mode == 0, "decode")
        return _paged(
            query, key, query_rope, key_rope, block_table, block_size, actual_seq_lengths_kv,
            num_heads, num_key_value_heads, scale,
        )  # fmt: skip
    require(input_layout == "TND" and softmax_lse_flag and block_table is None, input_layout)
    require(num_key_value_heads == num_heads and query.shape[-1] == value.shape[-1] == 128, "MHA")
    causal = sparse_mode == 3
    if causal:
        upper = torch.triu(torch.ones(2048, 2048), 1)
        require(atten_mask.dtype in (torch.int8, torch.bool), "an int8 mask")
        require(torch.equal(atten_mask.float(), upper), "the fixed mask of 2048 × 2048")
    else:
        require(sparse_mode == 0 and atten_mask is None, f"sparse_mode {sparse_mode}")
    sums = []
    for lens, rows in ((actual_seq_lengths, query), (actual_seq_lengths_kv, key)):
        require(lens == sorted(lens) and lens[-1] == len(rows), "cumulative lengths")
        require(len(set(lens)) == len(lens) and lens[0] > 0, "no empty sequence")
        sums.append(torch.tensor([0, *lens]))
    q, k = torch.cat((query, query_rope), -1), torch.cat((key, key_rope), -1)
    out, lse = varlen(q, k, value, *sums, scale, causal)
    return out, lse.unsqueeze(-1)  # of queries without keys: +inf


def _paged(q, key, q_rope, k_rope, table, block_size, lens, heads, kv_heads, scale):
    require(q.shape[1] == 1 and q.shape[-1] == 512 and kv_heads == 1, "absorbed, a query a row")
    require(heads & (heads - 1) == 0 and heads <= 128, f"{heads} heads: a power of two up to 128")
    require(block_size % 16 == 0 and block_size <= 1024, f"block_size {block_size}")
    require(key.shape[1:] == (block_size, 512) and k_rope.shape[1:] == (block_size, 64), "pages")
    require(table.dtype == torch.int32 and table.shape[0] == len(q) == len(lens), "block_table")
    require(table.shape[1] * block_size >= max(lens), "a block_table as wide as the longest")
    out = torch.empty(q.shape)
    for i, length in enumerate(lens):
        latent, rope = (rows_of(c, table[i], length) for c in (key, k_rope))
        both = torch.cat((q[i, 0], q_rope[i, 0]), -1), torch.cat((latent, rope), -1)
        out[i, 0] = attend(*both, latent, scale, length)[0]
    return out.to(q.dtype), torch.empty(0)


_DECODE = (
    "query", "key", "value", "atten_mask", "actual_seq_lengths", "actual_seq_lengths_kv",
    "block_table", "query_rope", "key_rope", "num_heads", "scale", "input_layout",
    "num_key_value_heads", "sparse_mode", "block_size", "softmax_lse_flag",
)  # fmt: skip


def npu_fused_infer_attention_score_out(
    query, key, value, atten_mask, actual_seq_lengths, actual_seq_lengths_kv, block_table,
    query_rope, key_rope, num_heads, scale, input_layout, num_key_value_heads, sparse_mode,
    block_size, softmax_lse_flag, workspace, out,
):  # fmt: skip
    given = locals()
    found, _ = npu_fused_infer_attention_score(**{name: given[name] for name in _DECODE})
    require(workspace.dim() == 1 and workspace.dtype == query.dtype, "workspace in query's dtype")
    require(workspace.numel() >= _workspace(query), "a workspace that is large enough")
    require(len(out) == 2 and out[1].numel() == 1, "two results")
    require(out[0].shape == query.shape and out[0].dtype == query.dtype, "a result as query")
    _dense(*out)
    out[0].copy_(found)


def _workspace(query):
    return 3 * query.shape[0] * query.shape[-2]


def _npu_fused_infer_attention_score_get_max_workspace(
    query, key, value, atten_mask, actual_seq_lengths, actual_seq_lengths_kv, block_table,
    query_rope, key_rope, num_heads, scale, input_layout, num_key_value_heads, sparse_mode,
    block_size, softmax_lse_flag,
):  # fmt: skip
    require(input_layout == "BSND" and len(actual_seq_lengths_kv) == len(query), "decode")
    return torch.empty(_workspace(query), dtype=query.dtype)


def npu_sparse_flash_attention(
    query, key, value, sparse_indices, scale_value, block_table, actual_seq_lengths_query,
    actual_seq_lengths_kv, query_rope, key_rope, layout_query, layout_kv, sparse_mode,
    attention_mode,
):  # fmt: skip
    _dense(query, key, value, sparse_indices, query_rope, key_rope)
    require((layout_query, layout_kv, attention_mode) == ("TND", "PA_BSND", 2), "absorbed MLA")
    rows, heads, width = query.shape
    require(width == 512 and query_rope.shape == (rows, heads, 64), "512 and 64")
    require(query.dtype == key.dtype in HALVES and value is not None, f"dtype {query.dtype}")
    require(heads & (heads - 1) == 0 and heads <= 128, f"{heads} heads: a power of two")
    pages, page, one, _ = key.shape
    require(one == 1 and page % 16 == 0 and 16 <= page <= 1024, f"block size {page}")
    for t in (sparse_indices, block_table, actual_seq_lengths_query, actual_seq_lengths_kv):
        require(t.dtype == torch.int32, "int32")
    require(sparse_indices.shape[:2] == (rows, 1), "a list for each query")
    require(actual_seq_lengths_query.tolist() == [rows] and sparse_mode == 0, "one sequence")
    (length,) = actual_seq_lengths_kv.tolist()
    require(block_table.shape == (1, pages), "its pages")
    latent = rows_of(key[:, :, 0], block_table[0], length)
    rope = rows_of(key_rope[:, :, 0], block_table[0], length)
    out = torch.zeros(rows, heads, 512)
    for i, chosen in enumerate(sparse_indices[:, 0]):
        seen = int((chosen >= 0).sum())
        require((chosen[:seen] >= 0).all() and int(chosen.max()) < length, "valid ones first")
        if seen:
            at = chosen[:seen].long()
            both = torch.cat((query[i], query_rope[i]), -1), torch.cat((latent[at], rope[at]), -1)
            out[i] = attend(*both, latent[at], scale_value, seen)[0]
    return out.to(query.dtype), torch.empty(0), torch.empty(0)


def npu_lightning_indexer(
    query, key, weights, actual_seq_lengths_query, actual_seq_lengths_key, block_table,
    layout_query, layout_key, sparse_count, sparse_mode,
):  # fmt: skip
    _dense(query, key, weights)
    require((layout_query, layout_key, sparse_mode) == ("TND", "PA_BSND", 0), "pages, no mask")
    rows, heads, width = query.shape
    _, page, one, same = key.shape
    require(width == same == 128 and heads <= 64 and one == 1, "up to 64 heads of 128")
    require(query.dtype == key.dtype == weights.dtype in HALVES, f"dtype {weights.dtype}")
    require(weights.shape == (rows, heads), "a weight for each query")
    require(page % 16 == 0 and page <= 1024, f"block size {page}")
    kept = sparse_count <= 2048 or sparse_count in range(3072, 8193, 1024)
    require(sparse_count >= 1 and kept, f"sparse_count {sparse_count}")
    for t in (actual_seq_lengths_query, actual_seq_lengths_key, block_table):
        require(t.dtype == torch.int32, "int32")
    ends = actual_seq_lengths_query.tolist()
    require(len(ends) == len(actual_seq_lengths_key) == len(block_table), "of each sequence")
    require(ends == sorted(ends) and ends[-1] == rows, "sums of the sequences' queries")
    out = torch.full((rows, 1, sparse_count), -1, dtype=torch.int32)
    for i, length in enumerate(actual_seq_lengths_key.tolist()):
        keys = rows_of(key[:, :, 0], block_table[i], length).float()
        for row in range(ends[i - 1] if i else 0, ends[i]):
            scores = torch.relu(query[row].float() @ keys.T) * weights[row].float().unsqueeze(1)
            best = scores.sum(0).topk(min(sparse_count, length)).indices
            out[row, 0, : len(best)] = best
    return out, torch.empty(0, dtype=query.dtype)


def npu_mla_prolog_v3(
    token_x, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr, rmsnorm_gamma_cq,
    rmsnorm_gamma_ckv, rope_sin, rope_cos, kv_cache, kr_cache, cache_index, rmsnorm_epsilon_cq,
    rmsnorm_epsilon_ckv, cache_mode, query_norm_flag,
):  # fmt: skip
    (tokens, hidden), (heads, nope, latent) = token_x.shape, weight_uk.shape
    inner, rope = weight_dq.shape[1], rope_sin.shape[1]
    require(hidden in (6144, 7168, 7680) and inner == 1536, f"He {hidden}, Hcq {inner}")
    require(heads in (1, 2, 4, 8, 16, 32, 64, 128), f"N {heads}")
    require((nope, latent, rope) == (128, 512, 64), "D 128, Hckv 512, Dr 64")
    shapes = weight_uq_qr.shape, weight_dkv_kr.shape
    require(shapes == ((inner, heads * 192), (hidden, 576)), "the weights' shapes")
    for weight in (weight_dq, weight_uq_qr, weight_dkv_kr):
        _fractal(weight)
    every = token_x, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr, rope_sin, rope_cos
    every = *every, rmsnorm_gamma_cq, rmsnorm_gamma_ckv, kv_cache, kr_cache
    require(all(t.dtype == torch.bfloat16 for t in every), "bfloat16")
    _dense(token_x, weight_uk, rope_sin, rope_cos, kv_cache, kr_cache, cache_index)
    blocks, size = kv_cache.shape[:2]
    require(cache_mode == "PA_BSND" and size in (16, 128), f"block size {size}")
    shapes = kv_cache.shape, kr_cache.shape
    require(shapes == ((blocks, size, 1, 512), (blocks, size, 1, 64)), "both caches")
    require(cache_index.dtype == torch.int64 and cache_index.shape == (tokens,), "int64 [T]")
    require(bool(((cache_index >= 0) & (cache_index < blocks * size)).all()), "an index outside")
    x = token_x.float()
    normed = npu_rms_norm((x @ weight_dq.float()).bfloat16(), rmsnorm_gamma_cq, rmsnorm_epsilon_cq)
    q = (normed[0].float() @ weight_uq_qr.float()).view(tokens, heads, 192)
    query = torch.einsum("thd,hdl->thl", q[..., :128], weight_uk.float()).bfloat16()
    sin, cos = rope_sin.float(), rope_cos.float()
    both = (x @ weight_dkv_kr.float()).bfloat16()
    kv = npu_rms_norm(both[:, :512].contiguous(), rmsnorm_gamma_ckv, rmsnorm_epsilon_ckv)[0]
    kv_cache.view(-1, 512)[cache_index] = kv
    kr_cache.view(-1, 64)[cache_index] = _halved(both[:, 512:].float(), sin, cos).bfloat16()
    q_rope = _halved(q[..., 128:], sin.unsqueeze(1), cos.unsqueeze(1)).bfloat16()
    normed = normed[0] if query_norm_flag else torch.zeros(1, dtype=torch.bfloat16)
    return query, q_rope, torch.zeros(1), normed, torch.zeros(1)


def _halved(x, sin, cos):
    """Pairs rotated, given as halves: sines and cosines are halves twice."""
    apart = torch.cat((x[..., ::2], x[..., 1::2]), -1)
    first, second = apart.chunk(2, -1)
    return apart * cos + torch.cat((-second, first), -1) * sin


def npu_attention_update(lse, local_out, update_type):
    require(update_type == 1, "lse_out is given where update_type is 1")
    require(all(s.dtype == torch.float32 and s.dim() == 1 for s in lse), "float32 [rows]")
    require(all(o.shape[0] == lse[0].shape[0] for o in local_out), "[rows, head dim]")
    sums = torch.stack(list(lse))
    total = sums.logsumexp(0)
    shares = (sums - total).exp().unsqueeze(-1)
    out = (torch.stack([o.float() for o in local_out]) * shares).sum(0)
    return out.to(local_out[0].dtype), total


def npu_transpose_batchmatmul(input, weight, perm_x1, perm_y):
    turned = list(perm_x1) == [1, 0, 2]
    require(turned or list(perm_x1) == [0, 1, 2], f"perm_x1 {perm_x1}")
    require(list(perm_y) == [1, 0, 2], "only [1, 0, 2] for the result")
    _dense(input, weight)
    if turned:
        require(0 < input.shape[1] * input.shape[2] < 65536, "K · B below 65536")
        input = input.transpose(0, 1)
    require(input.shape[0] == weight.shape[0] and input.shape[2] == weight.shape[1], "B and K")
    require(input.dtype == weight.dtype and weight.shape[1] % 16 == 0, "K in 16s")
    require(weight.shape[2] % 16 == 0, "N in 16s")
    return torch.einsum("btk,bkn->tbn", input.float(), weight.float()).to(input.dtype)


def npu_scatter_nd_update_(self, indices, updates):
    _dense(self, indices, updates)
    require(indices.shape == (updates.shape[0], 1) and indices.dtype == torch.int64, "[n, 1]")
    require(updates.dtype == self.dtype, f"dtype {updates.dtype}")
    require(bool(((indices >= 0) & (indices < len(self))).all()), "an index outside")
    self[indices[:, 0]] = updates
    return self


# ---- experts ----


def npu_moe_gating_top_k(
    x, k, bias, k_group, group_count, group_select_mode, norm_type, routed_scaling_factor, eps
):
    experts = x.shape[1]
    require(x.dim() == 2 and experts <= 2048, "at most 2048 experts")
    require(bias is None or (bias.dtype == x.dtype and bias.shape == (experts,)), "bias")
    require(experts % group_count == 0 and experts // group_count > 2, "groups of three at least")
    require(-(-experts // group_count // 32) * 32 * group_count <= 2048, "groups")
    require(1 <= k_group <= group_count and k_group * experts // group_count >= k, "k_group")
    scores = x.float().sigmoid() if norm_type == 1 else x.float().softmax(-1)
    choice = scores if bias is None else scores + bias
    parts = choice.view(len(x), group_count, -1)
    best = parts.topk(2 if group_select_mode == 1 else 1, -1).values.sum(-1)
    open_ = torch.zeros_like(best).scatter_(1, best.topk(k_group).indices, 1).bool()
    ids = parts.masked_fill(~open_.unsqueeze(-1), float("-inf")).flatten(1).topk(k).indices
    weights = scores.gather(1, ids)
    if norm_type == 1:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return weights.to(x.dtype) * routed_scaling_factor, ids.int(), torch.empty(0)


def npu_moe_init_routing_v2(
    x, expert_idx, active_num, expert_num, expert_tokens_num_type, expert_tokens_num_flag,
    quant_mode, active_expert_range, row_idx_type,
):  # fmt: skip
    require(expert_idx.dtype == torch.int32 and active_num == expert_idx.numel(), "int32 [T, K]")
    require(expert_tokens_num_type == 1 and expert_tokens_num_flag, "counts")
    require(list(active_expert_range) == [0, expert_num] and row_idx_type == 0, "all experts")
    flat = expert_idx.flatten().long()
    order = torch.sort(flat, stable=True).indices
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    sorted_x = x[order // expert_idx.shape[1]]
    counts = torch.bincount(flat, minlength=expert_num)
    scale = torch.empty(0)
    if quant_mode == 1:
        sorted_x, scale = npu_dynamic_quant(sorted_x)
    else:
        require(quant_mode == -1, f"quant_mode {quant_mode}")
    return sorted_x, rows.int(), counts, scale


def npu_grouped_matmul(
    x, weight, scale, per_token_scale, group_list, split_item, group_type, group_list_type,
    output_dtype,
):  # fmt: skip
    (rows,), (w,) = x, weight
    require((split_item, group_type, group_list_type) == (2, 0, 1), "one output, by counts")
    require(group_list.dtype == torch.int64 and group_list.shape == (w.shape[0],), "counts")
    require(int(group_list.sum()) == len(rows) and rows.shape[1] == w.shape[1], "all rows")
    _dense(rows)
    _fractal(w)
    require(rows.dtype == w.dtype, f"{rows.dtype} by {w.dtype}")
    owner = torch.repeat_interleave(torch.arange(w.shape[0]), group_list)
    out = torch.empty(len(rows), w.shape[2])
    for e in owner.unique().tolist():
        at = owner == e
        out[at] = rows[at].float() @ w[e].float()
    if rows.dtype != torch.int8:
        require(scale is per_token_scale is output_dtype is None, "no scales")
        return [out.to(rows.dtype)]
    require(scale[0].shape == (w.shape[0], w.shape[2]), "a scale per expert and column")
    require(per_token_scale[0].dtype == torch.float32, "float32 scales of rows")
    kinds = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}
    wanted = kinds.get(output_dtype)
    require(scale[0].dtype == wanted, f"{output_dtype} of {scale[0].dtype} scales")
    out = out * scale[0].float()[owner] * per_token_scale[0].unsqueeze(1)
    return [out.to(output_dtype)]


def npu_moe_finalize_routing(
    expanded_permuted_rows, skip1, skip2, bias, scales, expanded_src_to_dst_row,
    export_for_source_row, drop_pad_mode,
):  # fmt: skip
    require(skip1 is skip2 is bias is export_for_source_row is None, "sums alone")
    require(drop_pad_mode == 2, "0 wants rows column by column")
    require(scales.dtype == expanded_permuted_rows.dtype, "scales in the rows' dtype")
    require(expanded_src_to_dst_row.dtype == torch.int32, "int32")
    rows = expanded_permuted_rows.float()[expanded_src_to_dst_row.long()]
    rows = rows.view(*scales.shape, -1)
    return (rows * scales.float().unsqueeze(-1)).sum(1).to(expanded_permuted_rows.dtype)


# ---- matmuls, norms ----


def npu_dynamic_quant(input):
    require(input.dtype in HALVES and input.is_contiguous(), f"dtype {input.dtype}")
    scale = input.float().abs().amax(-1) / 127
    safe = torch.where(scale == 0, 1.0, scale)
    codes = (input.float() / safe.unsqueeze(-1)).nan_to_num().round().to(torch.int8)
    return codes, scale


def npu_quant_matmul(x1, x2, scale, pertoken_scale, output_dtype):
    _dense(x1)
    _fractal(x2)
    require(x1.dtype == x2.dtype == torch.int8 and x1.shape[1] == x2.shape[0], "int8 by int8")
    require(max(x1.shape[1], x2.shape[1]) <= 65535, "at most 65535 columns")
    require(scale.shape == (x2.shape[1],) and scale.dtype == torch.float32, "scales")
    require(pertoken_scale.shape == (len(x1),) and output_dtype in HALVES, "per token")
    product = x1.double() @ x2.double()
    return (product * scale * pertoken_scale.unsqueeze(1)).to(output_dtype)


def npu_rms_norm(self, gamma, epsilon):
    _dense(self)
    require(self.dtype == gamma.dtype, "gamma in the dtype of x")
    x = self.float()
    scale = (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (x * scale * gamma.float()).to(self.dtype), scale


def npu_add_rms_norm(x1, x2, gamma, epsilon):
    total = x1 + x2
    return (*npu_rms_norm(total, gamma, epsilon), total)


def npu_rotary_mul(self, r1, r2, rotary_mode):
    require(rotary_mode == "interleave" and self.dim() == 4, rotary_mode)
    batch, tokens, heads, width = self.shape
    require(batch * heads < 1000 and width < 896, "B · N < 1000, D < 896")
    require(r1.shape == r2.shape == (1, tokens, 1, width), "1S1D")
    pairs = torch.stack((-self[..., 1::2], self[..., ::2]), -1).flatten(-2)
    return r1 * self + r2 * pairs


def npu_swiglu(self):
    _dense(self)
    gate, up = self.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(self.dtype)


MODULES = doubles(
    "torch_npu",
    *(f for name, f in list(globals().items()) if name.startswith(("npu_", "_npu_"))),
    torch_npu__npu={"is_current_stream_capturing": lambda: False},
)
ADAPTERS = ("ds_runtime_npu.library",)
