"""FlashMLA: absorbed MLA decode over 64-token pages, and attention over chosen slots.

Source of the calls: the package sgl-flash-mla, whose `use_legacy=True` side keeps these kernels.
There flash_mla_plan.py plans, from the step's lengths, which part of the device computes what.

The library lets its dense decode begin before what is in front of it has ended, and does not wait
for it. And its kernel that sums ends without waiting for the decode where there is nothing to sum.
Neither is safe with kernels that let their successors begin early, or begin early themselves, as
the portable ones do. In front of the dense decode is a fence; after it, a plan that always has a
sum (flash_mla_plan.py); after the sparse one, whose plan is the library's, another fence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime.api import Batch, Facts, Limits, UnsupportedError, branch, install_command
from ds_runtime_cuda import flash_mla_plan
from ds_runtime_cuda.decode import LATENT, Queries
from ds_runtime_cuda.software import EXTRA

PAGE = 64
_PLAN_OF_TWO = [[0, 0, 0, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0, 0]]  # the library's, of one token each
_HEADS = (64, 128)  # that sparse kernels take; fewer are filled up with zeros
_SLOTS = 128  # of which a row has a multiple; 64 where keys are FP8


@cache
def _library() -> Any:
    return import_module("flash_mla")


@dataclass
class State:
    """Queries, and the library's schedule in parts. planned: what its first use awaits."""

    queries: Queries
    schedule: Any
    parts: int
    planned: Callable[[], None] | None = None


class MlaDecode:
    """See the library's flash_mla_with_kvcache; one query per sequence."""

    prepares_on_device = True

    def __init__(self, facts: Facts) -> None:
        self._lib = _library()
        self._heads = facts.dims["heads"]

    def state(self, limits: Limits) -> State:
        queries = Queries.make(limits)
        schedule, _ = self._lib.get_mla_metadata()
        two = torch.ones(2, dtype=torch.int32, device=limits.device)
        theirs, _ = self._lib.get_mla_decoding_metadata(
            two, self._heads, 1, self._heads, use_legacy=True
        )
        if theirs[:2, :7].tolist() != _PLAN_OF_TWO:
            raise UnsupportedError(
                "flash_mla: the installed version plans otherwise than sgl-flash-mla 1.0.0: "
                f"{install_command(EXTRA)} --force-reinstall, or --pin mla_decode=triton"
            )
        return State(queries, schedule, theirs.shape[0])

    def prepare(self, state: State, batch: Batch) -> None:
        """The plan takes one program 2 µs, 33 for 128 sequences: in captured steps next to what
        they begin with."""
        state.queries.show(batch)
        state.planned = None
        if state.queries.count:
            state.planned = branch(partial(self._plan, state))

    def _plan(self, state: State) -> None:
        state.schedule.tile_scheduler_metadata, state.schedule.num_splits = flash_mla_plan.plan(
            state.queries.lens[: state.queries.count], state.parts, self._heads
        )

    def run(self, state: State, q: Tensor, cache: Tensor, scale: float) -> Tensor:
        count, heads, width = q.shape
        if not count:
            return q.new_empty(0, heads, LATENT)
        if state.planned is not None:
            state.planned()
            state.planned = None
        queries, q = state.queries, q.contiguous()
        held = fence(q)
        out, _ = self._lib.flash_mla_with_kvcache(
            q.view(count, 1, heads, width),
            cache.unsqueeze(2),  # [pages, page, 1, width]
            queries.table[:count],
            queries.lens[:count],
            LATENT,
            state.schedule,
            None,
            softmax_scale=scale,
            causal=False,
            use_legacy=True,
        )
        del held
        return out.view(count, heads, LATENT)  # type: ignore[no-any-return]


def fence(beside: Tensor) -> Tensor | None:
    """A launch that begins when all before it has ended, and lets nothing begin before its end.

    What it writes is to be held while the kernel after it is launched: that may still begin before
    the write is seen, and is not to get this memory.
    """
    return beside.new_empty(1).zero_() if beside.is_cuda else None


class MlaDecodeFewHeads(MlaDecode):
    """For heads that fill a quarter of its tiles or less: ranked by itself."""


def _filled(q: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """(queries with as many heads, slots with as many per row as the kernels take)."""
    heads, count = q.shape[1], slots.shape[1]
    wanted = next(n for n in _HEADS if n >= heads)
    if wanted > heads:
        q = F.pad(q, (0, 0, 0, wanted - heads))
    if count % _SLOTS:
        slots = F.pad(slots, (0, -count % _SLOTS), value=-1)
    return q.contiguous(), slots.contiguous()


def sparse_mla(q: Tensor, cache: Tensor, slots: Tensor, kv_lora: int, scale: float) -> Tensor:
    """SparseMla over latent_pages: the library's prefill, which splits no row's slots."""
    rows, heads, width = q.shape
    if not rows:
        return q.new_empty(0, heads, kv_lora)
    q, slots = _filled(q, slots)
    out, _, _ = _library().flash_mla_sparse_fwd(
        q,
        cache.view(-1, 1, width),
        slots.unsqueeze(1),
        scale,
        kv_lora,
        use_legacy=True,
        return_log2_lse=False,
    )
    return out[:, :heads]  # type: ignore[no-any-return]


def scaled_sparse_mla(
    q: Tensor, cache: Tensor, slots: Tensor, kv_lora: int, scale: float
) -> Tensor:
    """SparseMla over latent_fp8_groups: the library's decode, with a sequence per row."""
    rows, heads, _ = q.shape
    if not rows:
        return q.new_empty(0, heads, kv_lora)
    lib = _library()
    q, slots = _filled(q, slots)
    schedule, _ = lib.get_mla_metadata()  # planned anew by each call
    out, _ = lib.flash_mla_with_kvcache(
        q.unsqueeze(1),
        cache.unsqueeze(2),  # [pages, page, 1, bytes]
        None,
        None,
        kv_lora,
        schedule,
        None,
        softmax_scale=scale,
        causal=False,
        is_fp8_kvcache=True,
        indices=slots.unsqueeze(1),
        use_legacy=True,
    )
    fence(out)
    return out[:, 0, :heads]  # type: ignore[no-any-return]
