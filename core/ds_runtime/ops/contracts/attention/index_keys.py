"""Contract of the indexer's queries and keys, which index.py scores."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

from ds_runtime.ops.contract import FP4_KEYS
from ds_runtime.ops.contracts.work import ID, ITEM_BYTES, SCALE, by_index
from ds_runtime.ops.declare import Area, Cost, OpWork, later, op

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from ds_runtime.ops.contract import Facts
    from ds_runtime.ops.contracts.work import Sizes
    from ds_runtime.ops.reference.cases import Case
    from ds_runtime.ops.reference.inputs import TrueInputs
    from ds_runtime.ops.reference.judging import Verdict

_REF = "ds_runtime.ops.reference.attention.index"
torch = later("torch")
cases = later("ds_runtime.ops.reference.cases")
dtypes = later("ds_runtime.ops.dtypes")
judging = later("ds_runtime.ops.reference.judging")
reference = later(_REF)
FP4_ROUNDING = 0.2  # of e2m1: at most a fifth of a number that is no less than its smallest normal


class IndexPrologue(Protocol):
    """Norm of the index key, rotation of both, Hadamard, encoding, cache write.

    * q: [T, heads, d] and k: [T, d] in the compute dtype. Last dims are contiguous, outer dims may
      be strided. heads may be 0 if only keys are needed. d is a power of two.
    * cos_sin: [positions, r] float32 as in Rope.
    * cache: one layer in the bound index layout, in facts.index_dtype.
    * slots: [T] int64, distinct; negative ones are skipped.

    All of these steps run in fp32:

    1. k becomes LayerNorm(k) · norm_weight + norm_bias (both [d] float32; biased variance plus
       eps).
    2. The first r dims of q and k are rotated by position. If `interleaved`, they are rotated as
       pairs (x0,x1)…, otherwise as halves (xᵢ, x[i + r/2]).
    3. Both are multiplied by the Hadamard matrix of size d (Sylvester's order) · d^-½.
    4. Both are encoded, per key and per query head. For float8_e4m3fn, scale = max(amax, 1e-4) /
       448 rounded up to a power of two. float4_e2m1fn_x2 is encoded as in IndexEncode. For other
       dtypes the scale is 1.

    Writes the keys at `slots` and nothing else. Returns (queries [T, heads, d] in
    facts.index_dtype, scale [T, heads] float32): the query is their product. T == 0 is legal.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        eps: float,
        positions: Tensor,
        cos_sin: Tensor,
        interleaved: bool,
        cache: Tensor,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor]: ...


class IndexEncode(Protocol):
    """Rotation of index queries, Hadamard of queries and keys, encoding, cache write.

    * q: [T, heads, d] and k: [T, d]. k is rotated already, as CompressWindows returns it. Last dims
      are contiguous, outer dims may be strided.
    * cos_sin: [positions, r] float32 as in Rope. The last r dims of q are rotated as pairs by
      position.
    * mixed: whether both are multiplied by the Hadamard matrix as in IndexPrologue. Then d is a
      power of two.
    * cache, slots, the encoding and the results are as in IndexPrologue. All of it runs in fp32.

    The cache may also be float4_e2m1fn_x2, with d a multiple of 32. Every 32 numbers then have
    scale = max(amax / 6, 2⁻¹²⁶) rounded up to a power of two. The numbers divided by it are rounded
    to e2m1, ties to even. Queries are returned in q.dtype, rounded in this way, with scale 1.

    T == 0 is legal.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        mixed: bool,
        cache: Tensor,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor]: ...


def index_encode_samples(facts: Facts) -> Iterator[Case]:
    """Slices, padding alone and among others, with and without the Hadamard matrix."""
    d, rope = facts.dims["index_dim"], facts.dims["qk_rope"]
    for tokens, heads, padding, mixed in (
        (0, 3, 0, True),
        (1, 1, 0, False),
        (11, 5, 3, True),
        (9, 4, 9, False),
    ):
        make = cases.Maker(facts, label := f"{tokens} tokens, {padding} padding, mixed {mixed}")
        cache, _ = make.paged_index((tokens + 4, 3))
        slots = make.order(cache.rows.shape[0])[:tokens]
        slots[:padding] = -1
        q, k = make.normal(tokens, heads, d, scale=3), make.inside(make.normal(tokens, d), 8, 0)
        at = make.integers(0, 900, tokens), make.cos_sin(900, rope)
        yield cases.case(label, facts, q, k, *at, mixed, cache, slots, written=(5,))


def index_prologue_samples(facts: Facts) -> Iterator[Case]:
    """Slices as the model makes them, padding, no heads, both rotations, far positions."""
    d, rope = facts.dims["index_dim"], facts.dims["qk_rope"]
    for tokens, heads, padding, interleaved in (
        (0, 3, 0, False),
        (1, 1, 0, True),
        (11, 5, 3, False),
        (9, 4, 1, True),
        (6, 0, 2, False),
    ):
        make = cases.Maker(
            facts, label := f"{tokens} tokens, {heads} heads, interleaved {interleaved}"
        )
        cache, _ = make.paged_index((tokens + 4, 3))
        slots = make.order(cache.rows.shape[0])[:tokens]
        slots[:padding] = -1
        q, k = make.normal(tokens, heads, d, scale=3), make.inside(make.normal(tokens, d), 8, 0)
        norm = make.normal(d, dtype=torch.float32), make.normal(d, dtype=torch.float32)
        positions, table = make.integers(0, 900, tokens), make.cos_sin(900, rope)
        args = (q, k, *norm, 1e-6, positions, table, interleaved, cache, slots)
        yield cases.case(label, facts, *args, written=(8,))


def _judge_prologue(
    args: Sequence[Any], got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float
) -> Verdict:
    """Queries times their scale, rounded as FP8 where that is what they are."""
    q, scale = (t.cpu() for t in got)
    fp8 = dtypes.is_fp8(q.dtype)
    if fp8 and not judging.powers_of_two(scale):
        return float("inf"), "a scale is no power of two"
    slack = max(tolerance, judging.FP8_ROUNDING) if fp8 else tolerance
    made = q.to(torch.float64) * scale.to(torch.float64).unsqueeze(-1)
    return judging.disagreement(made, want[0] * want[1].unsqueeze(-1), slack)  # type: ignore[no-any-return]


def _prologue_inputs(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    heads, d = p.dims("index_heads", "index_dim")
    q, k, positions = p.normal(tokens, heads, d), p.normal(tokens, d), p.positions(tokens)
    norm = p.float32(d), p.float32(d), 1e-6
    cache = p.cache(p.pages(tokens))
    return q, k, *norm, positions, p.cos_sin(tokens), False, cache, p.positions(tokens)


def _encode_inputs(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    q, k, *_, positions, table, _, cache, slots = _prologue_inputs(p, tokens)
    return q, k, positions, table, True, cache, slots


def key_bytes(s: Sizes) -> float:
    """Of one in the cache: FP8 has a scale, FP4 several."""
    if s.facts.index_dtype == FP4_KEYS:
        return s.facts.dims["index_dim"] * 17 / 32
    item = ITEM_BYTES[s.facts.index_dtype]
    return s.facts.dims["index_dim"] * item + (SCALE if item == 1 else 0)


def query_bytes(s: Sizes) -> float:
    """Of all heads of one."""
    heads, d = s.dims("index_heads", "index_dim")
    return heads * (d * ITEM_BYTES[query_dtype(s.facts)] + SCALE)


def query_dtype(facts: Facts) -> str:
    """Of index queries: that of keys, where these are not packed."""
    return facts.dtype if facts.index_dtype == FP4_KEYS else facts.index_dtype


def _index_prologue(s: Sizes, tokens: int) -> OpWork:
    """A query and a key per token, to the cache and back."""
    heads, d, rope = s.dims("index_heads", "index_dim", "qk_rope")
    each = (heads + 1) * d
    return OpWork(
        reads=tokens * (each * s.item + 4 * rope + ID),
        writes=tokens * (query_bytes(s) + key_bytes(s)),
        flops=tokens * each * (3.0 + math.log2(d)),
    )


class IndexKeyOps(Area):
    """Keys of the index cache, and queries."""

    index_prologue: IndexPrologue = op(
        reference=f"{_REF}:index_prologue",
        tolerance={"float32": 1e-5, "bfloat16": 8e-3, "float16": 2e-3, FP4_KEYS: FP4_ROUNDING},
        results={
            "": lambda f, q, *_: ((tuple(q.shape), f.index_dtype), (tuple(q.shape[:2]), "float32"))
        },
        rows={"": (0, 1, 5, 9)},
        writes=("cache",),
        judge=_judge_prologue,
        layout="index",
        waits=True,
        cost=Cost({"": (_prologue_inputs, _index_prologue)}, size=by_index),
        summary="index query and key: norm, rotation, Hadamard, encoding and cache write",
    )
    index_encode: IndexEncode = op(
        reference=f"{_REF}:index_encode",
        tolerance={"float32": 1e-5, "bfloat16": 8e-3, "float16": 2e-3, FP4_KEYS: FP4_ROUNDING},
        results={
            "": lambda f, q, *_: ((tuple(q.shape), query_dtype(f)), (tuple(q.shape[:2]), "float32"))
        },
        rows={"": (0, 1, 2, 6)},
        writes=("cache",),
        judge=_judge_prologue,
        layout="index",
        waits=True,
        cost=Cost({"": (_encode_inputs, _index_prologue)}, size=by_index),
        summary="index queries and compressed keys: rotation, Hadamard, encoding and cache write",
    )
