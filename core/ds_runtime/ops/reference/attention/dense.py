"""Torch references of attention: variable-length MHA, state merge, absorbed MLA and kv_b."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_runtime.ops.batch import TAIL, Batch, DecodePart, Limits, Segments
from ds_runtime.ops.contract import Facts
from ds_runtime.ops.dtypes import torch_dtype, wide
from ds_runtime.ops.reference.attention.cache import cache_write, gather_rows
from ds_runtime.ops.reference.attention.rope import rope
from ds_runtime.ops.reference.matrices.linear import quantize_group
from ds_runtime.ops.reference.norm import rms_norm
from ds_runtime.ops.weight import Packed, Weight

_SCORE_ELEMENTS = 1 << 24  # heads are taken in groups so that scores stay below this many


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """One sequence, heads first: q [h, Tq, d], k [h, Tk, d], v [h, Tk, dv] → out and lse, wide."""
    compute = wide(q.dtype)
    scores = q.to(compute) @ k.to(compute).transpose(1, 2) * scale  # [h, Tq, Tk]
    queries, keys = scores.shape[1:]
    if causal:
        seen = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        scores = scores.masked_fill(~seen, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)  # [h, Tq]
    # A query that sees no key has lse −inf; 0 in its place makes its weights exp(−inf) = 0.
    weights = torch.exp(scores - torch.where(lse == float("-inf"), 0.0, lse).unsqueeze(-1))
    return weights @ v.to(compute), lse


def with_rope(heads: Tensor, rope: Tensor) -> Tensor:
    """Returns [T, heads, d + r]: `heads` [T, heads, d], then `rope`, [T, heads, r] or for all heads
    [T, r].
    """
    tokens, count, width = heads.shape
    out = heads.new_empty(tokens, count, width + rope.shape[-1])
    out[..., :width] = heads  # two copies: torch.cat of strided parts takes three times on GPUs
    out[..., width:] = rope if rope.ndim == 3 else rope.unsqueeze(1)
    return out


def mha_joined(
    attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    q: Tensor,
    q_rope: Tensor,
    k: Tensor,
    k_rope: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns what MhaPrefill returns, by a library that takes joined heads.

    q, q_rope, k, k_rope and v are as in MhaPrefill. `attend` is called if there are queries and
    keys, with [Tq, heads, nope + rope], [Tk, heads, nope + rope] and v. It returns out
    [Tq, heads, d_v] and lse [Tq, heads] float32. Where lse is not finite, out is replaced by 0 and
    lse by −inf: these are queries without keys.
    """
    if not q.shape[0] or not k.shape[0]:
        blank = q.new_zeros(*q.shape[:2], v.shape[2])
        return blank, q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
    out, lse = attend(with_rope(q, q_rope), with_rope(k, k_rope), v)
    blind = ~torch.isfinite(lse)
    return out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, float("-inf"))


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
    """Reference of MhaPrefill."""
    q, k = with_rope(q, q_rope), with_rope(k, k_rope)
    tokens, heads = q.shape[:2]
    out = q.new_zeros(tokens, heads, v.shape[-1])
    lse = q.new_full((tokens, heads), float("-inf"), dtype=wide(q.dtype))
    q0 = k0 = 0
    for queries, keys in zip(q_segs.lens, k_segs.lens, strict=True):
        rows, cols = slice(q0, q0 + queries), slice(k0, k0 + keys)
        q0, k0 = q0 + queries, k0 + keys
        if queries == 0 or keys == 0:
            continue
        step = max(1, _SCORE_ELEMENTS // (queries * keys))
        for h0 in range(0, heads, step):
            h = slice(h0, h0 + step)
            query, key, value = (t.transpose(0, 1) for t in (q[rows, h], k[cols, h], v[cols, h]))
            values, sums = _attend(query, key, value, causal, scale)
            out[rows, h] = values.transpose(0, 1).to(out.dtype)
            lse[rows, h] = sums.T
    return out, lse


def mha_prefill_quantize(
    q: Tensor,
    q_rope: Tensor,
    k: Tensor,
    k_rope: Tensor,
    v: Tensor,
    segs: Segments,
    scale: float,
    group: int,
    ue8m0: bool,
) -> tuple[Tensor, Tensor]:
    """Reference of MhaPrefillQuantize: the composition."""
    out, _ = mha_prefill(q, q_rope, k, k_rope, v, segs, segs, True, scale)
    return quantize_group(out.flatten(1), group, ue8m0)


def merge_state(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Reference of MergeState."""
    lse = torch.logaddexp(lse_a, lse_b)  # [tokens, heads]
    base = torch.where(lse == float("-inf"), 0.0, lse)
    weight_a = torch.exp(lse_a - base).unsqueeze(-1)
    weight_b = torch.exp(lse_b - base).unsqueeze(-1)
    compute = wide(out_a.dtype)
    merged = out_a.to(compute) * weight_a + out_b.to(compute) * weight_b
    return merged.to(out_a.dtype), lse


@dataclass
class DecodeState:
    """Step state of ReferenceMlaDecode: a page table, and on the host what each row sees."""

    page_table: Tensor
    rows: tuple[tuple[int, int], ...] = ()  # (sequence, tokens) per row
    tree: Tensor | None = None


class ReferenceMlaDecode:
    """Reference of MlaDecode for latent_pages: one sequence after the other."""

    def __init__(self, facts: Facts) -> None:
        self.kv_lora = facts.dims["kv_lora"]

    def state(self, limits: Limits) -> DecodeState:
        shape = (limits.max_sequences, limits.max_pages_per_sequence)
        return DecodeState(torch.zeros(shape, dtype=torch.int32, device=limits.device))

    def prepare(self, state: DecodeState, batch: Batch) -> None:
        state.rows = ()
        if batch.decode is not None:
            table = batch.decode.page_table
            state.page_table[: table.shape[0], : table.shape[1]].copy_(table)
            state.rows, state.tree = rows_of(batch.decode), batch.decode.tree

    def run(self, state: DecodeState, q: Tensor, cache: Tensor, scale: float) -> Tensor:
        out = q.new_empty(q.shape[0], q.shape[1], self.kv_lora)
        for i, (sequence, length) in enumerate(state.rows):
            keys = gather_rows(cache, state.page_table[sequence], 0, length).to(wide(q.dtype))
            scores = q[i].to(keys.dtype) @ keys.T * scale  # [heads, length]
            if state.tree is not None:
                scores = scores.masked_fill(~seen_of(state.tree[i], length), float("-inf"))
            out[i] = (scores.softmax(-1) @ keys[:, : self.kv_lora]).to(q.dtype)
        return out


def rows_of(part: DecodePart) -> tuple[tuple[int, int], ...]:
    """Returns (sequence, tokens that it sees) of every row of `part`. For a tree: the tokens that
    it may see.
    """
    counts = part.q_lens or (1,) * part.size
    apart = part.tree is None
    return tuple(
        (i, length - (count - 1 - j) * apart)
        for i, (length, count) in enumerate(zip(part.host_kv_lens, counts, strict=True))
        for j in range(count)
    )


def seen_of(bits: Tensor, length: int) -> Tensor:
    """Returns which of `length` tokens a row of a tree sees: [length] bool. bits: its number, []
    int64.
    """
    tokens = torch.arange(length, device=bits.device) - (length - TAIL)
    return (tokens < 0) | ((bits >> tokens.clamp(min=0)) & 1).bool()


class ReferenceMlaAbsorb:
    """Reference of MlaAbsorb: kv_b as W_UK and W_UV per head, views of one tensor."""

    tag = "reference.mla_absorb"

    def __init__(self, facts: Facts) -> None:
        self.dtype = torch_dtype(facts.dtype)

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        dims = facts.dims
        values = weight.dequantise(self.dtype)
        # [heads · (nope + v), kv_lora] → [heads, nope + v, kv_lora]
        per_head = values.view(dims["heads"], dims["qk_nope"] + dims["v"], dims["kv_lora"])
        uk, uv = per_head[:, : dims["qk_nope"]], per_head[:, dims["qk_nope"] :]
        tensors = {"weight": values, "uk": uk, "uv": uv}
        return Packed(self.tag, weight.shape, tensors, values.nbytes, restore=_restore_weight)

    def expand(self, latent: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
        packed.expect(self.tag)
        uk, uv = packed.tensors["uk"], packed.tensors["uv"]
        heads, nope = uk.shape[:2]
        both = torch.nn.functional.linear(latent, packed.tensors["weight"])
        both = both.view(latent.shape[0], heads, nope + uv.shape[1])
        return both[..., :nope], both[..., nope:]

    def apply_q(self, q_nope: Tensor, q_rope: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        absorbed = torch.bmm(q_nope.transpose(0, 1), packed.tensors["uk"]).transpose(0, 1)
        return torch.cat((absorbed, q_rope), -1)

    def apply_v(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        uv = packed.tensors["uv"].transpose(1, 2)  # [heads, kv_lora, v]
        return torch.bmm(x.transpose(0, 1), uv).transpose(0, 1)


def _restore_weight(packed: Packed) -> Tensor:
    values: Tensor = packed.tensors["weight"]
    return values.to(wide(values.dtype))


def mla_prologue(
    q: Tensor,
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    cache: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of MlaPrologue: the composition."""
    kv_lora = norm_weight.shape[0]
    rope_dim = kv.shape[-1] - kv_lora
    latent = rms_norm(kv[:, :kv_lora], norm_weight, eps)
    q_rope, k_rope = rope(q[..., -rope_dim:], kv[:, kv_lora:], positions, cos_sin)
    cache_write(cache, latent, k_rope, slots)
    return q_rope, latent, k_rope


def tree_bits(parents: Sequence[int]) -> Tensor:
    """What every node of one tree sees, as DecodePart.tree has it: [1 + parents] int64."""
    count = len(parents) + 1
    lines = [{0}]
    for node, parent in enumerate(parents, 1):
        lines.append({*lines[parent], node})
    before = set(range(TAIL - count))
    numbers = [sum(1 << b for b in before | {TAIL - count + a for a in line}) for line in lines]
    return torch.tensor([n - (n >> 63 << 64) for n in numbers], dtype=torch.int64)


def decode_batch(lens: tuple[int, ...], table: Tensor, q_lens: tuple[int, ...] = ()) -> Batch:
    """A step of new tokens, one or `q_lens`, for the sequences of these cached lengths."""
    if not lens:
        none = torch.zeros(0, dtype=torch.int64)
        return Batch(none, none, none, none)
    decode = DecodePart(table, torch.tensor(lens, dtype=torch.int32), lens, q_lens)
    positions = torch.tensor([length - 1 for _, length in rows_of(decode)])
    none = torch.zeros_like(positions)
    return Batch(none, positions, none - 1, torch.arange(decode.rows), decode)
