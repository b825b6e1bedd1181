"""Attention: blocked prefill, and absorbed decode, native and as matmuls."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_runtime.api import Batch, Facts, Limits, Segments, rows_of, seen_of, with_rope
from ds_runtime_cpu.native import active, calls
from ds_runtime_cpu.small import CODE

Ints = npt.NDArray[np.int32]
_QUERIES = 128  # queries of one tile: scores of a tile stay in the second-level cache


def mha_prefill_native(
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
    """MhaPrefill in one call."""
    q, k = with_rope(q, q_rope), with_rope(k, k_rope)
    (tokens, heads, d), dv = q.shape, v.shape[2]
    out = torch.empty(tokens, heads, dv, dtype=q.dtype)
    lse = torch.empty(tokens, heads, dtype=torch.float32)
    code = CODE[q.dtype]
    assert v.stride(2) == 1 or not tokens
    active.mha_prefill(
        code,
        *(q.data_ptr(), q.stride(0), q.stride(1)),
        *(k.data_ptr(), k.stride(0), k.stride(1)),
        *(v.data_ptr(), v.stride(0), v.stride(1)),
        q_segs.cu.data_ptr(),
        k_segs.cu.data_ptr(),
        causal,
        scale,
        out.data_ptr(),
        lse.data_ptr(),
        len(q_segs.lens),
        heads,
        d,
        dv,
    )
    return out, lse


def mha_prefill_matmul(
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
    """MhaPrefill as batched matmuls over tiles of queries; keys after the diagonal are skipped."""
    q, k = with_rope(q, q_rope), with_rope(k, k_rope)
    tokens, heads = q.shape[:2]
    out = torch.zeros(tokens, heads, v.shape[2], dtype=q.dtype)
    lse = torch.full((tokens, heads), float("-inf"))
    q0 = k0 = 0
    for queries, keys in zip(q_segs.lens, k_segs.lens, strict=True):
        if queries and keys:
            rows, cols = slice(q0, q0 + queries), slice(k0, k0 + keys)
            _sequence(q[rows], k[cols], v[cols], causal, scale, out[rows], lse[rows])
        q0, k0 = q0 + queries, k0 + keys
    return out, lse


def _sequence(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, out: Tensor, lse: Tensor
) -> None:
    """One sequence, into out [Tq, h, dv] and lse [Tq, h]."""
    queries, keys = q.shape[0], k.shape[0]
    past = keys - queries  # query j sees keys up to j + past
    heads_q, heads_v = q.transpose(0, 1), v.transpose(0, 1).contiguous()  # [h, T, d]
    heads_k = k.permute(1, 2, 0).contiguous()  # [h, d, Tk]
    first = max(0, -past) if causal else 0  # earlier queries see no key
    for start in range(first, queries, _QUERIES):
        end = min(queries, start + _QUERIES)
        seen = min(keys, end + past) if causal else keys
        scores = torch.bmm(heads_q[:, start:end], heads_k[:, :, :seen]).to(torch.float32)
        scores *= scale  # [h, tile, seen]
        if causal:
            hidden = torch.ones(end - start, seen, dtype=torch.bool).triu(start + past + 1)
            scores.masked_fill_(hidden, float("-inf"))
        sums = torch.logsumexp(scores, dim=-1, keepdim=True)
        weights = scores.sub_(sums).exp_().to(q.dtype)
        out[start:end] = torch.bmm(weights, heads_v[:, :seen]).transpose(0, 1)
        lse[start:end] = sums.squeeze(-1).T


@dataclass
class DecodeState:
    """One step: page table, lengths and first rows [sequences + 1] at fixed addresses.

    Written by numpy, from what the host knows: behind a step of streamed weights a copy by torch
    takes 50 us.
    """

    page_table: Ints
    lens: Ints
    starts: Ints
    page_size: int
    sequences: int = 0
    counting: bool = True  # starts is 0, 1, 2, ..: a row for each sequence
    tree: Tensor | None = None  # [rows] int64

    def __post_init__(self) -> None:
        held = self.page_table, self.lens, self.starts
        self.addresses = tuple(array.ctypes.data for array in held)


class MlaDecodeNative:
    """One call: keys are read in place through the page table, nothing is gathered. Up to 64 rows
    and heads of a sequence read each key together."""

    def __init__(self, facts: Facts) -> None:
        self.kv_lora = facts.dims["kv_lora"]
        self.width = self.kv_lora + facts.dims["qk_rope"]
        self.heads = facts.dims["heads"]
        self.dtype, self.kv_dtype = getattr(torch, facts.dtype), getattr(torch, facts.kv_dtype)
        self.codes = (CODE[self.dtype], CODE[self.kv_dtype])
        self.call = calls().mla_decode

    def state(self, limits: Limits) -> DecodeState:
        rows, pages = limits.max_sequences, limits.max_pages_per_sequence
        table, lens = np.zeros((rows, pages), np.int32), np.zeros(rows, np.int32)
        return DecodeState(table, lens, np.arange(rows + 1, dtype=np.int32), limits.page_size)

    def prepare(self, state: DecodeState, batch: Batch) -> None:
        part = batch.decode
        state.sequences = 0 if part is None else part.size
        state.tree = None if part is None else part.tree
        if part is None or not part.size:
            return
        table = part.page_table.numpy()
        most = max(part.host_kv_lens)
        assert most <= table.shape[1] * state.page_size, f"no page for all of {most} tokens"
        state.page_table[: table.shape[0], : table.shape[1]] = table
        state.lens[: part.size] = part.host_kv_lens
        if part.q_lens or not state.counting:
            state.counting = not part.q_lens
            rows = part.q_lens or (1,) * (len(state.starts) - 1)
            state.starts[: len(rows) + 1] = list(accumulate(rows, initial=0))

    def run(self, state: DecodeState, q: Tensor, cache: Tensor, scale: float) -> Tensor:
        if q.stride(2) != 1:
            q = q.contiguous()
        rows, heads, width = q.shape
        assert (heads, width) == (self.heads, self.width) and q.dtype == self.dtype
        assert cache.is_contiguous() and cache.dtype == self.kv_dtype and cache.shape[2] == width
        out = torch.empty(rows, heads, self.kv_lora, dtype=q.dtype)
        table, lens, starts = state.addresses
        self.call(
            *self.codes,
            q.data_ptr(),
            q.stride(0),
            q.stride(1),
            cache.data_ptr(),
            cache.shape[1],
            width,
            self.kv_lora,
            table,
            state.page_table.shape[1],
            lens,
            starts,
            scale,
            out.data_ptr(),
            state.sequences,
            heads,
            0 if state.tree is None else state.tree.data_ptr(),
            0,
            0,
        )
        return out


@dataclass
class MatmulState:
    """One step: a page table, and on the host (sequence, tokens that it sees) per row."""

    page_table: Tensor
    rows: tuple[tuple[int, int], ...] = ()
    tree: Tensor | None = None


class MlaDecodeMatmul:
    """Per row: gather the sequence's pages, two matmuls around a float32 softmax."""

    def __init__(self, facts: Facts) -> None:
        self.kv_lora = facts.dims["kv_lora"]

    def state(self, limits: Limits) -> MatmulState:
        shape = (limits.max_sequences, limits.max_pages_per_sequence)
        return MatmulState(torch.zeros(shape, dtype=torch.int32))

    def prepare(self, state: MatmulState, batch: Batch) -> None:
        state.rows = ()
        if (part := batch.decode) is not None:
            state.page_table[: part.size, : part.page_table.shape[1]].copy_(part.page_table)
            state.rows, state.tree = rows_of(part), part.tree

    def run(self, state: MatmulState, q: Tensor, cache: Tensor, scale: float) -> Tensor:
        out = torch.empty(q.shape[0], q.shape[1], self.kv_lora, dtype=q.dtype)
        for i, (sequence, length) in enumerate(state.rows):
            pages = state.page_table[sequence, : -(-length // cache.shape[1])]
            # Only rows of the sequence: the rest of its last page may hold NaN.
            keys = cache[pages].flatten(0, 1)[:length]  # [length, kv_lora + rope]
            scores = (q[i] @ keys.T).to(torch.float32) * scale  # [heads, length]
            if state.tree is not None:
                scores.masked_fill_(~seen_of(state.tree[i], length), float("-inf"))
            out[i] = scores.softmax(-1).to(q.dtype) @ keys[:, : self.kv_lora]
        return out


class MhaDecodeMatmul(MlaDecodeMatmul):
    """Per row: gather the sequence's pages, and per head two matmuls around a float32 softmax."""

    def __init__(self, facts: Facts) -> None:
        self.rope, self.v = facts.dims["qk_rope"], facts.dims["v"]

    def run(  # type: ignore[override]
        self, state: MatmulState, q: Tensor, q_rope: Tensor, cache: Tensor, scale: float
    ) -> Tensor:
        heads, nope = q.shape[1:]
        out = torch.empty(q.shape[0], heads, self.v, dtype=q.dtype)
        for i, (sequence, length) in enumerate(state.rows):
            pages = state.page_table[sequence, : -(-length // cache.shape[1])]
            rows = cache[pages].flatten(0, 1)[:length]
            each = rows[:, : -self.rope].view(length, heads, -1).transpose(0, 1)
            k, v = each.split_with_sizes((nope, self.v), 2)  # [heads, length, …]
            scores = torch.bmm(k, q[i].unsqueeze(2)).squeeze(2)  # [heads, length]
            scores = (scores + q_rope[i] @ rows[:, -self.rope :].T).to(torch.float32) * scale
            if state.tree is not None:
                scores.masked_fill_(~seen_of(state.tree[i], length), float("-inf"))
            weights = scores.softmax(-1).to(q.dtype)
            out[i] = torch.bmm(weights.unsqueeze(1), v).squeeze(1)
        return out


# The names that the plan shows.
mla_decode_native = MlaDecodeNative
mla_decode_matmul = MlaDecodeMatmul
mha_decode_matmul = MhaDecodeMatmul
