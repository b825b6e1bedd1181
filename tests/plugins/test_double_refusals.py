"""What stand-ins refuse: right arguments pass, and each with one of them broken is refused.

Without these, a stand-in that refuses nothing would let every plugin pass.
"""

from __future__ import annotations

import pytest
import torch
from vendor_doubles import RefusedError, aiter, cuda, torch_npu, xpu

BF16, I32, FP8 = torch.bfloat16, torch.int32, torch.float8_e4m3fn


def ints(*values):
    return torch.tensor(values, dtype=I32)


def zeros(*shape, dtype=BF16):
    return torch.zeros(shape, dtype=dtype)


def fractal(*shape, dtype=BF16):
    return torch_npu.npu_format_cast(zeros(*shape, dtype=dtype), torch_npu.NZ)


def npu_decode(heads=4, page=16, dtype=BF16):
    return {
        "query": zeros(2, 1, heads, 512, dtype=dtype),
        "key": zeros(3, page, 512, dtype=dtype),
        "value": zeros(3, page, 512, dtype=dtype),
        "query_rope": zeros(2, 1, heads, 64, dtype=dtype),
        "key_rope": zeros(3, page, 64, dtype=dtype),
        "block_table": ints([0, 1], [2, 0]),
        "block_size": page,
        "num_heads": heads,
        "num_key_value_heads": 1,
        "input_layout": "BSND",
        "scale": 1.0,
        "actual_seq_lengths_kv": [20, 5],
    }


def npu_sparse(heads=4, page=16):
    return {
        "query": zeros(2, heads, 512),
        "key": zeros(3, page, 1, 512),
        "value": zeros(3, page, 1, 512),
        "sparse_indices": ints([[3, 1, -1]], [[5, -1, -1]]),
        "scale_value": 1.0,
        "block_table": ints([0, 1, 2]),
        "actual_seq_lengths_query": ints(2),
        "actual_seq_lengths_kv": ints(3 * page),
        "query_rope": zeros(2, heads, 64),
        "key_rope": zeros(3, page, 1, 64),
        "layout_query": "TND",
        "layout_kv": "PA_BSND",
        "sparse_mode": 0,
        "attention_mode": 2,
    }


def npu_grouped(scale=BF16, out=BF16):
    return {
        "x": [zeros(5, 32, dtype=torch.int8)],
        "weight": [fractal(2, 32, 16, dtype=torch.int8)],
        "scale": [zeros(2, 16, dtype=scale)],
        "per_token_scale": [zeros(5, dtype=torch.float32)],
        "group_list": torch.tensor([2, 3]),
        "output_dtype": out,
        "split_item": 2,
        "group_type": 0,
        "group_list_type": 1,
    }


def npu_turned(heads=127, order=(1, 0, 2)):
    x = zeros(2, heads, 512) if order[0] else zeros(heads, 2, 512)
    weight = zeros(heads, 512, 16)
    return {"input": x, "weight": weight, "perm_x1": list(order), "perm_y": [1, 0, 2]}


def aiter_decode(heads=16, dtype=BF16):
    return {
        "q": zeros(2, heads, 576, dtype=dtype),
        "kv_buffer": zeros(32, 1, 1, 576, dtype=dtype),
        "o": zeros(2, heads, 512, dtype=dtype),
        "qo_indptr": ints(0, 1, 2),
        "kv_indptr": ints(0, 3, 5),
        "kv_indices": ints(1, 2, 3, 4, 5),
        "kv_last_page_lens": ints(1, 1),
        "max_seqlen_q": 1,
        "sm_scale": 1.0,
    }


def aiter_topk(groups=4):
    return {
        "gating_output": zeros(3, 32, dtype=torch.float32),
        "correction_bias": zeros(32, dtype=torch.float32),
        "topk_weights": zeros(3, 8, dtype=torch.float32),
        "topk_ids": zeros(3, 8, dtype=I32),
        "num_expert_group": groups,
        "topk_group": 2,
        "need_renorm": True,
        "routed_scaling_factor": 1.0,
    }


def vllm_scores(page=64):
    return {
        "q_fp8": zeros(2, 1, 64, 128, dtype=FP8),
        "kv_cache_fp8": zeros(3, page, 1, 132, dtype=torch.uint8),
        "weights": zeros(2, 64, dtype=torch.float32),
        "context_lens": ints(70, 3),
        "block_tables": ints([0, 1], [2, 0]),
        "schedule_metadata": None,
        "max_model_len": 128,
    }


def sgl_decode(page=64):
    return {
        "q_nope": zeros(2, 4, 512),
        "q_pe": zeros(2, 4, 64),
        "kv_c_and_k_pe_cache": zeros(3, page, 576),
        "seq_lens": ints(70, 3),
        "page_table": ints([0, 1], [2, 0]),
        "workspace": zeros(128, dtype=torch.uint8),
        "sm_scale": 1.0,
        "num_kv_splits": 1,
    }


def trtllm_decode(heads=128, page=64):
    return {
        "query": zeros(2, 1, heads, 576),
        "kv_cache": zeros(3, page, 576),
        "workspace_buffer": zeros(128, dtype=torch.uint8),
        "qk_nope_head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "block_tables": ints([0, 1], [2, 0]),
        "seq_lens": ints(40, 3),
        "max_seq_len": 128,
        "sparse_mla_top_k": 0,
        "bmm1_scale": 1.0,
        "bmm2_scale": 1.0,
    }


def deep_scores(heads=64):
    lens = ints([70], [3])
    return {
        "q": zeros(2, 1, heads, 128, dtype=FP8),
        "kv_cache": zeros(3, 64, 1, 132, dtype=torch.uint8),
        "weights": zeros(2, heads, dtype=torch.float32),
        "context_lens": lens,
        "block_table": ints([0, 1], [2, 0]),
        "schedule_meta": torch.full((4, 2), 73, dtype=I32),
        "max_context_len": 128,
    }


def deep_gemm(rows=8):
    scale = zeros(2, 8, dtype=torch.float32).T
    x, w = zeros(8, 256, dtype=FP8), zeros(rows, 256, dtype=FP8)
    return {
        "a": (x, scale),
        "b": (w, zeros(1, 2, dtype=torch.float32)),
        "d": zeros(8, rows),
    }


NPU, VLLM = torch_npu.MODULES["torch_npu"], xpu.MODULES["vllm_xpu_kernels._xpu_C"]
CALLS = (
    (NPU, "npu_fused_infer_attention_score", npu_decode),
    (NPU, "npu_sparse_flash_attention", npu_sparse),
    (NPU, "npu_grouped_matmul", npu_grouped),
    (NPU, "npu_transpose_batchmatmul", npu_turned),
    (aiter.MODULES["aiter.mla"], "mla_decode_fwd", aiter_decode),
    (aiter.MODULES["aiter"], "biased_grouped_topk", aiter_topk),
    (VLLM, "fp8_paged_mqa_logits", vllm_scores),
    (xpu.MODULES["sgl_kernel"], "flash_mla_decode", sgl_decode),
    (cuda.MODULES["flashinfer.mla"], "trtllm_batch_decode_with_kv_cache_mla", trtllm_decode),
    (cuda.MODULES["deep_gemm"], "fp8_paged_mqa_logits", deep_scores),
    (cuda.MODULES["deep_gemm"], "fp8_gemm_nt", deep_gemm),
)
MADE = {made.__name__: (getattr(module, name), made) for module, name, made in CALLS}
BROKEN = [  # call, what is broken in its right arguments, words of the refusal
    ("npu_decode", npu_decode(heads=12), "12 heads: a power of two up to 128"),
    ("npu_decode", npu_decode(page=24), "block_size 24"),
    ("npu_decode", npu_decode(dtype=torch.float32), "dtype torch.float32"),
    ("npu_decode", {"block_table": ints([0], [2])}, "as wide as the longest"),
    ("npu_sparse", npu_sparse(heads=3), "3 heads: a power of two"),
    ("npu_sparse", npu_sparse(page=8), "block size 8"),
    ("npu_sparse", {"attention_mode": 0}, "absorbed MLA"),
    ("npu_sparse", {"sparse_indices": ints([[-1, 3, 1]], [[5, -1, -1]])}, "valid ones first"),
    ("npu_grouped", npu_grouped(torch.float16, torch.float16), "float16 of torch.float16 scales"),
    ("npu_grouped", npu_grouped(torch.float32, BF16), "bfloat16 of torch.float32 scales"),
    ("npu_grouped", {"weight": [zeros(2, 32, 16, dtype=torch.int8)]}, "must be FRACTAL_NZ"),
    ("npu_grouped", {"group_list": torch.tensor([2, 2])}, "all rows"),
    ("npu_turned", npu_turned(heads=128), "K · B below 65536"),
    ("npu_turned", {"perm_y": [0, 1, 2]}, "for the result"),
    ("npu_turned", {"weight": zeros(127, 512, 8)}, "N in 16s"),
    ("aiter_decode", aiter_decode(heads=4), "cannot find suitable kernel for 4 heads"),
    ("aiter_decode", aiter_decode(dtype=torch.float16), "unsupport Q torch.float16"),
    ("aiter_decode", {"kv_buffer": zeros(4, 8, 1, 576)}, "page 1"),
    ("aiter_decode", {"kv_indices": torch.arange(5)}, "int32 metadata"),
    ("aiter_topk", aiter_topk(groups=16), "Unsupported num_expert_group: 16"),
    ("aiter_topk", {"correction_bias": zeros(32)}, "in the gate's dtype"),
    ("aiter_topk", {"topk_weights": zeros(3, 8)}, "types"),
    ("vllm_scores", vllm_scores(page=16), "pages of 64 keys"),
    ("vllm_scores", {"q_fp8": zeros(2, 1, 64, 128)}, "FP8 queries"),
    ("vllm_scores", {"context_lens": torch.tensor([70, 3])}, "int32 lengths"),
    ("sgl_decode", sgl_decode(page=8), "its sizes"),
    ("sgl_decode", {"page_table": ints([0], [2])}, "whole tiles"),
    ("sgl_decode", {"q_nope": zeros(2, 4, 512, dtype=torch.float16)}, "one dtype"),
    ("trtllm_decode", trtllm_decode(heads=96), "no heads between 64 and 128"),
    ("trtllm_decode", trtllm_decode(page=16), "pages of 32 or 64"),
    ("trtllm_decode", {"workspace_buffer": torch.ones(8)}, "zeroed before first use"),
    ("trtllm_decode", {"seq_lens": torch.tensor([40, 3])}, "int32"),
    ("deep_scores", deep_scores(heads=16), "32 or 64 heads"),
    ("deep_scores", {"schedule_meta": torch.zeros(4, 2, dtype=I32)}, "an old schedule"),
    ("deep_scores", {"kv_cache": zeros(3, 16, 1, 132, dtype=torch.uint8)}, "pages of 64"),
    ("deep_gemm", deep_gemm(rows=12), "rows of whole 16 bytes"),
    ("deep_gemm", {"d": zeros(8, 8, dtype=torch.float16)}, "bfloat16 out"),
    (
        "deep_gemm",
        {"a": (zeros(8, 256, dtype=FP8), zeros(8, 2, dtype=torch.float32))},
        "transposed, 16-byte columns",
    ),
]


@pytest.mark.parametrize("name", MADE)
def test_right_arguments_pass(name):
    call, made = MADE[name]
    call(**made())


def test_wider_rows_pass_where_they_are_turned_before():
    call, made = MADE["npu_turned"]
    assert call(**made(128, (0, 1, 2))).shape == (2, 128, 16)


@pytest.mark.parametrize(
    ("name", "broken", "words"), BROKEN, ids=[f"{b[0]}-{b[2]}" for b in BROKEN]
)
def test_a_broken_argument_is_refused(name, broken, words):
    call, made = MADE[name]
    with pytest.raises(RefusedError, match=words):
        call(**made() | broken)


def test_every_call_has_three_refusals_at_least():
    counts = {name: sum(b[0] == name for b in BROKEN) for name in MADE}
    assert min(counts.values()) >= 3, counts
