"""Contracts of the lightning indexer: it scores every cached token, so that attention reads few.

Per layer: index_prologue makes index queries and caches index keys, index_select keeps the best of
the tokens that a row sees as cache slots (index_scores rates them, index_topk chooses). The ops of
sparse.py attend these. Layers may reuse the slots of an earlier one. Source: DeepSeek-V3.2
technical report; the rotation of the indexer is half-split (its first release had it interleaved,
by mistake).

The index cache is paged like the latent cache and shares its pages' numbers. Slot s is row
s % page_size of page s // page_size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ds_runtime.ops.contracts.attention.index_keys import key_bytes, query_bytes
from ds_runtime.ops.contracts.work import by_index
from ds_runtime.ops.declare import Area, Cost, OpWork, later, op

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from ds_runtime.ops.contract import Facts
    from ds_runtime.ops.contracts.work import Sizes
    from ds_runtime.ops.declare import Form
    from ds_runtime.ops.reference.cases import Case
    from ds_runtime.ops.reference.inputs import TrueInputs
    from ds_runtime.ops.reference.judging import Verdict

_REF = "ds_runtime.ops.reference.attention.index"
torch = later("torch")
cases = later("ds_runtime.ops.reference.cases")
dtypes = later("ds_runtime.ops.dtypes")
judging = later("ds_runtime.ops.reference.judging")
reference = later(_REF)


class IndexScores(Protocol):
    """score(row, s) = key_scale(s) · Σ_h relu(q_h · k_s) · weight_h, of the tokens a row sees.

    * q: [rows, heads, d] as IndexPrologue returns it.
    * cache: one layer in the bound index layout.
    * weights: [rows, heads] float32, of any sign. All constant factors and the queries' scales are
      included.
    * page_table: [sequences, pages] int32.
    * owners: [rows] int32, the sequence of each row, not falling.
    * lens: [rows] int32, the number of tokens that the row sees (≥ 1).

    Returns [rows, pages · page_size] float32, accumulated in fp32. Column s of a row is token s of
    its sequence. Columns from lens[row] on are undefined. Pages without a seen token may hold NaN.
    0 rows is legal.
    """

    def __call__(
        self,
        q: Tensor,
        weights: Tensor,
        cache: Tensor,
        page_table: Tensor,
        owners: Tensor,
        lens: Tensor,
    ) -> Tensor: ...


class IndexTopk(Protocol):
    """The slots of the `k` best tokens that each row sees, of equal ones those that come first.

    * scores: [rows, width] float32, width ≤ pages · page_size, undefined from lens[row] on.
    * owners, lens, page_table: as in IndexScores.
    * page_size: tokens of a page.

    Returns a new [rows, k] int32, slots, each once, in any order. A row that sees fewer than k
    tokens has all of them first, then −1. 0 rows is legal.
    """

    def __call__(
        self,
        scores: Tensor,
        lens: Tensor,
        owners: Tensor,
        page_table: Tensor,
        page_size: int,
        k: int,
    ) -> Tensor: ...


class IndexSelect(Protocol):
    """index_scores and index_topk in one, without storing the scores. A fusion.

    * q, weights, cache, page_table, owners, lens: as in IndexScores.
    * k: as in IndexTopk.

    Returns [rows, k] int32 slots as IndexTopk does. If scores differ by no more than their
    rounding, any of these tokens is right.
    """

    def __call__(
        self,
        q: Tensor,
        weights: Tensor,
        cache: Tensor,
        page_table: Tensor,
        owners: Tensor,
        lens: Tensor,
        k: int,
    ) -> Tensor: ...


SCORES = 1 << 25  # rows are scored in groups so that their scores stay below this many: 128 MiB


def scored_rows(width: int) -> int:
    """Rows that are scored together, where each has scores of `width` tokens."""
    return max(1, SCORES // width)


def compose_index_select(
    ops: Any,
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    page_table: Tensor,
    owners: Tensor,
    lens: Tensor,
    k: int,
) -> Tensor:
    """INDEX_SELECT over the platform's own index_scores and index_topk."""
    page = cache.shape[1]
    step, chosen = scored_rows(page_table.shape[1] * page), []
    if q.shape[0] <= step:
        scores = ops.index_scores(q, weights, cache, page_table, owners, lens)
        return ops.index_topk(scores, lens, owners, page_table, page, k)  # type: ignore[no-any-return]
    for first in range(0, q.shape[0], step):
        some = slice(first, first + step)
        mine, seen = owners[some], lens[some]
        scores = ops.index_scores(q[some], weights[some], cache, page_table, mine, seen)
        chosen.append(ops.index_topk(scores, seen, mine, page_table, page, k))
    every: Tensor = chosen[0].new_empty(q.shape[0], k)
    for i, part in enumerate(chosen):
        every[i * step : i * step + step] = part
    return every


def index_scores_samples(facts: Facts) -> Iterator[Case]:
    """Decode rows, prefill rows of several sequences, page edges, weights of both signs."""
    page, d = facts.page_size, facts.dims["index_dim"]
    steps: tuple[tuple[str, int, tuple[int, ...], tuple[int, ...]], ...] = (
        ("no rows", 4, (3,), (0,)),
        ("one token", 16, (1,), (1,)),
        ("decode", 16, (page, page + 1, 3 * page + 2, 7), (1, 1, 1, 1)),
        ("prefill", 5, (2 * page + 3, 40, 9), (2 * page + 3, 6, 1)),
        ("long", 64, (700, 5), (1, 2)),
    )
    for label, heads, lens, rows in steps:
        make = cases.Maker(facts, label)
        cache, table = make.paged_index(lens)
        owners, seen = make.rows(lens, rows)
        q, scale = make.index_queries(len(owners), heads)
        weights = make.normal(len(owners), heads, dtype=torch.float32) * scale * d**-0.5
        yield cases.case(label, facts, q, weights, cache, table, owners, seen)


def index_select_samples(facts: Facts) -> Iterator[Case]:
    """What index_scores is asked, with few and many tokens to keep."""
    for i, scored in enumerate(index_scores_samples(facts)):
        (call,) = scored.calls
        for k in (16,) if i else (16, 2048):
            yield cases.case(f"{scored.label}, best {k}", facts, *call.args, k)


def index_topk_samples(facts: Facts) -> Iterator[Case]:
    """Ties in plenty, rows that see fewer than k, NaN after what a row sees."""
    page = facts.page_size
    steps: tuple[tuple[str, int, tuple[int, ...], tuple[int, ...], int], ...] = (
        ("no rows", 4, (3,), (0,), 0),
        ("one token", 3, (1,), (1,), 0),
        ("decode", 8, (page, page + 1, 90, 7, 8, 9), (1, 1, 1, 1, 1, 1), 0),
        ("prefill", 8, (2 * page + 30, 40, 9), (2 * page + 30, 6, 1), 0),
        ("ties", 16, (200, 65, 17), (3, 2, 1), 3),
        ("all equal", 5, (50, 3), (2, 1), 1),
        ("many", 2048, (5000, 2048, 2049, 2047), (1, 1, 1, 1), 0),
    )
    for label, k, lens, rows, levels in steps:
        make = cases.Maker(facts, label)
        table = make.table(lens)
        owners, seen = make.rows(lens, rows)
        shape = (len(owners), table.shape[1] * page)
        scores = make.normal(*shape, dtype=torch.float32)
        if levels:
            scores = make.integers(-1, levels - 1, *shape).to(torch.float32)
        scores[torch.arange(shape[1]) >= seen.unsqueeze(1)] = float("nan")
        yield cases.case(label, facts, scores, seen, owners, table, page, k)


def _chosen(rows: Tensor, k: int) -> tuple[Form]:
    return (((rows.shape[0], k), "int32"),)


def _seen(args: Sequence[Any], scores: Tensor) -> Tensor:
    """0 in place of scores of tokens that a row does not see."""
    columns = torch.arange(scores.shape[1], device=scores.device)
    return scores.masked_fill(columns >= args[5].unsqueeze(1), 0.0)


def _judge_scores(
    args: Sequence[Any], got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float
) -> Verdict:
    made, right = (_seen(args, t[0].cpu()) for t in (got, want))
    return judging.disagreement(made, right, tolerance)  # type: ignore[no-any-return]


def _judge_slots(
    args: Sequence[Any], got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float
) -> Verdict:
    """The same slots, in any order, with −1 at the end."""
    slots, lens, k = got[0].cpu(), args[1], args[5]
    count = lens.clamp(max=k).unsqueeze(1)
    if not torch.equal(slots >= 0, torch.arange(k) < count):
        return float("inf"), "-1 is not where a row sees fewer tokens, and only there"
    same = slots.sort(1).values == want[0].sort(1).values
    wrong = (~same.all(1)).nonzero().flatten().tolist()
    return (float("inf"), f"rows {wrong[:8]} choose other slots") if wrong else (0.0, "")


def _judge_selected(
    args: Sequence[Any], got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float
) -> Verdict:
    """As many slots as there are, each once and of a token that its row sees; none is worse than
    the worst of the oracle's by more than rounding of the row's largest score."""
    *scored, k = args
    cache, table, owners, lens = scored[2:]
    slots, page = got[0].cpu().long(), cache.shape[1]
    if not torch.equal(slots >= 0, torch.arange(k) < lens.clamp(max=k).unsqueeze(1)):
        return float("inf"), "-1 is not where a row sees fewer tokens, and only there"
    scores = reference.index_scores(*scored)
    worst = 0.0
    for row, (chosen, seen) in enumerate(zip(slots, lens.tolist(), strict=True)):
        chosen = chosen[chosen >= 0]
        at = chosen.unsqueeze(1) // page == table[int(owners[row])].long()  # [n, pages]
        tokens = at.int().argmax(1) * page + chosen % page
        if not at.any(1).all() or (tokens >= seen).any() or len(tokens.unique()) < len(tokens):
            return float("inf"), f"row {row} chooses tokens that it does not see, or one twice"
        mine = scores[row, :seen]
        least = mine.topk(len(tokens)).values[-1]
        gap = (least - mine[tokens].amin()) / mine.abs().amax().clamp(min=1e-30)
        worst = max(worst, float(gap))
    return worst, f"the worst choice is {worst:.3g} below the best" if worst > tolerance else ""


def _score_inputs(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    heads, d = p.dims("index_heads", "index_dim")
    table, owners, lens = p.rows(tokens)
    q, dtype = p.float32(tokens, heads, d), dtypes.torch_dtype(p.facts.index_dtype)
    q = dtypes.fp8_vectors(q)[0] if dtype == torch.float8_e4m3fn else q.to(dtype)
    cache = p.in_turn(lambda: p.cache(table.numel()))
    return q, p.float32(tokens, heads), cache, table, owners, lens


def _topk_inputs(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    table, owners, lens = p.rows(tokens)
    size = p.facts.page_size
    scores = p.float32(tokens, table.shape[1] * size)
    return scores, lens, owners, table, size, p.facts.dims["index_topk"]


def _select_inputs(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    return *_score_inputs(p, tokens), p.facts.dims["index_topk"]


def _index_scores(s: Sizes, tokens: int) -> OpWork:
    """One row per sequence of `context` tokens, or rows of a prompt behind these."""
    heads, d = s.dims("index_heads", "index_dim")
    seen = s.seen(tokens)
    return OpWork(
        reads=tokens * query_bytes(s),
        writes=4 * seen,
        flops=2.0 * seen * heads * (d + 1),
        cached=s.cached_rows(tokens) * key_bytes(s),
    )


def _index_topk(s: Sizes, tokens: int) -> OpWork:
    """Of the scores those of tokens that a row sees, and what says which these are."""
    seen, chosen = s.seen(tokens), 4 * s.facts.dims["index_topk"]
    return OpWork(0.0, 4 * seen + 8 * tokens, chosen * tokens, seen)


def _index_select(s: Sizes, tokens: int) -> OpWork:
    """What scores read and compute, without writing them."""
    return replace(_index_scores(s, tokens), writes=4 * s.facts.dims["index_topk"] * tokens)


class IndexOps(Area):
    """What chooses the tokens that attention reads."""

    index_select: IndexSelect = op(
        reference=f"{_REF}:index_select",
        tolerance={"float32": 2e-5, "bfloat16": 4e-3, "float16": 4e-3},
        results={"": lambda f, q, w, cache, table, owners, lens, k: _chosen(q, k)},
        judge=_judge_selected,
        composition=f"{__name__}:compose_index_select",
        uses=("index_scores", "index_topk"),
        layout="index",
        chooses=True,
        waits=True,
        cost=Cost({"": (_select_inputs, _index_select)}, step=("",), size=by_index, chooses=True),
        summary="score every cached token and keep the best, fused",
    )
    index_scores: IndexScores = op(
        reference=f"{_REF}:index_scores",
        tolerance={"float32": 2e-5, "bfloat16": 2e-3, "float16": 2e-3},
        results={
            "": lambda f, q, w, cache, table, *_: (
                ((q.shape[0], table.shape[1] * f.page_size), "float32"),
            )
        },
        rows={"": (0, 1, 4, 5)},
        judge=_judge_scores,
        defined=_seen,
        heavy=True,
        layout="index",
        waits=True,
        cost=Cost({"": (_score_inputs, _index_scores)}, step=("",), size=by_index, chooses=True),
        summary="rate every cached token for every row",
    )
    index_topk: IndexTopk = op(
        reference=f"{_REF}:index_topk",
        tolerance={"float32": 0.0, "bfloat16": 0.0, "float16": 0.0},
        results={"": lambda f, scores, lens, owners, table, size, k: _chosen(scores, k)},
        rows={"": (0, 1, 2)},
        judge=_judge_slots,
        cost=Cost({"": (_topk_inputs, _index_topk)}, size=by_index, chooses=True),
        summary="slots of the best tokens of each row",
    )
