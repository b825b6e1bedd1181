"""Contracts of attention over a window and compressed entries: rotation, entries, attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ds_runtime.ops.contracts.results import attended, form, name_of
from ds_runtime.ops.contracts.work import ID, by_latent, rows_of
from ds_runtime.ops.declare import Area, Cost, OpWork, later, op

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from ds_runtime.ops.contract import Facts
    from ds_runtime.ops.contracts.work import Sizes
    from ds_runtime.ops.reference.cases import Case, Maker, PagedCache
    from ds_runtime.ops.reference.inputs import TrueInputs

_REF = "ds_runtime.ops.reference.attention.window"
_TOLERANCE = {"float32": 2e-5, "bfloat16": 8e-3, "float16": 2e-3}
_EPS = 1e-6
torch = later("torch")
cases = later("ds_runtime.ops.reference.cases")


class NormRope(Protocol):
    """RMS norm of each head, then rotation of its last dims.

    * x: [tokens, heads, d], last dim contiguous.
    * weight: [d] float32, or None.
    * positions: [tokens] int64 and cos_sin: [max_position, r] float32 as in Rope.
    * group: 0, or the number of dims that are rounded together.

    In fp32: y = x / sqrt(mean(x²) + eps) · weight. Then the last r dims of y are rotated as pairs
    by each position. If group > 0, the first d − r dims are rounded to e4m3 times a power of two
    per group, as in QuantizeGroup with ue8m0. The last group may be shorter. Returns a new
    contiguous [tokens, heads, d] in x.dtype. tokens == 0 is legal.
    """

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | None,
        eps: float,
        positions: Tensor,
        cos_sin: Tensor,
        group: int,
    ) -> Tensor: ...


class RopeBack(Protocol):
    """Rotate the last dims of each head back: by minus the angle of each position.

    * x: [tokens, heads, d], last dim contiguous.
    * positions, cos_sin: as in NormRope.

    Returns a new contiguous [tokens, heads, d] in x.dtype. tokens == 0 is legal.
    """

    def __call__(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor: ...


class CompressWindows(Protocol):
    """Rows of tokens become compressed entries, one for every r tokens, where a window closes.

    * rows: [tokens, 2 · w], values in the first w columns, scores in the rest. Rows may be strided.
    * ape: [r, w] float32. norm_weight: [d] float32. w = d, or w = 2 · d for overlapping windows.
    * positions: [tokens] int64. The rows of a sequence are adjacent, their positions rise by one.
    * blocks: [tokens] int64, the block of each row's sequence in `state`. Negative ones are
      padding.
    * state: [blocks, entries, 2 · w] float32. Entry p % entries has the row of position p, with
      ape[p % r] added to its score. There are at least r − 1 entries, or 2 · r − 1 for overlapping
      windows. Entries from before position 0 are ignored.

    A window closes at each position p with (p + 1) % r == 0. Per dim, the softmax of the scores of
    positions p − r + 1 … p weighs their values. With overlapping windows the softmax is over the
    second d columns of these positions and the first d columns of the r positions before them. The
    sum is normed as in NormRope and rotated by position p − r + 1. Its other dims are rounded if
    group > 0. All of it runs in fp32. Then `state` gets each sequence's last rows, as many as it
    has entries. Returns a new contiguous [tokens, d] in rows.dtype, 0 where no window closes.
    tokens == 0 is legal.
    """

    def __call__(
        self,
        rows: Tensor,
        ape: Tensor,
        norm_weight: Tensor,
        eps: float,
        positions: Tensor,
        cos_sin: Tensor,
        group: int,
        state: Tensor,
        blocks: Tensor,
    ) -> Tensor: ...


class WindowSparse(Protocol):
    """Attention over the last tokens of a sequence and over compressed entries, with sinks.

    * q: [tokens, heads, d], d = kv_lora + rope. A cached entry is both key and value.
    * sink: [heads] float32.
    * kv: [tokens, d], the entries of these tokens if `recent` lacks them, or None if it has them.
    * recent: one layer in the bound KV layout. Entry p % entries of a sequence's block has the
      token at position p.
    * positions, blocks: as in CompressWindows. A row of padding returns 0.
    * compressed: one layer in the same layout.
    * slots: [tokens, n] int32, n ≥ 0, distinct in a row. Negative ones are padding and may be
      anywhere.

    A row sees positions p − window + 1 … p, none below 0, and the entries of `compressed` at its
    slots. Softmax in fp32 of q·k·scale over both; exp(sink) is added to its denominator. Entries
    that no row sees may hold NaN. Returns (o [tokens, heads, d] in q.dtype, log of the denominator
    [tokens, heads] float32, −inf for padding). tokens == 0 is legal.
    """

    def __call__(
        self,
        q: Tensor,
        sink: Tensor,
        kv: Tensor | None,
        recent: Tensor,
        positions: Tensor,
        blocks: Tensor,
        window: int,
        compressed: Tensor,
        slots: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]: ...


def norm_rope_samples(facts: Facts) -> Iterator[Case]:
    """Queries without a weight, keys with one; slices, far positions, rounded dims."""
    nope, r = facts.dims["kv_lora"], facts.dims["qk_rope"]
    for tokens, heads, group in ((0, 2, 0), (1, 1, 0), (5, 3, 0), (6, 1, 64), (9, 1, 16)):
        make = cases.Maker(facts, label := f"{tokens} tokens, {heads} heads, groups of {group}")
        x = make.inside(make.normal(tokens, heads, nope + r, scale=3), 4, 4)
        weight = make.normal(nope + r, dtype=torch.float32) if heads == 1 else None
        at = make.integers(0, 900, tokens), make.cos_sin(900, r)
        yield cases.case(label, facts, x, weight, _EPS, *at, group)


def rope_back_samples(facts: Facts) -> Iterator[Case]:
    """Slices of wider tensors, repeated and far positions."""
    nope, r = facts.dims["kv_lora"], facts.dims["qk_rope"]
    for tokens, heads in ((0, 2), (1, 1), (5, 3)):
        make = cases.Maker(facts, label := f"{tokens} tokens, {heads} heads")
        x = make.inside(make.normal(tokens, heads, nope + r), 4, 4)
        yield cases.case(label, facts, x, make.integers(0, 900, tokens), make.cos_sin(900, r))


def _sequences(
    make: Maker, spans: tuple[tuple[int, int], ...], padding: int = 0
) -> tuple[Tensor, Tensor]:
    """(positions, blocks) int64 of sequences with these (first position, tokens), in any block of
    one more than there are, and of padding behind them."""
    order = make.order(len(spans) + 1).tolist()
    at = [p for first, count in spans for p in range(first, first + count)] + [0] * padding
    own = [order[i] for i, (_, count) in enumerate(spans) for _ in range(count)]
    return torch.tensor(at, dtype=torch.int64), torch.tensor(own + [-1] * padding).long()


_SPANS = (
    ("nothing", (), 0),
    ("starts", ((0, 1), (0, 9), (0, 3)), 2),
    ("steps", ((7, 1), (12, 1), (31, 1), (2, 1)), 0),
    ("chunks", ((5, 14), (16, 8), (3, 30)), 1),
)


def compress_windows_samples(facts: Facts) -> Iterator[Case]:
    """Windows of both kinds: starts, single steps, chunks longer than the state, padding."""
    d, r = facts.dims["kv_lora"] + facts.dims["qk_rope"], facts.dims["qk_rope"]
    f32 = torch.float32
    for (label, spans, padding), (ratio, overlap) in (
        (spans, kind) for spans in _SPANS for kind in ((4, True), (8, False))
    ):
        make = cases.Maker(facts, label := f"{label}, {ratio} tokens, overlap {overlap}")
        width, entries = d * (1 + overlap), ratio * (1 + overlap) - 1 + len(label) % 2
        positions, blocks = _sequences(make, spans, padding)
        state = make.normal(len(spans) + 1, entries, 2 * width, dtype=f32)
        weights = make.normal(ratio, width, dtype=f32), make.normal(d, dtype=f32), _EPS
        args = (positions, make.cos_sin(40, r), 16 * (len(spans) % 2), state, blocks)
        rows = make.inside(make.normal(len(positions), 2 * width), 4, 4)
        yield cases.case(label, facts, rows, *weights, *args, written=(7,))


def _recent(make: Maker, blocks: int, entries: int, width: int) -> PagedCache:
    """A window cache: every entry of every block is written."""
    rows = make.normal(blocks * entries, width).to(make.kv_dtype)
    return cases.PagedCache(rows, entries)  # type: ignore[no-any-return]


def _window_samples(facts: Facts, held: bool) -> Iterator[Case]:
    """Starts, steps and chunks, few entries and none, rows without, windows shorter than one."""
    heads, width = facts.dims["heads"], facts.dims["kv_lora"] + facts.dims["qk_rope"]
    for (label, spans, padding), n in ((spans, n) for spans in _SPANS for n in (0, 6)):
        if held and any(count > 8 for _, count in spans):
            continue  # the ring has no room for more
        make = cases.Maker(facts, label := f"{label}, {n} entries")
        positions, blocks = _sequences(make, spans, padding)
        rows, window = len(positions), 5 if n else 8
        recent = _recent(make, len(spans) + 1, window + 9 if held else window, width)
        compressed, table = make.paged((3 * facts.page_size + 5,))
        at = torch.stack([make.order(3 * facts.page_size + 5)[:n] for _ in range(rows)] or
                         [torch.empty(n, dtype=torch.int64)])[:rows]  # fmt: skip
        slots = (table[0][at // facts.page_size] * facts.page_size + at % facts.page_size).int()
        slots[make.uniform(*slots.shape) < 0.3] = -1
        q, sink = make.normal(rows, heads, width, scale=2), make.normal(heads, dtype=torch.float32)
        kv = None if held else make.inside(make.normal(rows, width), 4, 4)
        where = recent, positions, blocks, window
        yield cases.case(label, facts, q, sink, kv, *where, compressed, slots, width**-0.5)


def window_prefill_samples(facts: Facts) -> Iterator[Case]:
    """Rows that the cache of the window lacks."""
    yield from _window_samples(facts, False)


def window_decode_samples(facts: Facts) -> Iterator[Case]:
    """Rows that it has."""
    yield from _window_samples(facts, True)


def _width(s: Sizes) -> int:
    return sum(s.dims("kv_lora", "qk_rope"))


def _heads_inputs(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    return (
        p.normal(tokens, p.facts.dims["heads"], _width(p)),
        p.positions(tokens),
        p.cos_sin(tokens),
    )


def _norm_inputs(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    x, positions, table = _heads_inputs(p, tokens)
    return x, None, _EPS, positions, table, 0


def _norm(s: Sizes, tokens: int) -> OpWork:
    each = s.facts.dims["heads"] * _width(s)
    return rows_of(tokens, each * s.item + _place(s), each * s.item, 5.0 * each)


def _back(s: Sizes, tokens: int) -> OpWork:
    heads, r = s.dims("heads", "qk_rope")
    each = heads * _width(s)
    return rows_of(tokens, each * s.item + _place(s), each * s.item, 3.0 * heads * r)


def _place(s: Sizes) -> float:
    """Bytes of a position and of its angles."""
    return ID + 4.0 * s.facts.dims["qk_rope"]


def _compress_inputs(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    """A token each of sequences, windows of four."""
    d = _width(p)
    rows, state = p.normal(tokens, 4 * d), p.float32(tokens, 8, 4 * d)
    at = p.positions(tokens) + 8, p.cos_sin(tokens + 9), 0
    return rows, p.float32(4, 2 * d), p.float32(d), _EPS, *at, state, p.positions(tokens)


def _compress(s: Sizes, tokens: int) -> OpWork:
    """A row is read and kept; an entry is made of eight, by every fourth token."""
    width = 4 * _width(s)
    reads = tokens * width * (s.item + 4 * 2)
    writes = tokens * width * (4 + s.item / 4)
    return OpWork(0, reads, writes, 2.0 * tokens * width)


def _attend_inputs(p: TrueInputs, tokens: int, held: bool) -> tuple[Any, ...]:
    (heads, window), width = p.dims("heads", "window"), _width(p)
    chosen = min(p.context, p.facts.dims["index_topk"])
    pages = p.pages(tokens * chosen)
    blocks = tokens * -(-(window + 1) // p.facts.page_size)  # a block has a page's entries here
    recent = p.cache(blocks)
    own = p.positions(tokens) if held else p.positions(tokens) * 0
    at = own, min(window, p.facts.page_size)
    slots = p.positions(tokens * chosen).view(tokens, chosen).to(torch.int32)
    q, sink, kv = p.normal(tokens, heads, width), p.float32(heads), p.normal(tokens, width)
    start = p.positions(tokens) * (not held) + window
    return q, sink, None if held else kv, recent, start, *at, p.cache(pages), slots, width**-0.5


def _attend(s: Sizes, tokens: int) -> OpWork:
    (heads, window, top_k), width = s.dims("heads", "window", "index_topk"), _width(s)
    seen = tokens * (window + min(s.context, top_k))
    both = tokens * heads * width * s.item
    return OpWork(0, both + tokens * ID, both, 4.0 * seen * heads * width, seen * width * s.kept)


_ATTENDS: dict[str, Any] = {
    "reference": f"{_REF}:window_sparse",
    "tolerance": {"float32": 2e-5, "bfloat16": 1.2e-2, "float16": 3e-3},
    "results": {"": lambda f, q, *_: attended(q, q.shape[2])},
    "heavy": True,
    "layout": "kv",
    "rows": {"": (0, 4, 5, 8)},
    "among": 2,
}


class WindowOps(Area):
    """Attention of DeepSeek-V4."""

    norm_rope: NormRope = op(
        reference=f"{_REF}:norm_rope",
        tolerance=_TOLERANCE,
        results={"": lambda f, x, *_: (form(x),)},
        rows={"": (0, 3)},
        judge=None,
        contiguous=True,
        sized=True,
        compiles=True,
        cost=Cost({"": (_norm_inputs, _norm)}, size=by_latent),
        summary="norm of each head, and rotation of its last dims",
    )
    rope_back: RopeBack = op(
        reference=f"{_REF}:rope_back",
        tolerance=_TOLERANCE,
        results={"": lambda f, x, *_: (form(x),)},
        rows={"": (0, 1)},
        contiguous=True,
        sized=True,
        plain=True,
        compiles=True,
        cost=Cost({"": (_heads_inputs, _back)}, size=by_latent),
        summary="rotation of the output of attention, back",
    )
    compress_windows: CompressWindows = op(
        reference=f"{_REF}:compress_windows",
        tolerance=_TOLERANCE,
        results={
            "": lambda f, rows, ape, weight, *_: (
                ((rows.shape[0], weight.shape[0]), name_of(rows)),
            )
        },
        writes=("state",),
        contiguous=True,
        sized=True,
        waits=True,
        cost=Cost({"": (_compress_inputs, _compress)}, size=by_latent),
        summary="compressed entries of windows that close",
    )
    window_prefill: WindowSparse = op(
        **_ATTENDS,
        cost=Cost({"": (lambda p, n: _attend_inputs(p, n, False), _attend)}, size=by_latent),
        summary="attention over a window and compressed entries, for prefill rows",
    )
    window_decode: WindowSparse = op(
        **_ATTENDS,
        chooses=True,
        cost=Cost(
            {"": (lambda p, n: _attend_inputs(p, n, True), _attend)}, step=("",), size=by_latent
        ),
        summary="attention over a window and compressed entries, for decode rows",
    )
