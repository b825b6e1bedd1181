"""Contracts of the paged latent cache. Slot s is row s % page_size of page s // page_size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ds_runtime.ops.contract import Op

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ds_runtime.ops.batch import Segments

_REF = "ds_runtime.ops.reference.attention.cache"


class CacheWrite(Protocol):
    """Store normed latents and rotated keys at their slots, in place.

    cache: one layer's cache in the bound KV layout. latent: [tokens, kv_lora], k_rope: [tokens,
    rope], both in the compute dtype, rows may be strided. In a layout of expanded keys and values
    these are the latent, [tokens, heads · (nope + v)], per head its key, then its value. slots:
    [tokens] int64, distinct; a negative slot is skipped (padding). Writes nothing else. tokens == 0
    is legal. A float8_e4m3fn cache (facts.kv_dtype) has no scale: values are rounded to nearest
    even and saturate at ±448.
    """

    def __call__(self, cache: Tensor, latent: Tensor, k_rope: Tensor, slots: Tensor) -> None: ...


class CacheGather(Protocol):
    """Read ranges of cached tokens through the page table into one dense tensor.

    page_table: [sequences, max_pages] int32, unused entries undefined. starts: [sequences] int64,
    first token of each range. segs: lengths of the ranges (0 is legal). kv_lora: width of the
    latent (see CacheWrite), the rest is rope. Returns (latent [sum, kv_lora], k_rope [sum, rope])
    in `dtype` (the compute dtype), sequence by sequence, new tensors, rows may be strided. Pages
    that the table does not name for these ranges may hold NaN and must not be touched.
    """

    def __call__(
        self,
        cache: Tensor,
        page_table: Tensor,
        starts: Tensor,
        segs: Segments,
        kv_lora: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]: ...


class CacheMove(Protocol):
    """Copy cached tokens from slot to slot, in place: what is kept of a tree of drafts.

    sources, targets: [sequences, n] int64 slots, distinct among the targets; a pair with a negative
    source is skipped. Sequences have no slot in common. Within a sequence pairs count in their
    order, and no source is the target of an earlier pair. Entries are copied bit for bit; nothing
    else is written. sequences == 0 and n == 0 are legal.
    """

    def __call__(self, cache: Tensor, sources: Tensor, targets: Tensor) -> None: ...


CACHE_WRITE = Op(
    name="cache_write",
    protocol=f"{__name__}:CacheWrite",
    reference=f"{_REF}:cache_write",
    samples=f"{_REF}:cache_write_samples",
    tolerance={"float32": 0.0, "bfloat16": 0.0, "float16": 0.0},
    layout="kv",
    summary="write latents and rope keys to their cache slots",
)

CACHE_GATHER = Op(
    name="cache_gather",
    protocol=f"{__name__}:CacheGather",
    reference=f"{_REF}:cache_gather",
    samples=f"{_REF}:cache_gather_samples",
    tolerance={"float32": 0.0, "bfloat16": 0.0, "float16": 0.0},
    layout="kv",
    summary="gather cached prefixes for prefill",
)

CACHE_MOVE = Op(
    name="cache_move",
    protocol=f"{__name__}:CacheMove",
    reference=f"{_REF}:cache_move",
    samples=f"{_REF}:cache_move_samples",
    tolerance={"float32": 0.0, "bfloat16": 0.0, "float16": 0.0},
    layout="kv",
    summary="keep the right branch of a tree of drafts",
)
