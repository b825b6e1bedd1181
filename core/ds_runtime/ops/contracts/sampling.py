"""Sampling contracts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ds_runtime.ops.contracts.results import form
from ds_runtime.ops.contracts.work import ID, by_vocab, rows_of
from ds_runtime.ops.declare import Area, Cost, OpWork, later, op

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from ds_runtime.ops.contract import Facts
    from ds_runtime.ops.contracts.work import Sizes
    from ds_runtime.ops.declare import Form
    from ds_runtime.ops.reference.cases import Case, Maker
    from ds_runtime.ops.reference.inputs import TrueInputs

_REF = "ds_runtime.ops.reference.sampling"
_EXACT = {"float32": 0.0, "bfloat16": 0.0, "float16": 0.0}
_BEST = 5  # alternatives, where they are timed
torch = later("torch")
cases = later("ds_runtime.ops.reference.cases")
reference = later(_REF)


class Sample(Protocol):
    """One token per row by inverse CDF, from one uniform number per row.

    * logits: [rows, vocab] float32, penalties and masks already applied (−inf = forbidden).
    * temperature: [rows] float32; 0 means argmax (lowest id at ties).
    * top_k: [rows] int32, 0 = off.
    * top_p, min_p: [rows] float32 (1 and 0 = off).
    * uniform: [rows] float64 in [0, 1).

    Filters apply to softmax(logits / temperature), in this order:

    1. Keep the top_k largest.
    2. Of these keep the smallest set of largest whose renormalised sum reaches top_p. The first
       always stays.
    3. Drop those below min_p · max.

    "Larger" goes by logit, and at equal logits the lower id comes first. The draw walks the kept
    tokens in order of rising id. It returns the first whose cumulative kept probability exceeds
    uniform · total. Without filters nothing needs to be sorted. Returns a new [rows] int64. Equal
    rows give equal results whatever else is in the batch. Sources: arXiv 1904.09751 (top-p),
    2407.01082 (min-p).
    """

    def __call__(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        uniform: Tensor,
    ) -> Tensor: ...


class MaskLogits(Protocol):
    """Forbid tokens, row by row: their logits become −inf.

    * logits: [rows, vocab] float32, last dim contiguous, rows may be strided.
    * masks: [masks, words] int32 with words = ceil(vocab / 32). Token t is allowed if bit t % 32 of
      word t // 32 is set. Bits from vocab on mean nothing.
    * which: [rows] int32, the mask of each row. A negative number keeps every token of the row.
      Several rows may share a mask.

    Returns a new contiguous [rows, vocab] float32. Kept logits are copied bit for bit, NaN
    included. rows == 0 and masks == 0 are legal.
    """

    def __call__(self, logits: Tensor, masks: Tensor, which: Tensor) -> Tensor: ...


class Logprobs(Protocol):
    """Log-softmax of raw logits at given ids, and the best alternatives.

    * logits: [rows, vocab] float32.
    * ids: [rows] int64.
    * top_n: ≥ 0, how many alternatives.

    Returns new (chosen [rows] float32, values [rows, top_n] float32, top_ids [rows, top_n] int64).
    Alternatives fall, the lower id first at ties. rows == 0 is legal.
    """

    def __call__(
        self, logits: Tensor, ids: Tensor, top_n: int
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def _settled(args: tuple[Tensor, ...]) -> Tensor:
    """Rows whose token does not hang on the last bits of a threshold or a sum: bool [rows]."""
    logits, temperature, top_k, top_p, min_p, uniform = args
    tokens = reference.sample(*args)
    settled: Tensor = torch.ones_like(tokens, dtype=torch.bool)
    for sign in (-1e-5, 1e-5):
        nudged = (uniform + sign).clamp(0, 1 - 1e-9)
        settled &= reference.sample(logits, temperature, top_k, top_p, min_p, nudged) == tokens
        share = torch.where(top_p < 1, top_p + sign, top_p)
        settled &= reference.sample(logits, temperature, top_k, share, min_p, uniform) == tokens
        floor = min_p * (1 + sign)
        settled &= reference.sample(logits, temperature, top_k, top_p, floor, uniform) == tokens
    return settled


def _settings(make: Maker, rows: int) -> tuple[Tensor, ...]:
    def pick(*values: float) -> Tensor:
        found: Tensor = torch.tensor(values)[make.integers(0, len(values), rows)]
        return found

    temperature, top_k = pick(0, 0.3, 1, 1, 2), pick(0, 0, 1, 2, 5, 40).to(torch.int32)
    return temperature, top_k, pick(1, 1, 0.9, 0.5, 1e-3), pick(0, 0, 0.05, 0.5), make.uniform(rows)


def sample_samples(facts: Facts) -> Iterator[Case]:
    """Every filter alone and together, forbidden tokens, ties, both ends of the draw."""
    f32 = torch.float32
    for rows, vocab in ((0, 50), (1, 1), (64, 7), (64, 50), (48, 1000), (12, 6000)):
        make = cases.Maker(facts, label := f"{rows}x{vocab}")
        logits = make.normal(rows, vocab, scale=3, dtype=f32)
        logits[:, 1::3] = float("-inf")
        args = (logits, *_settings(make, rows))
        keep = _settled(args)
        yield cases.case(label, facts, *(t[keep] for t in args))
    tied = torch.tensor([0.0, 1.0, 1.0, -2.0, 1.0, 0.0]).repeat(8, 1)
    rows_of = torch.ones(8)
    draws = torch.tensor([0, 0.1, 0.3, 0.45, 0.6, 0.75, 0.9, 0.999], dtype=torch.float64)
    for label, temperature, top_k in (
        ("ties, greedy", 0, 0),
        ("ties", 1, 0),
        ("ties, top 2", 1, 2),
    ):
        k = torch.full((8,), top_k, dtype=torch.int32)
        yield cases.case(label, facts, tied, rows_of * temperature, k, rows_of, rows_of * 0, draws)


def mask_logits_samples(facts: Facts) -> Iterator[Case]:
    """No rows, no masks, shared masks, a part of a word; everything forbidden; NaN kept."""
    f32 = torch.float32
    shapes = ((0, 40, 1), (3, 40, 0), (1, 1, 1), (4, 31, 2), (5, 32, 3), (6, 33, 1), (7, 6001, 4))
    for rows, vocab, count in shapes:
        make = cases.Maker(facts, label := f"{rows}x{vocab}, {count} masks")
        logits = make.inside(make.normal(rows, vocab, scale=3, dtype=f32))
        masks = make.integers(-(1 << 31), 1 << 31, count, -(-vocab // 32)).to(torch.int32)
        which = make.integers(-1, count, rows).to(torch.int32)
        yield cases.case(label, facts, logits, masks, which)
    logits = torch.tensor([[1.0, float("nan"), float("-inf"), float("inf"), -0.0]]).repeat(3, 1)
    masks = torch.tensor([[0], [-1], [0b01010]], dtype=torch.int32)
    yield cases.case("special", facts, logits, masks, torch.tensor([2, 0, 1], dtype=torch.int32))


def logprobs_samples(facts: Facts) -> Iterator[Case]:
    """No rows, no alternatives, all of them; ties, forbidden tokens, large logits."""
    f32 = torch.float32
    for rows, vocab, top_n in ((0, 9, 2), (1, 1, 1), (5, 33, 0), (17, 1000, 20), (3, 7, 7)):
        make = cases.Maker(facts, label := f"{rows}x{vocab}, best {top_n}")
        logits = make.normal(rows, vocab, scale=4, dtype=f32)
        yield cases.case(label, facts, logits, make.integers(0, vocab, rows), top_n)
    tied = torch.tensor([[2.0, 5.0, 2.0, 5.0, float("-inf"), 5.0], [0.0] * 6])
    yield cases.case("ties, forbidden", facts, tied, torch.tensor([4, 3]), 5)
    make = cases.Maker(facts, "large")
    logits = make.normal(4, 200, scale=1e4, dtype=f32)
    yield cases.case("large", facts, logits, make.integers(0, 200, 4), 3)


def _alternatives(rows: int, n: int) -> tuple[Form, ...]:
    return ((rows,), "float32"), ((rows, n), "float32"), ((rows, n), "int64")


def _masked(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    """A mask of its own for every row."""
    words = (tokens, -(-p.vocab // 32))
    masks = torch.full(words, 0x5555, dtype=torch.int32, device=p.device)
    return p.float32(tokens, p.vocab), masks, p.positions(tokens).to(torch.int32)


def _drawn(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    """Temperature alone, as most requests have it."""
    ones, none = (make(tokens, device=p.device) for make in (torch.ones, torch.zeros))
    uniform = torch.rand(tokens, dtype=torch.float64, device=p.device)
    return p.float32(tokens, p.vocab), ones, none.to(torch.int32), ones, none, uniform


def _asked(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    ids = torch.randint(p.vocab, (tokens,), device=p.device)
    return p.float32(tokens, p.vocab), ids, _BEST


def _forbidden(s: Sizes, tokens: int) -> OpWork:
    """A mask has a bit for each logit."""
    return rows_of(tokens, 4 * (s.vocab + -(-s.vocab // 32) + 1), 4 * s.vocab, 0.0)


def _sampled(s: Sizes, tokens: int) -> OpWork:
    """Four parameters of a row, and a uniform number of float64."""
    return rows_of(tokens, 4 * (s.vocab + 4) + 8, ID, 3.0 * s.vocab)


def _rated(s: Sizes, tokens: int) -> OpWork:
    return rows_of(tokens, 4 * s.vocab + ID, 4 + _BEST * (4 + ID), 3.0 * s.vocab)


class SamplingOps(Area):
    """From logits to tokens."""

    mask_logits: MaskLogits = op(
        reference=f"{_REF}:mask_logits",
        tolerance=_EXACT,
        results={"": lambda f, logits, *_: (form(logits),)},
        rows={"": (0, 2)},
        cost=Cost({"": (_masked, _forbidden)}, size=by_vocab, float32=True),
        summary="forbid the tokens that a grammar does not allow",
    )
    sample: Sample = op(
        reference=f"{_REF}:sample",
        tolerance=_EXACT,
        results={"": lambda f, logits, *_: (((logits.shape[0],), "int64"),)},
        rows={"": (0, 1, 2, 3, 4, 5)},
        own_rows=True,
        waits=True,
        cost=Cost({"": (_drawn, _sampled)}, size=by_vocab, float32=True),
        summary="temperature, top-k, top-p, min-p sampling",
    )
    logprobs: Logprobs = op(
        reference=f"{_REF}:logprobs",
        tolerance={"float32": 1e-5, "bfloat16": 1e-5, "float16": 1e-5},
        results={"": lambda f, logits, ids, n: _alternatives(logits.shape[0], n)},
        rows={"": (0, 1)},
        waits=True,
        cost=Cost({"": (_asked, _rated)}, size=by_vocab, float32=True),
        summary="log-probabilities of chosen and best tokens",
    )
