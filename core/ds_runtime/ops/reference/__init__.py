"""The built-in plugin "reference": one torch kernel per op, the plain cache layout.

It enters through the same hooks as every plugin, at rank 0: what nobody else offers runs here.
Torch-free at import; the kernels are in the sibling files, one per area.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ds_runtime.common.hookimpl import hookimpl
from ds_runtime.ops.contract import FP4_KEYS, FP8_GROUPS, RANK_REFERENCE, Facts, Gate, Kernel, gates
from ds_runtime.ops.contracts.attention.index import SCORES
from ds_runtime.ops.formats import FORMATS
from ds_runtime.ops.kernel import Footprint, Layout, Promises
from ds_runtime.ops.reference.layouts import (
    EXPANDED_PAGES,
    INDEX_PAGES,
    ITEM_BYTES,
    LATENT_FP8_GROUPS,
    LATENT_PAGES,
)
from ds_runtime.ops.table import OPS

PROVIDER = "reference"
_SCALED = {  # kernels of this layout: op → function
    "cache_write": "scaled_cache_write",
    "cache_gather": "scaled_cache_gather",
    "cache_move": "scaled_cache_move",
    "sparse_prefill": "scaled_sparse_mla",
    "sparse_decode": "scaled_sparse_mla",
}
_LAYOUTS = {"": frozenset[str](), "kv": frozenset({LATENT_PAGES.tag})}
_LAYOUTS["index"] = frozenset({INDEX_PAGES.tag})
_EXPANDED = frozenset({EXPANDED_PAGES.tag})
_ROWS = {  # ops on rows of any width, or of expanded keys and values: op → layouts
    **dict.fromkeys(("cache_write", "cache_gather", "cache_move"), _LAYOUTS["kv"] | _EXPANDED),
    "mha_decode": _EXPANDED,
}


def _refuse_kv_dtype(facts: Facts) -> str | None:
    if facts.kv_dtype in ITEM_BYTES:
        return None
    return f"the cache holds {', '.join(ITEM_BYTES)} rows, not {facts.kv_dtype}"


def _refuse_index_dtype(facts: Facts) -> str | None:
    if facts.index_dtype in ITEM_BYTES:
        return None
    if facts.index_dtype == FP4_KEYS:
        d = facts.dims.get("index_dim", 0)
        return f"index_head_dim {d} is no multiple of 32" if d % 32 else None
    return f"index_pages holds {', '.join(ITEM_BYTES)} keys, not {facts.index_dtype}"


_GATES: dict[str, Gate] = {"": gates(), "kv": _refuse_kv_dtype, "index": _refuse_index_dtype}


def _offer(name: str) -> Kernel:
    op = OPS[name]
    return Kernel(
        op=op,
        fn=op.reference,
        provider=PROVIDER,
        rank=RANK_REFERENCE,
        refuse=_GATES[op.layout],
        formats=frozenset(FORMATS) if op.owns_weights else frozenset(),
        layouts=_ROWS.get(name, _LAYOUTS[op.layout]),
        phases=frozenset({"prefill", "decode", "verify", "tree"}),
        contract=op.version,
        promises=Promises(
            graph_safe=not op.waits, batch_invariant=op.plain, skips_absent=op.absent
        ),
    )


def _refuse_unscaled(facts: Facts) -> str | None:
    if facts.kv_dtype == FP8_GROUPS:
        return None
    return f"latent_fp8_groups holds {FP8_GROUPS} rows, not {facts.kv_dtype}"


def _offer_scaled(name: str, function: str) -> Kernel:
    return replace(
        _offer(name),
        fn=f"ds_runtime.ops.reference.attention.scaled:{function}",
        refuse=_refuse_unscaled,
        layouts=frozenset({LATENT_FP8_GROUPS.tag}),
    )


FP8_W8A8 = Kernel(
    op=OPS["linear"],
    fn="ds_runtime.ops.reference.matrices.linear:Fp8W8A8Linear",
    provider=PROVIDER,
    rank=RANK_REFERENCE - 1,  # below the plain reference: only a pin selects it
    formats=frozenset({"fp8_block"}),
    phases=frozenset({"prefill", "decode", "verify", "tree"}),
    note="FP8 arithmetic step by step, for comparing numerics; slow",
    numerics="fp8_w8a8",
)

EXPERTS_FP8_W8A8 = replace(
    FP8_W8A8,
    op=OPS["experts"],
    fn="ds_runtime.ops.reference.matrices.coded_experts:Fp8W8A8Experts",
    promises=Promises(graph_safe=False, skips_absent=True, takes_codes=True),
)

_KEYS = 20 * SCORES  # bytes: of each score two whole numbers, and a copy


def _topk_bytes(facts: Facts, rows: int) -> int:
    """At most: as many rows as are scored together have their keys."""
    return _KEYS


TOPK = replace(
    _offer("index_topk"),
    fn="ds_runtime.ops.reference.attention.index:topk",
    provider="torch",
    rank=RANK_REFERENCE - 1,  # only a pin selects it
    footprint=Footprint(workspace=_topk_bytes),
)


@hookimpl
def ds_ops(facts: Facts) -> Sequence[Kernel]:
    return [_offer(name) for name in OPS]


@hookimpl
def ds_attention(facts: Facts) -> Sequence[Kernel | Layout]:
    scaled = [_offer_scaled(name, function) for name, function in _SCALED.items()]
    return [LATENT_PAGES, EXPANDED_PAGES, INDEX_PAGES, LATENT_FP8_GROUPS, *scaled, TOPK]


@hookimpl
def ds_quant_loaders(facts: Facts) -> Sequence[Kernel]:
    return [FP8_W8A8, EXPERTS_FP8_W8A8]
