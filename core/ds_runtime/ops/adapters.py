"""Kernels written for the previous version of a contract, called as the present one says.

One adapter per op whose contract has changed, named after it (`Op.adapter`). It takes what the
kernel's `fn` names and returns the same by the present version.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ds_runtime.ops.batch import Batch, DecodePart, Limits, Segments
from ds_runtime.ops.reference.attention import rows_of, with_rope
from ds_runtime.ops.reference.moe import with_shared_slots

if TYPE_CHECKING:
    from torch import Tensor

    from ds_runtime.ops.attention import MhaPrefill, MlaAbsorb, MlaDecode
    from ds_runtime.ops.moe import Route
    from ds_runtime.ops.spec import Facts, Routing
    from ds_runtime.ops.weight import Packed, Weight


def mla_decode(make: Callable[[Facts], MlaDecode]) -> Callable[[Facts], MlaDecode]:
    """1 → 2: one row per sequence, then several."""
    return lambda facts: _OneRow(make(facts))


class _OneRow:
    """Shows every row of a sequence as a sequence of its own, which sees as much."""

    def __init__(self, kernel: MlaDecode) -> None:
        self._kernel = kernel

    def state(self, limits: Limits) -> Any:
        rows = limits.max_sequences * limits.max_queries
        return self._kernel.state(replace(limits, max_sequences=rows, max_queries=1))

    def prepare(self, state: Any, batch: Batch) -> None:
        if batch.decode is not None and batch.decode.q_lens:
            batch = replace(batch, decode=_by_row(batch.decode))
        self._kernel.prepare(state, batch)

    def run(self, state: Any, q: Tensor, cache: Tensor, scale: float) -> Tensor:
        return self._kernel.run(state, q, cache, scale)


def _by_row(part: DecodePart) -> DecodePart:
    sequences, lens = zip(*rows_of(part), strict=True)
    device = part.page_table.device
    table = part.page_table[torch.tensor(sequences, device=device)]
    kv_lens = torch.tensor(lens, dtype=part.kv_lens.dtype, device=device)
    return DecodePart(table, kv_lens, lens)


def mha_prefill(attend: Callable[..., tuple[Tensor, Tensor]]) -> MhaPrefill:
    """1 → 2: heads of queries and keys as wholes, then in parts."""

    def in_parts(
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
        heads_q, heads_k = with_rope(q, q_rope), with_rope(k, k_rope)
        return attend(heads_q, heads_k, v, q_segs, k_segs, causal, scale)

    return in_parts


def mla_absorb(make: Callable[[Facts], MlaAbsorb]) -> Callable[[Facts], MlaAbsorb]:
    """1 → 2: absorbed queries alone, then with their rope part behind them."""
    return lambda facts: _WithRope(make(facts))


class _WithRope:
    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        packed: Packed = self._kernel.pack(weight, facts)
        return packed

    def expand(self, latent: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
        k_nope, v = self._kernel.expand(latent, packed)
        return k_nope, v

    def apply_q(self, q_nope: Tensor, q_rope: Tensor, packed: Packed) -> Tensor:
        return torch.cat((self._kernel.apply_q(q_nope, packed), q_rope), -1)

    def apply_v(self, x: Tensor, packed: Packed) -> Tensor:
        out: Tensor = self._kernel.apply_v(x, packed)
        return out


def route(choose: Route) -> Route:
    """1 → 2: no slots of shared experts, then those."""

    def with_shared(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
        weights, ids = choose(logits, bias, replace(routing, shared=0))
        return with_shared_slots(weights, ids, routing)

    return with_shared
