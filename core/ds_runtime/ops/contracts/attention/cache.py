"""Contracts of the paged latent cache. Slot s is row s % page_size of page s // page_size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ds_runtime.ops.contracts.results import gathered
from ds_runtime.ops.contracts.work import ID, by_row
from ds_runtime.ops.declare import Area, Cost, OpWork, later, op

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor

    from ds_runtime.ops.batch import Segments
    from ds_runtime.ops.contract import Facts
    from ds_runtime.ops.contracts.work import Sizes
    from ds_runtime.ops.reference.cases import Case
    from ds_runtime.ops.reference.inputs import TrueInputs

_REF = "ds_runtime.ops.reference.attention.cache"
_EXACT = {"float32": 0.0, "bfloat16": 0.0, "float16": 0.0}
_torch = later("torch")
cases = later("ds_runtime.ops.reference.cases")
dtypes = later("ds_runtime.ops.dtypes")


class CacheWrite(Protocol):
    """Store normed latents and rotated keys at their slots, in place.

    * cache: one layer's cache in the bound KV layout.
    * latent: [tokens, kv_lora] and k_rope: [tokens, rope], both in the compute dtype. Rows may be
      strided. A layout of expanded keys and values has these in place of the latent: [tokens,
      heads · (nope + v)], per head its key, then its value.
    * slots: [tokens] int64, distinct. A negative slot is skipped (padding).

    Writes nothing else. tokens == 0 is legal. A float8_e4m3fn cache (facts.kv_dtype) has no scale:
    values are rounded to nearest even and saturate at ±448.
    """

    def __call__(self, cache: Tensor, latent: Tensor, k_rope: Tensor, slots: Tensor) -> None: ...


class CacheGather(Protocol):
    """Read ranges of cached tokens through the page table into one dense tensor.

    * cache: as in CacheWrite.
    * page_table: [sequences, max_pages] int32, unused entries undefined.
    * starts: [sequences] int64, first token of each range.
    * segs: lengths of the ranges (0 is legal).
    * kv_lora: width of the latent (see CacheWrite). The rest is rope.

    Returns (latent [sum, kv_lora], k_rope [sum, rope]) in `dtype` (the compute dtype), sequence by
    sequence. They are new tensors whose rows may be strided. Pages that the table does not name for
    these ranges may hold NaN and must not be touched.
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
    """Copy cached tokens from slot to slot, in place: the accepted branch of a tree of drafts.

    * cache: as in CacheWrite.
    * sources, targets: [sequences, n] int64 slots, distinct among the targets.

    A pair with a negative source is skipped. Sequences have no slot in common. Within a sequence
    the order of pairs counts, and no source is the target of an earlier pair. Entries are copied
    bit for bit; nothing else is written. sequences == 0 and n == 0 are legal.
    """

    def __call__(self, cache: Tensor, sources: Tensor, targets: Tensor) -> None: ...


def cache_write_samples(facts: Facts) -> Iterator[Case]:
    """Shuffled slots, padding, slices of wider rows; every other row must stay as it was."""
    latent, rope = facts.dims["kv_lora"], facts.dims["qk_rope"]
    for tokens, padding in ((0, 0), (1, 0), (7, 3), (2 * facts.page_size + 1, 2)):
        make = cases.Maker(facts, label := f"{tokens} tokens, {padding} padding")
        cache, _ = make.paged((tokens + 5, 3))
        slots = make.order(cache.rows.shape[0])[:tokens]
        slots[:padding] = -1
        values = make.inside(make.normal(tokens, latent)), make.inside(make.normal(tokens, rope))
        yield cases.case(label, facts, cache, *values, slots, written=(0,))
    make = cases.Maker(facts, "only padding")
    cache, _ = make.paged((9,))
    values = make.normal(2, latent), make.normal(2, rope)
    yield cases.case("only padding", facts, cache, *values, _torch.tensor([-1, -7]), written=(0,))


def cache_gather_samples(facts: Facts) -> Iterator[Case]:
    """Ranges that start and end anywhere, empty ranges, no sequences."""
    page, latent = facts.page_size, facts.dims["kv_lora"]
    shapes: tuple[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...] = (
        ("no sequences", (), (), ()),
        ("one token", (1,), (0,), (1,)),
        ("whole pages", (2 * page, page), (0, 0), (2 * page, page)),
        ("middles", (3 * page + 1, page + 3, 5), (page - 1, 1, 2), (page + 2, page + 2, 3)),
        ("empty ranges", (7, 2, 9), (7, 0, 4), (0, 2, 0)),
    )
    for label, lens, starts, counts in shapes:
        cache, table = cases.Maker(facts, label).paged(lens)
        first = _torch.tensor(starts, dtype=_torch.int64)
        dtype = dtypes.torch_dtype(facts.dtype)
        yield cases.case(label, facts, cache, table, first, cases.segments(*counts), latent, dtype)


def cache_move_samples(facts: Facts) -> Iterator[Case]:
    """Branches that move to the front, over slots that others leave; nothing to move."""
    cache, _ = (make := cases.Maker(facts, "branches")).paged((9, 2 * facts.page_size + 6, 5))
    slots = make.order(cache.rows.shape[0])
    first, second = slots[:7], slots[7:14]
    sources = _torch.stack((first[[2, 4, 6]], second[[1, 3, 3]]))
    targets = _torch.stack((first[[1, 2, 3]], second[[1, 2, 4]]))
    sources[1, 0] = sources[1, 2] = -1
    yield cases.case("branches", facts, cache, sources, targets, written=(0,))
    cache, _ = cases.Maker(facts, "nothing").paged((3,))
    for shape in ((0, 3), (2, 0), (2, 2)):
        none = _torch.full(shape, -1, dtype=_torch.int64)
        yield cases.case(f"nothing of {shape}", facts, cache, none, none, written=(0,))


def _write_inputs(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    parts = p.normal(tokens, p.cached), p.normal(tokens, p.facts.dims["qk_rope"])
    return p.cache(p.pages(tokens)), *parts, p.positions(tokens)


def _gather_inputs(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    pages = p.pages(tokens)
    table = _torch.randperm(pages).to(_torch.int32).unsqueeze(0).to(p.device)
    starts = _torch.zeros(1, dtype=_torch.int64, device=p.device)
    return p.cache(pages), table, starts, p.segments(tokens), p.cached, p.dtype


def _move_inputs(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    """Each of `tokens` sequences keeps one entry."""
    return p.cache(p.pages(2 * tokens)), *p.positions(2 * tokens).view(2, tokens, 1)


def _row(s: Sizes, tokens: int) -> int:
    return tokens * (s.cached + s.facts.dims["qk_rope"])


def _write(s: Sizes, tokens: int) -> OpWork:
    rows = _row(s, tokens)
    return OpWork(reads=rows * s.item + tokens * ID, writes=rows * s.kept)


def _gather(s: Sizes, tokens: int) -> OpWork:
    rows = _row(s, tokens)
    return OpWork(reads=rows * s.kept, writes=rows * s.item)


def _move(s: Sizes, tokens: int) -> OpWork:
    rows = _row(s, tokens) * s.kept
    return OpWork(reads=rows + 2 * tokens * ID, writes=rows)


class CacheOps(Area):
    """Rows of cached tokens."""

    cache_write: CacheWrite = op(
        reference=f"{_REF}:cache_write",
        tolerance=_EXACT,
        writes=("cache",),
        layout="kv",
        waits=True,
        cost=Cost({"": (_write_inputs, _write)}, size=by_row),
        summary="write latents and rope keys to their cache slots",
    )
    cache_gather: CacheGather = op(
        reference=f"{_REF}:cache_gather",
        tolerance=_EXACT,
        results={
            "": lambda f, cache, table, starts, segs, width, dtype: gathered(
                segs, f.dims["qk_rope"], width, dtype
            )
        },
        layout="kv",
        waits=True,
        cost=Cost({"": (_gather_inputs, _gather)}, size=by_row),
        summary="gather cached prefixes for prefill",
    )
    cache_move: CacheMove = op(
        reference=f"{_REF}:cache_move",
        tolerance=_EXACT,
        writes=("cache",),
        layout="kv",
        waits=True,
        cost=Cost({"": (_move_inputs, _move)}, size=by_row),
        summary="keep the right branch of a tree of drafts",
    )
