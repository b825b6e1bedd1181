"""FlashInfer: MLA decode and ragged prefill on Hopper; TensorRT-LLM's kernels on Blackwell.

Kernels are compiled, or their binaries fetched, when they first run.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_runtime.api import (
    Batch,
    ExpertSource,
    Facts,
    Limits,
    Packed,
    Segments,
    Weight,
    fp8_blocks,
    kept_in,
    mha_joined,
)
from ds_runtime_cuda.decode import LATENT, ROPE, Queries
from ds_runtime_cuda.expert_weights import stack_blocks
from ds_runtime_cuda.quant import quantise

_WORKSPACE = 128 << 20  # bytes, as the library advises
_LN2 = 0.6931471805599453
_SLOTS = 128  # of which a row has a multiple
_E4M3 = 448.0  # the largest value
_NOPE = 128  # DeepSeek's, by which the library tells its kernels apart


@cache
def _library(module: str = "flashinfer") -> Any:
    with contextlib.suppress(ImportError, AttributeError):  # other releases keep them elsewhere
        kept_in("flashinfer", import_module("flashinfer.jit.env").FLASHINFER_JIT_DIR, tells=False)
    return import_module(module)


@cache
def _workspace(device: torch.device) -> Tensor:
    """One for all calls of a device: they follow each other in one queue. Zeroed, as some want."""
    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)


@dataclass
class PlannedFlashInfer:
    """Step state: queries, the wrapper that owns the library's buffers, and its last copy."""

    queries: Queries
    wrapper: Any = None
    rows: int = -1
    copied: torch.Event | None = None


class MlaDecode:
    """Absorbed MLA decode through BatchMLAPagedAttentionWrapper, planned on the host."""

    def __init__(self, facts: Facts) -> None:
        library = _library("flashinfer.mla")
        self._make = library.BatchMLAPagedAttentionWrapper
        self._metadata = library.MLAPlanMetadata.csr
        self._facts = facts
        self._dtype = getattr(torch, facts.dtype)

    def state(self, limits: Limits) -> PlannedFlashInfer:
        return PlannedFlashInfer(Queries.make(limits))

    def prepare(self, state: PlannedFlashInfer, batch: Batch) -> None:
        queries = state.queries
        queries.fill(batch)
        count, page = queries.count, self._facts.page_size
        if not count:
            return
        if state.copied is not None:
            state.copied.synchronize()  # the plan before lies in one host buffer with this one
        lens = np.array(queries.host_lens, np.int32)
        pages = -(-lens // page)
        starts = np.concatenate(([0], np.cumsum(pages))).astype(np.int32)
        width = queries.table.shape[1]
        inside = np.arange(starts[-1]) - np.repeat(starts[:-1], pages)
        places = np.repeat(np.arange(count) * width, pages) + inside
        device = queries.table.device
        indices = queries.table.view(-1)[torch.from_numpy(places).to(device, non_blocking=True)]
        if state.wrapper is None or state.rows != count:
            state.wrapper, state.rows = self._wrapper(queries, count), count
        state.wrapper.plan(
            metadata=self._metadata(
                torch.arange(count + 1, dtype=torch.int32),
                torch.from_numpy(starts),
                indices,
                torch.from_numpy(lens),
            ),
            num_heads=self._facts.dims["heads"],
            head_dim_ckv=LATENT,
            head_dim_kpe=ROPE,
            page_size=page,
            causal=False,
            sm_scale=self._facts_scale(),
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            query_layout="split",
            kv_cache_layout="split",
        )
        if device.type != "cpu":
            state.copied = torch.Event(device)
            state.copied.record()

    def _facts_scale(self) -> float:
        """The library takes the softmax scale when it plans; `run` corrects q by the quotient."""
        return float((self._facts.dims["qk_nope"] + ROPE) ** -0.5)

    def _wrapper(self, queries: Queries, count: int) -> Any:
        device = queries.table.device
        backend = "fa3" if self._facts.device.arch == "sm90" else "fa2"
        if not self._facts.graph_capture:
            return self._make(_workspace(device), backend=backend)
        lens = queries.lens  # of the buffers: int32, on the device
        return self._make(
            _workspace(device),
            use_cuda_graph=True,
            qo_indptr=lens.new_empty(count + 1),
            kv_indptr=lens.new_empty(count + 1),
            kv_indices=lens.new_empty(count * queries.table.shape[1]),
            kv_len_arr=lens.new_empty(count),
            backend=backend,
        )

    def run(self, state: PlannedFlashInfer, q: Tensor, cache: Tensor, scale: float) -> Tensor:
        count, heads, _ = q.shape
        if not count:
            return q.new_empty(0, heads, LATENT)
        planned = self._facts_scale()
        if abs(scale / planned - 1) > 1e-6:
            q = q * (scale / planned)
        return state.wrapper.run(  # type: ignore[no-any-return]
            query=(q[..., :LATENT].contiguous(), q[..., LATENT:].contiguous()),
            kv_cache=(cache[..., :LATENT], cache[..., LATENT : LATENT + ROPE]),
        )


class MlaDecodeTrtllm:
    """Absorbed MLA decode with TensorRT-LLM's generated kernels, on compute capability 10."""

    def __init__(self, facts: Facts) -> None:
        self._attend = _library("flashinfer.mla").trtllm_batch_decode_with_kv_cache_mla
        self._nope = facts.dims["qk_nope"]
        self._page = facts.page_size

    def state(self, limits: Limits) -> Queries:
        return Queries.make(limits)

    def prepare(self, state: Queries, batch: Batch) -> None:
        state.fill(batch)

    def run(self, state: Queries, q: Tensor, cache: Tensor, scale: float) -> Tensor:
        count, heads, _ = q.shape
        if not count:
            return q.new_empty(0, heads, LATENT)
        return self._run(state, q.contiguous(), cache, scale).view(count, heads, LATENT)

    def _run(self, state: Queries, q: Tensor, cache: Tensor, scale: float | Tensor) -> Tensor:
        """scale: of q·k; a float32 tensor of one where queries have one of their own."""
        count = q.shape[0]
        out: Tensor = self._attend(
            query=q.unsqueeze(1),  # [rows, 1, heads, 576]
            kv_cache=cache,
            workspace_buffer=_workspace(q.device),
            qk_nope_head_dim=self._nope,
            kv_lora_rank=LATENT,
            qk_rope_head_dim=ROPE,
            block_tables=state.table[:count],
            seq_lens=state.lens[:count],
            max_seq_len=state.table.shape[1] * self._page,
            bmm1_scale=scale,
            bmm2_scale=1.0,
        )
        return out


class MlaDecodeTrtllmFp8(MlaDecodeTrtllm):
    """The same over a cache of e4m3: queries are e4m3, too, under one scale for all of them."""

    def _run(self, state: Queries, q: Tensor, cache: Tensor, scale: float | Tensor) -> Tensor:
        most = q.abs().amax().to(torch.float32).nan_to_num(1.0).clamp(min=1e-20)
        size = (most / _E4M3).view(1)
        rounded = (q / size).to(torch.float8_e4m3fn)
        return super()._run(state, rounded, cache, size * scale).to(q.dtype)


def sparse_mla(q: Tensor, cache: Tensor, slots: Tensor, kv_lora: int, scale: float) -> Tensor:
    """SparseMla with TensorRT-LLM's generated kernels: a sequence per row, of its slots alone."""
    rows, heads, _ = q.shape
    if not rows:
        return q.new_empty(0, heads, kv_lora)
    slots = torch.nn.functional.pad(slots, (0, -slots.shape[1] % _SLOTS), value=-1)
    chosen = slots.sort(dim=-1, descending=True).values  # those that are none come last
    counts = (chosen >= 0).sum(-1, dtype=torch.int32)
    out: Tensor = _library("flashinfer.mla").trtllm_batch_decode_with_kv_cache_mla(
        query=q.contiguous().unsqueeze(1),  # [rows, 1, heads, 576]
        kv_cache=cache,
        workspace_buffer=_workspace(q.device),
        qk_nope_head_dim=_NOPE,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        block_tables=chosen.unsqueeze(1),
        seq_lens=counts.clamp(min=1),
        max_seq_len=chosen.shape[1],
        sparse_mla_top_k=chosen.shape[1],
        bmm1_scale=scale,
        bmm2_scale=1.0,
    )
    return out.view(rows, heads, kv_lora).masked_fill((counts == 0)[:, None, None], 0.0)


def index_topk(
    scores: Tensor, lens: Tensor, owners: Tensor, page_table: Tensor, page_size: int, k: int
) -> Tensor:
    """IndexTopk in one launch, of equal scores those that come first."""
    if not scores.shape[0]:
        return lens.new_empty(0, k)
    out: Tensor = _library().top_k_page_table_transform(
        scores,
        page_table,
        lens,
        k,
        row_to_batch=owners,
        tie_break=int(_library().TopKTieBreak.SMALL),
        dsa_graph_safe=True,
        page_size=page_size,
    )
    return out


def mha_prefill(
    q: Tensor,
    q_rope: Tensor,
    k: Tensor,
    k_rope: Tensor,
    v: Tensor,
    q_segs: Segments,
    k_segs: Segments,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """MhaPrefill through BatchPrefillWithRaggedKVCacheWrapper, planned on the host per call."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        _, heads, width = q.shape
        wrapper = _library().BatchPrefillWithRaggedKVCacheWrapper(_workspace(q.device), "NHD")
        wrapper.plan(
            _sums(q_segs),
            _sums(k_segs),
            heads,
            heads,
            width,
            v.shape[2],
            causal=causal,
            sm_scale=scale,
            q_data_type=q.dtype,
        )
        out, lse = wrapper.run(q, k, v.contiguous(), return_lse=True)
        return out, lse * _LN2

    return mha_joined(attend, q, q_rope, k, k_rope, v)


def _sums(segs: Segments) -> Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(segs.lens))).astype(np.int32))


class LinearGroupwise:
    """y = x · Wᵀ in FP8 on compute capability 10, with the checkpoint's float32 scales."""

    tag = "cuda.flashinfer_linear"

    def __init__(self, facts: Facts) -> None:
        self._gemm = _library("flashinfer.gemm").gemm_fp8_nt_groupwise

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        joined = fp8_blocks.join(weight)
        if joined is None:
            return fp8_blocks.dense(weight, self.tag)
        values, scale = joined
        tensors = {"weight": values, "scale": scale, "scale_t": scale.T.contiguous()}
        nbytes = values.nbytes + 2 * scale.nbytes
        return Packed(self.tag, weight.shape, tensors, nbytes, fp8_blocks.restore)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        tokens = x.shape[0]
        if "dense" in packed.tensors:
            return torch.nn.functional.linear(x, packed.tensors["dense"])
        if not tokens:
            return x.new_empty(0, packed.shape[0])
        q, scale = quantise(x, rows=-(-tokens // 4) * 4)  # the kernel wants fours of rows
        out: Tensor = self._gemm(
            q,
            packed.tensors["weight"],
            scale.T,  # [groups, rows]
            packed.tensors["scale_t"],  # [column blocks, row blocks]
            scale_major_mode="MN",
            out_dtype=torch.bfloat16,
        )
        return out[:tokens]


class ExpertsTrtllm:
    """Routed experts with TensorRT-LLM's fused FP8 kernels, on compute capability 10."""

    tag = "cuda.flashinfer_trtllm_experts"

    def __init__(self, facts: Facts) -> None:
        self._moe = _library("flashinfer.fused_moe").trtllm_fp8_block_scale_routed_moe

    def pack(self, source: ExpertSource, facts: Facts) -> Packed:
        tensors, nbytes = stack_blocks(source, _EXPERT_PARTS, up_first=True)
        shape = (source.num_experts, source.hidden, source.intermediate)
        return Packed(self.tag, shape, tensors, nbytes, restore=_restore_gate_up)

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        if not x.shape[0]:
            return torch.empty_like(x)
        held, (experts, _, inter) = packed.tensors, packed.shape
        q, scale = quantise(x)
        out = self._moe(
            topk_ids=(ids, weights.to(torch.bfloat16)),
            routing_bias=None,
            hidden_states=q,
            hidden_states_scale=scale.T.contiguous(),  # [groups, tokens]
            gemm1_weights=held["up_gate"],
            gemm1_weights_scale=held["up_gate_scale"],
            gemm2_weights=held["down"],
            gemm2_weights_scale=held["down_scale"],
            num_experts=experts,
            top_k=ids.shape[1],
            n_group=None,
            topk_group=None,
            intermediate_size=inter,
            local_expert_offset=0,
            local_num_experts=experts,
            routed_scaling_factor=None,
        )
        result: Tensor = out[0] if isinstance(out, list) else out
        return result


_EXPERT_PARTS = ("up_gate", "up_gate_scale", "down", "down_scale")


def _restore_gate_up(packed: Packed) -> Tensor:
    """Gate first again."""
    both = fp8_blocks.spread(packed.tensors["up_gate"], packed.tensors["up_gate_scale"])
    up, gate = both.chunk(2, dim=1)
    return torch.cat((gate, up), dim=1)
