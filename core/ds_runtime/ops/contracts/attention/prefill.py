"""Contracts of attention among new tokens, and of its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ds_runtime.ops.contracts.results import attended, codes, form
from ds_runtime.ops.contracts.work import SCALE, by_heads, rows_of
from ds_runtime.ops.declare import Area, Cost, OpWork, later, op

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from ds_runtime.ops.batch import Segments
    from ds_runtime.ops.contract import Facts
    from ds_runtime.ops.contracts.work import Sizes
    from ds_runtime.ops.reference.cases import Case
    from ds_runtime.ops.reference.inputs import TrueInputs

_REF = "ds_runtime.ops.reference.attention.dense"
_TOLERANCE = {"float32": 2e-5, "bfloat16": 1.2e-2, "float16": 3e-3}
torch = later("torch")
cases = later("ds_runtime.ops.reference.cases")
judging = later("ds_runtime.ops.reference.judging")
reference = later(_REF)


class MhaPrefill(Protocol):
    """Variable-length multi-head attention with log-sum-exp.

    * q: [Tq, heads, nope] and q_rope: [Tq, heads, rope] are the two parts of queries.
    * k: [Tk, heads, nope] and k_rope: [Tk, rope] are the parts of keys. All heads share k_rope.
    * v: [Tk, heads, d_v] of any width.
    * Head dims are contiguous, rows may be strided; `with_rope` joins parts.
    * Sequence i owns q_segs.lens[i] queries and k_segs.lens[i] keys (one k segment per q segment).
    * causal: query j of a sequence sees keys ≤ j + (k_len − q_len). Otherwise it sees all keys of
      its sequence.

    Softmax in fp32 of (q·k + q_rope·k_rope)·scale, scale > 0. Returns (out [Tq, heads, d_v] in
    q.dtype, lse [Tq, heads] float32, natural log), both new. A query without keys has out 0 and lse
    −inf. Zero sequences or tokens are legal.
    """

    def __call__(
        self,
        q: Tensor,
        q_rope: Tensor,
        k: Tensor,
        k_rope: Tensor,
        v: Tensor,
        q_segs: Segments,
        k_segs: Segments,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]: ...


class MhaPrefillQuantize(Protocol):
    """QuantizeGroup of MhaPrefill's out, among new tokens alone. A fusion.

    q … v, segs and scale as in MhaPrefill with q_segs = k_segs = segs, causal. `group` is d_v, so
    each head has one scale. `ue8m0` as in QuantizeGroup. The result is rounded to q.dtype before it
    is quantised. Returns (codes [T, heads · d_v] float8_e4m3fn, scale [T, heads] float32, of any
    strides).
    """

    def __call__(
        self,
        q: Tensor,
        q_rope: Tensor,
        k: Tensor,
        k_rope: Tensor,
        v: Tensor,
        segs: Segments,
        scale: float,
        group: int,
        ue8m0: bool,
    ) -> tuple[Tensor, Tensor]: ...


class MergeState(Protocol):
    """Combine two partial attentions of the same queries over disjoint keys.

    * out_a, out_b: [tokens, heads, d] of one dtype.
    * lse_a, lse_b: [tokens, heads] float32, natural log, −inf where a part saw no key. If both are
      −inf, out is 0 and lse −inf.

    Returns new (out [tokens, heads, d] in out_a.dtype, lse [tokens, heads] float32). Computed in
    fp32. tokens == 0 is legal.
    """

    def __call__(
        self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
    ) -> tuple[Tensor, Tensor]: ...


_SEGMENTS: tuple[tuple[str, tuple[int, ...], tuple[int, ...], bool], ...] = (
    ("no sequences", (), (), True),
    ("one token", (1,), (1,), True),
    ("causal", (5, 1, 17), (5, 1, 17), True),
    ("causal after a prefix", (3, 4), (20, 4), True),
    ("prefix", (3, 7, 1), (33, 2, 16), False),
    ("without keys", (3, 2, 4), (0, 5, 0), False),
    ("without queries", (0, 4, 0), (3, 4, 0), True),
    ("fewer keys than queries", (6, 2), (2, 1), True),
)


def mha_prefill_samples(facts: Facts) -> Iterator[Case]:
    """Ragged, empty and prefixed sequences; slices of wider heads; sharp softmax."""
    heads, nope, rope, d_v = (facts.dims[n] for n in ("heads", "qk_nope", "qk_rope", "v"))
    for label, q_lens, k_lens, causal in _SEGMENTS:
        make = cases.Maker(facts, label)
        q_segs, k_segs = cases.segments(*q_lens), cases.segments(*k_lens)
        q = make.inside(make.normal(q_segs.total, heads, nope), 0, rope)
        k = make.inside(make.normal(k_segs.total, heads, nope), 0, d_v)
        v = make.inside(make.normal(k_segs.total, heads, d_v), nope, 0)
        q_rope, k_rope = (
            make.normal(q_segs.total, heads, rope),
            make.inside(make.normal(k_segs.total, rope), 3, 2),
        )
        scale = (nope + rope) ** -0.5
        yield cases.case(label, facts, q, q_rope, k, k_rope, v, q_segs, k_segs, causal, scale)
    make, segs = cases.Maker(facts, "sharp"), cases.segments(9, 2)
    q, k = make.inside(make.normal(11, heads, nope)), make.normal(11, heads, nope)
    q_rope, k_rope = make.inside(make.normal(11, heads, rope)), make.normal(11, rope)
    v = make.normal(11, heads, d_v, scale=50)
    yield cases.case("sharp", facts, q, q_rope, k, k_rope, v, segs, segs, True, 2.0)


def mha_prefill_quantize_samples(facts: Facts) -> Iterator[Case]:
    """Both scale kinds; ragged and empty sequences, slices of wider heads, outliers."""
    heads, nope, rope, d_v = (facts.dims[n] for n in ("heads", "qk_nope", "qk_rope", "v"))
    scale = (nope + rope) ** -0.5
    for ue8m0 in (False, True):
        kind = "power-of-two" if ue8m0 else "float"
        for lens in ((), (1,), (5, 0, 70), (200, 3)):
            make, segs = cases.Maker(facts, label := f"{kind} {lens}"), cases.segments(*lens)
            total = segs.total
            q = make.inside(make.normal(total, heads, nope), 0, rope)
            k = make.inside(make.normal(total, heads, nope), 0, d_v)
            v = make.inside(make.normal(total, heads, d_v), nope, 0)
            v[1:2] *= 1e4  # a token that all behind it see
            q_rope, k_rope = make.normal(total, heads, rope), make.normal(total, rope)
            yield cases.case(label, facts, q, q_rope, k, k_rope, v, segs, scale, d_v, ue8m0)


def merge_state_samples(facts: Facts) -> Iterator[Case]:
    """Parts without keys, one part far heavier than the other."""
    for tokens, heads, d in ((0, 2, 8), (1, 1, 3), (9, 3, 32)):
        make = cases.Maker(facts, label := f"{tokens}x{heads}x{d}")
        out_a, out_b = make.normal(tokens, heads, d), make.normal(tokens, heads, d)
        lse_a, lse_b = (make.normal(tokens, heads, scale=5, dtype=torch.float32) for _ in "ab")
        yield cases.case(label, facts, out_a, lse_a, out_b, lse_b)
    inf = float("-inf")
    lse_a = torch.tensor([[inf, inf], [3.0, inf], [80.0, -90.0]])
    lse_b = torch.tensor([[inf, 2.0], [inf, -4.0], [-80.0, 90.0]])
    make = cases.Maker(facts, "empty parts")
    out_a, out_b = make.normal(3, 2, 16), make.normal(3, 2, 16)
    out_a[lse_a == inf], out_b[lse_b == inf] = 0, 0
    yield cases.case("empty parts", facts, out_a, lse_a, out_b, lse_b)


def _values(*args: Any) -> Any:
    """MhaPrefill's values from the inputs of MhaPrefillQuantize."""
    *parts, segs, scale = args
    return reference.mha_prefill(*parts, segs, segs, True, scale)[0].flatten(1)


def _tokens(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    heads, nope, rope, v = p.dims("heads", "qk_nope", "qk_rope", "v")
    queries = p.normal(tokens, heads, nope), p.normal(tokens, heads, rope)
    keys = p.normal(tokens, heads, nope), p.normal(tokens, rope)
    return *queries, *keys, p.normal(tokens, heads, v)


def _scale(s: Sizes) -> float:
    return float(sum(s.dims("qk_nope", "qk_rope")) ** -0.5)


def _inputs(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    segs = p.segments(tokens)
    return *_tokens(p, tokens), segs, segs, True, _scale(p)


def _quantised_inputs(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    return *_tokens(p, tokens), p.segments(tokens), _scale(p), p.facts.dims["v"], False


def _parts(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    heads, v = p.dims("heads", "v")
    two = [(p.normal(tokens, heads, v), p.float32(tokens, heads)) for _ in range(2)]
    return *two[0], *two[1]


def _attended(s: Sizes, tokens: int) -> OpWork:
    """The new tokens of one sequence, causal, and the log-sum-exp of each head."""
    heads, v = s.dims("heads", "v")
    return _causal(s, tokens, heads * (v * s.item + 4))


def _rounded(s: Sizes, tokens: int) -> OpWork:
    """The same as codes, a scale for each head."""
    heads, v = s.dims("heads", "v")
    return _causal(s, tokens, heads * (v + SCALE))


def _causal(s: Sizes, tokens: int, written: float) -> OpWork:
    heads, nope, rope, v = s.dims("heads", "qk_nope", "qk_rope", "v")
    read = (heads * (2 * nope + rope + v) + rope) * s.item
    flops = 1.0 * (tokens + 1) * heads * (nope + rope + v)
    return rows_of(tokens, read, written, flops)


def _merged(s: Sizes, tokens: int) -> OpWork:
    heads, v = s.dims("heads", "v")
    each = heads * (v * s.item + 4)
    return rows_of(tokens, 2 * each, each, 4.0 * heads * v)


class PrefillOps(Area):
    """Attention of prompts, over keys and values of all heads."""

    mha_prefill: MhaPrefill = op(
        reference=f"{_REF}:mha_prefill",
        tolerance=_TOLERANCE,
        results={"": lambda f, q, q_rope, k, k_rope, v, *_: attended(q, v.shape[2])},
        by_sequence=True,
        sized=True,
        heavy=True,
        waits=True,
        cost=Cost({"": (_inputs, _attended)}, size=by_heads),
        summary="variable-length attention with log-sum-exp",
    )
    mha_prefill_quantize: MhaPrefillQuantize = op(
        reference=f"{_REF}:mha_prefill_quantize",
        tolerance={"float32": 4e-2, "bfloat16": 4e-2, "float16": 4e-2},  # of e4m3
        results={
            "": lambda f, q, q_rope, k, k_rope, v, segs, scale, group, u: codes(
                (q.shape[0], q.shape[1] * v.shape[2]), group
            )
        },
        by_sequence=True,
        judge=lambda *given: judging.fused_codes(_values, *given),
        optional=True,
        uses=("mha_prefill",),
        waits=True,
        cost=Cost({"": (_quantised_inputs, _rounded)}, size=by_heads),
        summary="attention of new tokens and FP8 quantisation, fused",
    )
    merge_state: MergeState = op(
        reference=f"{_REF}:merge_state",
        tolerance=_TOLERANCE,
        results={"": lambda f, a, lse, *_: (form(a), form(lse))},
        rows={"": (0, 1, 2, 3)},
        cost=Cost({"": (_parts, _merged)}, size=by_heads),
        summary="merge partial attentions by log-sum-exp",
    )
