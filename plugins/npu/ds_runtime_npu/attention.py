"""Fused-infer attention: paged MLA decode, prefill, and attention over chosen slots.

Source of the calls: torch-npu's op schemas and _op_plugin_docs.py. In decode a head's query is its
absorbed latent part with the rotated part next to it, and keys are the latents themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ds_runtime.api import Batch, Facts, Limits, Packed, Segments, Weight, rows_of, torch_dtype
from ds_runtime_npu.cache import halves, paged
from ds_runtime_npu.library import npu
from ds_runtime_npu.tasks import TaskGraphs, capturing

LATENT, ROPE = 512, 64  # what the ops are made for
_WIDEST_TURNED = 65535  # heads · values of a row that npu_transpose_batchmatmul turns itself
_MASK = 2048  # width of the causal mask that the op cuts its own from


def _padded(q: Tensor) -> Tensor:
    """[rows, heads, n] with heads of zeros up to a power of two."""
    missing = (1 << (q.shape[1] - 1).bit_length()) - q.shape[1]
    return torch.nn.functional.pad(q, (0, 0, 0, missing)) if missing else q


@dataclass
class State:
    """Of a step: a row of pages per query [rows, pages] int32, and how many tokens each sees."""

    table: Tensor
    lens: tuple[int, ...] = ()


class MlaDecode:
    """npu_fused_infer_attention_score over pages. Lengths are host lists: a captured one is a task
    that is updated at each replay.
    """

    def __init__(self, facts: Facts) -> None:
        self._page = facts.page_size

    def state(self, limits: Limits) -> State:
        rows = limits.max_sequences * limits.max_queries
        shape = rows, limits.max_pages_per_sequence
        return State(torch.zeros(shape, dtype=torch.int32, device=limits.device))

    def prepare(self, state: State, batch: Batch) -> None:
        part, state.lens = batch.decode, ()
        if part is None or not part.size:
            return
        owners, state.lens = zip(*rows_of(part), strict=True)
        table = part.page_table
        if part.q_lens:
            table = table[torch.tensor(owners).to(table.device, non_blocking=True)]
        state.table[: len(owners), : table.shape[1]].copy_(table)

    def run(self, state: State, q: Tensor, cache: Tensor, scale: float) -> Tensor:
        """See MlaDecode. What a captured call returns is overwritten by the next captured one."""
        count, heads, _ = q.shape
        if not count:
            return q.new_empty(0, heads, LATENT)
        q = _padded(q)
        latent, rope = paged(cache, ROPE)
        query, query_rope = q[..., :LATENT].unsqueeze(1), halves(q[..., LATENT:]).unsqueeze(1)
        same: dict[str, Any] = {
            "key_rope": rope,
            "block_table": state.table[:count],
            "block_size": self._page,
            "num_heads": q.shape[1],
            "num_key_value_heads": 1,
            "input_layout": "BSND",  # [rows, 1, heads, latent]
            "scale": scale,
        }
        graphs = capturing()
        if graphs is not None:
            out = _captured(graphs, state, query, query_rope, latent, same)
        elif npu().npu.is_current_stream_capturing():
            raise RuntimeError(
                "npu.MlaDecode takes lengths from the host: only the graphs of the platform npu "
                "tell a captured one those of the next step"
            )
        else:
            out, _ = npu().npu_fused_infer_attention_score(
                query.contiguous(),
                latent,
                latent,
                query_rope=query_rope,
                actual_seq_lengths_kv=list(state.lens),
                **same,
            )
        result: Tensor = out[:, 0, :heads]
        return result


def _captured(
    graphs: TaskGraphs,
    state: State,
    query: Tensor,
    query_rope: Tensor,
    latent: Tensor,
    same: dict[str, Any],
) -> Tensor:
    """The op as a task whose lengths are those of `state` at each replay: [rows, 1, heads, latent].

    All that it reads and writes lies where it does in every graph.
    """
    q, q_rope = graphs.scratch("query", query), graphs.scratch("query_rope", query_rope)
    q.copy_(query)
    q_rope.copy_(query_rope)
    out, lse = graphs.scratch("out", query), graphs.scratch("lse", query.new_empty(1))
    needed = npu()._npu_fused_infer_attention_score_get_max_workspace(
        q, latent, latent, query_rope=q_rope, actual_seq_lengths_kv=list(state.lens), **same
    )
    workspace = graphs.largest("workspace", needed)
    graphs.add(
        lambda: npu().npu_fused_infer_attention_score.out(
            q,
            latent,
            latent,
            query_rope=q_rope,
            actual_seq_lengths_kv=list(state.lens),
            workspace=workspace,
            out=[out, lse],
            **same,
        )
    )
    return out


def sparse_mla(q: Tensor, cache: Tensor, slots: Tensor, kv_lora: int, scale: float) -> Tensor:
    """SparseMla with npu_sparse_flash_attention: the whole cache is one sequence, whose tokens are
    slots.
    """
    rows, heads, _ = q.shape
    if not rows:
        return q.new_empty(0, heads, kv_lora)
    q = _padded(q)
    latent, rope = paged(cache, ROPE)
    pages, page, _ = latent.shape
    chosen = slots.sort(1, descending=True).values  # those that are tokens first
    # Filled there: a capture takes no copies from the host.
    lengths = slots.new_full((1,), rows), slots.new_full((1,), pages * page)
    out = npu().npu_sparse_flash_attention(
        q[..., :LATENT].contiguous(),
        latent.unsqueeze(2),
        latent.unsqueeze(2),
        chosen.unsqueeze(1).contiguous(),
        scale,
        block_table=torch.arange(pages, dtype=torch.int32, device=q.device).unsqueeze(0),
        actual_seq_lengths_query=lengths[0],
        actual_seq_lengths_kv=lengths[1],
        query_rope=halves(q[..., LATENT:]),
        key_rope=rope.unsqueeze(2),
        layout_query="TND",
        layout_kv="PA_BSND",
        sparse_mode=0,
        attention_mode=2,
    )[0]
    return out[:, :heads].masked_fill((chosen[:, :1] < 0).unsqueeze(-1), 0.0)  # type: ignore[no-any-return]


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
    """MhaPrefill with npu_fused_infer_attention_score over packed tokens."""
    heads = q.shape[1]
    out = q.new_zeros(q.shape[0], heads, v.shape[2])
    lse = q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
    kept = [bool(a and b) for a, b in zip(q_segs.lens, k_segs.lens, strict=True)]
    if not any(kept):
        return out, lse
    rows = None if all(kept) else _rows(q_segs.lens, kept, q.device)
    keys = None if all(kept) else _rows(k_segs.lens, kept, q.device)
    q, q_rope = (x if rows is None else x[rows] for x in (q, q_rope))
    k, k_rope, v = (x if keys is None else x[keys] for x in (k, k_rope, v))
    lens_q = [n for n, keep in zip(q_segs.lens, kept, strict=True) if keep]
    lens_k = [n for n, keep in zip(k_segs.lens, kept, strict=True) if keep]
    mask: dict[str, Any] = {"sparse_mode": 3, "atten_mask": _mask(q.device)} if causal else {}
    found, sums = npu().npu_fused_infer_attention_score(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        query_rope=q_rope.contiguous(),
        key_rope=k_rope.unsqueeze(1).expand(-1, heads, -1).contiguous(),
        actual_seq_lengths=list(accumulate(lens_q)),
        actual_seq_lengths_kv=list(accumulate(lens_k)),
        num_heads=heads,
        num_key_value_heads=heads,
        input_layout="TND",
        scale=scale,
        softmax_lse_flag=True,
        **mask,
    )
    sums = sums.squeeze(-1)  # [tokens, heads, 1]
    if causal and any(a > b for a, b in zip(lens_q, lens_k, strict=True)):
        blind = torch.tensor(_blind(lens_q, lens_k), device=q.device)
        found = found.masked_fill(blind[:, None, None], 0.0)
        sums = sums.masked_fill(blind[:, None], float("-inf"))
    if rows is None:
        return found, sums
    out[rows], lse[rows] = found, sums
    return out, lse


def _mask(device: torch.device) -> Tensor:
    """What a query may not see, in the one form that the op takes."""
    return torch.triu(torch.ones(_MASK, _MASK, dtype=torch.int8, device=device), 1)


def _rows(lens: tuple[int, ...], kept: list[bool], device: torch.device) -> Tensor:
    """Indices of the rows of the sequences that are kept."""
    ends = list(accumulate(lens))
    chosen = [range(e - n, e) for e, n, keep in zip(ends, lens, kept, strict=True) if keep]
    return torch.tensor([i for part in chosen for i in part], device=device)


def _blind(lens_q: list[int], lens_k: list[int]) -> list[bool]:
    """Of each query, whether it comes before its sequence's first key."""
    pairs = zip(lens_q, lens_k, strict=True)
    return [i + n_k - n_q < 0 for n_q, n_k in pairs for i in range(n_q)]


def merge_state(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """MergeState with npu_attention_update."""
    if not out_a.numel():
        return torch.empty_like(out_a), torch.empty_like(lse_a)
    width = out_a.shape[-1]
    out, lse = npu().npu_attention_update(
        [lse_a.reshape(-1), lse_b.reshape(-1)],
        [out_a.reshape(-1, width), out_b.reshape(-1, width)],
        1,
    )
    neither = (torch.maximum(lse_a, lse_b) == float("-inf")).view(lse_a.shape)
    merged = out.view(out_a.shape).to(out_a.dtype).masked_fill(neither.unsqueeze(-1), 0.0)
    return merged, lse.view(lse_a.shape).masked_fill(neither, float("-inf"))


class MlaAbsorb:
    """kv_b in its three uses: as one matrix, and per head for npu_transpose_batchmatmul."""

    tag = "npu.mla_absorb"

    def __init__(self, facts: Facts) -> None:
        self._dtype = torch_dtype(facts.dtype)

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        heads, nope, v = (facts.dims[name] for name in ("heads", "qk_nope", "v"))
        whole = weight.dequantise(self._dtype).contiguous()
        per_head = whole.view(heads, nope + v, -1)
        tensors = {
            "whole": whole,
            "key": per_head[:, :nope].contiguous(),  # [heads, nope, latent]
            "value": per_head[:, nope:].transpose(1, 2).contiguous(),  # [heads, latent, v]
        }
        nbytes = sum(t.nbytes for t in tensors.values())
        return Packed(self.tag, weight.shape, tensors, nbytes, restore=_restore)

    def expand(self, latent: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
        packed.expect(self.tag)
        heads, _, v = packed.tensors["value"].shape
        nope = packed.tensors["key"].shape[1]
        both = torch.nn.functional.linear(latent, packed.tensors["whole"])
        both = both.view(latent.shape[0], heads, nope + v)
        return both[..., :nope], both[..., nope:]

    def apply_q(self, q_nope: Tensor, q_rope: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        return torch.cat((_per_head(q_nope, packed.tensors["key"]), q_rope), -1)

    def apply_v(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        return _per_head(x, packed.tensors["value"])


def _per_head(x: Tensor, weight: Tensor) -> Tensor:
    """[T, heads, n] · [heads, n, m] → [T, heads, m]. Rows too wide for the op to turn are turned
    before it: its own order of them is a limit on heads · n alone.
    """
    if not x.shape[0]:
        return x.new_empty(0, weight.shape[0], weight.shape[2])
    order = [1, 0, 2]
    if x.shape[1] * x.shape[2] > _WIDEST_TURNED:
        x, order = x.transpose(0, 1), [0, 1, 2]
    out: Tensor = npu().npu_transpose_batchmatmul(
        x.contiguous(), weight, perm_x1=order, perm_y=[1, 0, 2]
    )
    return out


def _restore(packed: Packed) -> Tensor:
    whole: Tensor = packed.tensors["whole"]
    return whole.to(torch.float32)
