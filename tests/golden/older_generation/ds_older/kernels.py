"""Kernels of an older generation: a decoding sequence has one row."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime.api import Batch, Facts, Limits, Packed, Segments, Weight, torch_dtype


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


class _Linear:
    tag = "older.linear"

    def __init__(self, facts: Facts) -> None:
        self.dtype = torch_dtype(facts.dtype)

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        values = weight.dequantise(self.dtype).t().contiguous()
        return Packed(self.tag, weight.shape, {"t": values}, values.nbytes)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        return (x.float() @ packed.tensors["t"].float()).to(x.dtype)


def linear(facts: Facts) -> _Linear:
    return _Linear(facts)


def allocate(num_pages: int, facts: Facts, device: torch.device) -> Tensor:
    """[pages, page size, latent and rope], always in float32."""
    width = facts.dims["kv_lora"] + facts.dims["qk_rope"]
    return torch.zeros(num_pages, facts.page_size, width, device=device)


def cache_write(cache: Tensor, latent: Tensor, k_rope: Tensor, slots: Tensor) -> None:
    kept = slots >= 0
    rows = torch.cat((latent, k_rope), -1)[kept]
    cache.view(-1, cache.shape[-1])[slots[kept]] = rows.to(cache.dtype)


def cache_gather(
    cache: Tensor,
    page_table: Tensor,
    starts: Tensor,
    segs: Segments,
    kv_lora: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    page = cache.shape[1]
    rows = [cache.new_zeros(0, cache.shape[2])]
    for i, length in enumerate(segs.lens):
        tokens = torch.arange(length) + int(starts[i])
        rows.append(cache[page_table[i, tokens // page].long(), tokens % page])
    found = torch.cat(rows).to(dtype)
    return found[:, :kv_lora], found[:, kv_lora:]


class _MlaDecode:
    def __init__(self, facts: Facts) -> None:
        self.kv_lora = facts.dims["kv_lora"]

    def state(self, limits: Limits) -> dict[str, Tensor]:
        table = torch.zeros(limits.max_sequences, limits.max_pages_per_sequence, dtype=torch.int64)
        return {"table": table, "lens": torch.zeros(limits.max_sequences, dtype=torch.int64)}

    def prepare(self, state: dict[str, Tensor], batch: Batch) -> None:
        part = batch.decode
        if part is None:
            return
        count, pages = part.page_table.shape
        state["table"][:count, :pages] = part.page_table
        state["lens"][:count] = part.kv_lens

    def run(self, state: dict[str, Tensor], q: Tensor, cache: Tensor, scale: float) -> Tensor:
        out = torch.empty(q.shape[0], q.shape[1], self.kv_lora, dtype=q.dtype)
        for i in range(q.shape[0]):
            length = int(state["lens"][i])
            pages = state["table"][i, : -(-length // cache.shape[1])]
            rows = cache[pages].flatten(0, 1)[:length].float()
            weights = torch.softmax(q[i].float() @ rows.t() * scale, dim=-1)
            out[i] = (weights @ rows[:, : self.kv_lora]).to(q.dtype)
        return out


def mla_decode(facts: Facts) -> _MlaDecode:
    return _MlaDecode(facts)
