"""Attention: blocked prefill, absorbed decode (native, and as matmuls), and the weight kv_b."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_runtime.ops.batch import Batch, Limits, Segments
from ds_runtime.ops.spec import Facts
from ds_runtime.ops.weight import Packed, Weight
from ds_runtime_cpu.linear import compute_dtype, prepack, prepacked_linear
from ds_runtime_cpu.native import calls
from ds_runtime_cpu.packing import empty_packed, pack_into
from ds_runtime_cpu.small import CODE

_QUERIES = 128  # queries of one tile: scores of a tile stay in the second-level cache


def mha_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_segs: Segments,
    k_segs: Segments,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """MhaPrefill as batched matmuls over tiles of queries; keys after the diagonal are skipped."""
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
    """Page table and lengths of one step, at fixed addresses."""

    page_table: Tensor
    lens: Tensor
    host_lens: tuple[int, ...] = field(default=())


class _MlaDecode:
    """What both decode kernels share: the step state."""

    def __init__(self, facts: Facts) -> None:
        self.kv_lora = facts.dims["kv_lora"]

    def state(self, limits: Limits) -> DecodeState:
        shape = (limits.max_sequences, limits.max_pages_per_sequence)
        return DecodeState(
            torch.zeros(shape, dtype=torch.int32),
            torch.zeros(limits.max_sequences, dtype=torch.int32),
        )

    def prepare(self, state: DecodeState, batch: Batch) -> None:
        part = batch.decode
        state.host_lens = () if part is None else part.host_kv_lens
        if part is not None and part.size:
            table = part.page_table
            state.page_table[: table.shape[0], : table.shape[1]].copy_(table)
            state.lens[: part.size].copy_(part.kv_lens)


class MlaDecodeNative(_MlaDecode):
    """One call: rows are read in place through the page table, nothing is gathered."""

    def run(self, state: DecodeState, q: Tensor, cache: Tensor, scale: float) -> Tensor:
        if q.stride(2) != 1:
            q = q.contiguous()
        rows, heads, width = q.shape
        out = torch.empty(rows, heads, self.kv_lora, dtype=q.dtype)
        assert cache.is_contiguous() and cache.dtype == q.dtype and cache.shape[2] == width
        calls().mla_decode(
            CODE[q.dtype],
            q.data_ptr(),
            q.stride(0),
            q.stride(1),
            cache.data_ptr(),
            cache.shape[1],
            width,
            self.kv_lora,
            state.page_table.data_ptr(),
            state.page_table.stride(0),
            state.lens.data_ptr(),
            scale,
            out.data_ptr(),
            rows,
            heads,
        )
        return out


class MlaDecodeMatmul(_MlaDecode):
    """Per sequence: gather its pages, two matmuls around a float32 softmax."""

    def run(self, state: DecodeState, q: Tensor, cache: Tensor, scale: float) -> Tensor:
        out = torch.empty(q.shape[0], q.shape[1], self.kv_lora, dtype=q.dtype)
        page_size = cache.shape[1]
        for i, length in enumerate(state.host_lens):
            pages = state.page_table[i, : -(-length // page_size)]
            # Only rows of the sequence: the rest of its last page may hold NaN.
            keys = cache[pages].flatten(0, 1)[:length]  # [length, kv_lora + rope]
            scores = (q[i] @ keys.T).to(torch.float32) * scale  # [heads, length]
            out[i] = scores.softmax(-1).to(q.dtype) @ keys[:, : self.kv_lora]
        return out


class _MlaAbsorb:
    """What both kv_b kernels share: dims and the expansion by one matmul."""

    tag = ""

    def __init__(self, facts: Facts) -> None:
        self.dtype = compute_dtype(facts)
        dims = facts.dims
        self.heads, self.nope, self.v = dims["heads"], dims["qk_nope"], dims["v"]
        self.kv_lora = dims["kv_lora"]

    def _split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """W_UK [heads, nope, kv_lora] and W_UV [heads, v, kv_lora], views."""
        per_head = values.view(self.heads, self.nope + self.v, self.kv_lora)
        return per_head[:, : self.nope], per_head[:, self.nope :]

    def expand(self, latent: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
        packed.expect(self.tag)
        both = prepacked_linear(latent, packed.tensors["weight"])
        both = both.view(latent.shape[0], self.heads, self.nope + self.v)
        return both[..., : self.nope], both[..., self.nope :]


class MlaAbsorbNative(_MlaAbsorb):
    """Per-head matrices in the native packing for decode, oneDNN's for the expansion."""

    tag = "cpu.mla_absorb_native"

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        values = weight.dequantise(self.dtype)
        uk, uv = self._split(values)
        packed_uk = empty_packed(self.heads, self.kv_lora, self.nope, self.dtype)
        packed_uv = empty_packed(self.heads, self.v, self.kv_lora, self.dtype)
        for h in range(self.heads):
            pack_into(packed_uk[h], uk[h].T)  # [kv_lora, nope]
            pack_into(packed_uv[h], uv[h])
        tensors = {"weight": prepack(values), "uk": packed_uk, "uv": packed_uv}
        nbytes = values.nbytes + packed_uk.nbytes + packed_uv.nbytes
        return Packed(self.tag, weight.shape, tensors, nbytes, restore=_restore)

    def _heads(self, x: Tensor, weight: Tensor, n: int) -> Tensor:
        """[T, heads, k] per head times packed [heads][n, k] → [T, heads, n]."""
        if x.stride(2) != 1:
            x = x.contiguous()
        tokens, heads, k = x.shape
        out = torch.empty(tokens, heads, n, dtype=x.dtype)
        calls().linear_heads(
            CODE[x.dtype],
            x.data_ptr(),
            x.stride(0),
            x.stride(1),
            weight.data_ptr(),
            out.data_ptr(),
            heads * n,
            n,
            heads,
            tokens,
            n,
            k,
        )
        return out

    def apply_q(self, q_nope: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        return self._heads(q_nope, packed.tensors["uk"], self.kv_lora)

    def apply_v(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        return self._heads(x, packed.tensors["uv"], self.v)


class MlaAbsorbMatmul(_MlaAbsorb):
    """Per-head matrices contiguous for torch's batched matmul."""

    tag = "cpu.mla_absorb_matmul"

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        values = weight.dequantise(self.dtype)
        uk, uv = self._split(values)
        tensors = {
            "weight": prepack(values),
            "uk": uk.contiguous(),
            "uv": uv.transpose(1, 2).contiguous(),  # [heads, kv_lora, v]
        }
        return Packed(self.tag, weight.shape, tensors, 2 * values.nbytes, restore=_restore)

    def apply_q(self, q_nope: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        return torch.bmm(q_nope.transpose(0, 1), packed.tensors["uk"]).transpose(0, 1)

    def apply_v(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        return torch.bmm(x.transpose(0, 1), packed.tensors["uv"]).transpose(0, 1)


def _restore(packed: Packed) -> Tensor:
    values: Tensor = packed.tensors["weight"].to_dense()
    return values.to(torch.float32)


# The names that the plan shows.
mla_decode_native = MlaDecodeNative
mla_decode_matmul = MlaDecodeMatmul
mla_absorb_native = MlaAbsorbNative
mla_absorb_matmul = MlaAbsorbMatmul
