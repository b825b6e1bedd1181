"""Contracts of what leads into the latent space of attention, and out of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ds_runtime.ops.contract import Dims, Facts
from ds_runtime.ops.contracts.results import name_of, of_heads
from ds_runtime.ops.contracts.work import ID, by_latent, product
from ds_runtime.ops.declare import Area, Cost, OpWork, later, op

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from ds_runtime.ops.contracts.work import Sizes
    from ds_runtime.ops.declare import Form
    from ds_runtime.ops.reference.cases import Case
    from ds_runtime.ops.reference.inputs import TrueInputs
    from ds_runtime.ops.weight import MlaWeights, Packed, Weight

_REF = "ds_runtime.ops.reference.attention.dense"
_TOLERANCE = {"float32": 2e-5, "bfloat16": 1.2e-2, "float16": 3e-3}
cases = later("ds_runtime.ops.reference.cases")
held = later("ds_runtime.ops.weight")


class MlaAbsorb(Protocol):
    """The weight kv_b in its three uses, from one packing.

    * `pack(weight, facts)`: weight [heads · (nope + v), kv_lora]. It has for each head nope rows
      (W_UK), then v rows (W_UV). facts.dims has heads, qk_nope, v and kv_lora; heads are this
      rank's.
    * `expand(latent, packed)`: latent [T, kv_lora]. Returns (k_nope [T, heads, nope], v [T, heads,
      v]).
    * `apply_q(q_nope, q_rope, packed)`: q_nope [T, heads, nope] times W_UK, with q_rope [T, heads,
      rope] after it, unchanged. Returns [T, heads, kv_lora + rope], queries of the cache's rows.
    * `apply_v(x, packed)`: x [T, heads, kv_lora] times W_UVᵀ. Returns [T, heads, v].

    Results are new and in the input's dtype. They accumulate in fp32. Inputs may be strided. T == 0
    is legal. The methods raise TypeError for another kernel's Packed. Source: the DeepSeek-V2
    technical report, arXiv 2405.04434, section 2.1.
    """

    def pack(self, weight: Weight, facts: Facts) -> Packed: ...

    def expand(self, latent: Tensor, packed: Packed) -> tuple[Tensor, Tensor]: ...

    def apply_q(self, q_nope: Tensor, q_rope: Tensor, packed: Packed) -> Tensor: ...

    def apply_v(self, x: Tensor, packed: Packed) -> Tensor: ...


class MlaPrologue(Protocol):
    """Norm of the latent, rotation of q and k, cache write. A fusion.

    * q: [T, heads, nope + rope].
    * kv: [T, kv_lora + rope], of q's dtype.
    * norm_weight: [kv_lora]; eps of the norm, as in RmsNorm.
    * positions, slots: [T] int64.
    * cos_sin: as in Rope.
    * cache: as in CacheWrite.

    Writes latent and k_rope to the cache at the slots that are not negative. Returns new tensors
    (q_rope [T, heads, rope] rotated, latent [T, kv_lora] normed, k_rope [T, rope] rotated) in
    q.dtype. T == 0 is legal.
    """

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        norm_weight: Tensor,
        eps: float,
        positions: Tensor,
        cos_sin: Tensor,
        cache: Tensor,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class MlaInputs(Protocol):
    """From hidden states to absorbed queries, for steps whose rows all attend the cache. A fusion
    that owns its weights, of linears, norms, mla_absorb.apply_q and mla_prologue.

    * `pack(weights, facts)`: MlaWeights of one format. facts.dims has hidden, q_lora, heads,
      qk_nope, qk_rope, v and kv_lora.
    * `apply(x, eps, positions, cos_sin, cache, slots, packed)`: x [T, hidden]; positions, slots [T]
      int64; cos_sin as in Rope; cache as in CacheWrite. eps is that of both norms.

    The latent of queries is norm(q_a x), and the queries are q_b times it. Their nope part is
    multiplied by W_UK as in MlaAbsorb, their rope part is rotated. kv_a x is normed, rotated and
    written as in MlaPrologue. Returns new (query [T, heads, kv_lora + rope], latent [T, q_lora]) in
    x.dtype. T == 0 is legal.
    """

    def pack(self, weights: MlaWeights, facts: Facts) -> Packed: ...

    def apply(
        self,
        x: Tensor,
        eps: float,
        positions: Tensor,
        cos_sin: Tensor,
        cache: Tensor,
        slots: Tensor,
        packed: Packed,
    ) -> tuple[Tensor, Tensor]: ...


def compose_mla_prologue(
    ops: Any,
    q: Tensor,
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    cache: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """MLA_PROLOGUE over the platform's own rms_norm, rope and cache_write."""
    kv_lora = norm_weight.shape[0]
    rope_dim = kv.shape[-1] - kv_lora
    latent = ops.rms_norm(kv[:, :kv_lora], norm_weight, eps)  # [T, kv_lora]
    q_rope, k_rope = ops.rope(q[..., -rope_dim:], kv[:, kv_lora:], positions, cos_sin)
    ops.cache_write(cache, latent, k_rope, slots)
    return q_rope, latent, k_rope


def mla_absorb_samples(facts: Facts) -> Iterator[Case]:
    """The three uses of one packing, on slices of wider tensors, dense and FP8."""
    formats = ("dense", "fp8_block", "int8_channel", "int4_group", *cases.OTHERS)
    shapes = (*((fmt, 0) for fmt in formats), ("fp8_block", 64))
    for fmt, cut in shapes:
        make = cases.Maker(facts, f"{fmt} {cut}")
        heads, nope, v = (facts.dims[name] for name in ("heads", "qk_nope", "v"))
        kv_lora, rope_dim = facts.dims["kv_lora"], facts.dims["qk_rope"]
        weight = make.weight(heads * (nope + v), kv_lora, fmt, offset=(cut, 0))
        here = cases.site(facts, weight)
        calls = [cases.Call((weight, here), method="pack", save="packed")]
        packed = cases.Saved("packed")
        for tokens in (0, 1, 5):
            latent, x = make.normal(tokens, kv_lora), make.normal(tokens, heads, kv_lora)
            q_nope = make.inside(make.normal(tokens, heads, nope), 0, 8)
            calls.append(cases.Call((make.inside(latent, 0, 8), packed), method="expand"))
            q_rope = make.inside(make.normal(tokens, heads, rope_dim), 8, 0)
            calls.append(cases.Call((q_nope, q_rope, packed), method="apply_q"))
            calls.append(cases.Call((x, packed), method="apply_v"))
        foreign = held.Packed("nobody.nothing", weight.shape, {}, 0)
        calls.append(cases.Call((make.normal(1, kv_lora), foreign), "expand", raises=TypeError))
        yield cases.Case(f"{fmt}, offset {cut}", here, tuple(calls))


def mla_prologue_samples(facts: Facts) -> Iterator[Case]:
    """As the model calls it: full q heads, joined kv rows, some tokens being padding."""
    nope, rope_dim, kv_lora = (facts.dims[name] for name in ("qk_nope", "qk_rope", "kv_lora"))
    for tokens, heads, padding in ((0, 2, 0), (1, 1, 0), (11, 3, 2)):
        make = cases.Maker(facts, label := f"{tokens} tokens, {heads} heads")
        cache, _ = make.paged((tokens + 4, 3))
        slots = make.order(cache.rows.shape[0])[:tokens]
        slots[:padding] = -1
        q = make.normal(tokens, heads, nope + rope_dim)
        kv = make.inside(make.normal(tokens, kv_lora + rope_dim), 16, 0)
        positions, table = make.integers(0, 90, tokens), make.cos_sin(90, rope_dim)
        args = (q, kv, make.normal(kv_lora), 1e-6, positions, table, cache, slots)
        yield cases.case(label, facts, *args, written=(6,))


def mla_inputs_samples(facts: Facts) -> Iterator[Case]:
    """Few tokens, padding, three formats. Sizes that facts.dims does not say are small."""
    dims = {"hidden": 64, "q_lora": 32} | dict(facts.dims)
    names = ("hidden", "q_lora", "heads", "qk_nope", "qk_rope", "v", "kv_lora")
    hidden, q_lora, heads, nope, rope_dim, v, kv_lora = (dims[n] for n in names)
    for fmt in ("dense", "fp8_block", "int8_channel"):
        make = cases.Maker(facts, fmt)
        shapes = (
            (q_lora, hidden),
            (heads * (nope + rope_dim), q_lora),
            (kv_lora + rope_dim, hidden),
            (heads * (nope + v), kv_lora),
        )
        q_a, q_b, kv_a, kv_b = (make.weight(*shape, fmt) for shape in shapes)
        q_norm, kv_norm = make.normal(q_lora), make.normal(kv_lora)
        weights = held.MlaWeights(q_a, q_b, kv_a, kv_b, q_norm, kv_norm)
        shape = (q_lora + kv_lora + rope_dim, hidden)
        here = replace(facts, dims=Dims(dims), weight_format=fmt, shape=shape)
        calls = [cases.Call((weights, here), method="pack", save="packed")]
        for tokens, padding in ((0, 0), (1, 0), (7, 2)):
            cache, _ = make.paged((tokens + 4, 3))
            slots = make.order(cache.rows.shape[0])[:tokens]
            slots[:padding] = -1
            positions, table = make.integers(0, 900, tokens), make.cos_sin(900, rope_dim)
            given = (make.normal(tokens, hidden), 1e-6, positions, table, cache, slots)
            calls.append(cases.Call((*given, cases.Saved("packed")), method="apply", written=(4,)))
        foreign = held.Packed("nobody.nothing", shape, {}, 0)
        calls.append(cases.Call((*given, foreign), "apply", raises=TypeError))
        yield cases.Case(fmt, here, tuple(calls))


def _expanded(facts: Facts, x: Tensor) -> tuple[Form, Form]:
    rows, heads, dtype = x.shape[0], facts.dims["heads"], name_of(x)
    nope, v = facts.dims["qk_nope"], facts.dims["v"]
    return ((rows, heads, nope), dtype), ((rows, heads, v), dtype)


def _queries(facts: Facts, x: Tensor) -> tuple[Form, Form]:
    dims, rows, dtype = facts.dims, x.shape[0], name_of(x)
    query = rows, dims["heads"], dims["kv_lora"] + dims["qk_rope"]
    return (query, dtype), ((rows, dims["q_lora"]), dtype)


def _prologue(q: Tensor, kv: Tensor, width: int) -> tuple[Form, Form, Form]:
    (rows, heads), rope = q.shape[:2], kv.shape[1] - width
    dtype = name_of(kv)
    return ((rows, heads, rope), name_of(q)), ((rows, width), dtype), ((rows, rope), dtype)


def _written(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    positions = p.positions(tokens)
    return 1e-6, positions, p.cos_sin(tokens), p.cache(p.pages(tokens)), p.positions(tokens)


def _hidden(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    return p.normal(tokens, p.facts.dims["hidden"]), *_written(p, tokens)


def _prologue_inputs(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    heads, nope, rope, lora = p.dims("heads", "qk_nope", "qk_rope", "kv_lora")
    q, kv = p.normal(tokens, heads, nope + rope), p.normal(tokens, lora + rope)
    return q, kv, p.normal(lora), *_written(p, tokens)


def _q_inputs(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    heads, nope, rope = p.dims("heads", "qk_nope", "qk_rope")
    return p.normal(tokens, heads, nope), p.normal(tokens, heads, rope)


def _v_inputs(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    return (p.normal(tokens, *p.dims("heads", "kv_lora")),)


def _expand_inputs(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    return (p.normal(tokens, p.facts.dims["kv_lora"]),)


def _four(p: TrueInputs) -> MlaWeights:
    """The weights of one layer before attention."""
    hidden, inner, lora = p.dims("hidden", "q_lora", "kv_lora")
    heads, nope, rope, v = p.dims("heads", "qk_nope", "qk_rope", "v")
    shapes = (
        (inner, hidden),
        (heads * (nope + rope), inner),
        (lora + rope, hidden),
        (heads * (nope + v), lora),
    )
    four = (p.weight(*shape) for shape in shapes)
    made: MlaWeights = held.MlaWeights(*four, p.normal(inner), p.normal(lora))
    return made


def _mla_inputs(s: Sizes, tokens: int) -> OpWork:
    """Its four matmuls. What lies between them stays in the kernel."""
    hidden, inner, lora = s.dims("hidden", "q_lora", "kv_lora")
    heads, nope, rope = s.dims("heads", "qk_nope", "qk_rope")
    parts = (
        product(s, inner + lora + rope, hidden, tokens),
        product(s, heads * (nope + rope), inner, tokens),
        _apply_q(s, tokens),
    )
    width = heads * (lora + rope) + inner + lora + rope
    return OpWork(
        sum(part.weights for part in parts),
        tokens * hidden * s.item,
        tokens * width * s.item,
        sum(part.flops for part in parts),
    )


def _mla_prologue(s: Sizes, tokens: int) -> OpWork:
    """Of q only the rope columns are read."""
    heads, lora, rope = s.dims("heads", "kv_lora", "qk_rope")
    q, kv = tokens * heads * rope, tokens * (lora + rope)
    return OpWork(
        lora * s.item if tokens else 0,
        (q + kv) * s.item + tokens * (4 * rope + 2 * ID),
        (q + kv) * s.item + kv * s.kept,
        4.0 * tokens * lora + 3.0 * tokens * (heads + 1) * rope,
    )


def _expand(s: Sizes, tokens: int) -> OpWork:
    """With a weight in the compute dtype, as the two below."""
    heads, nope, v, lora = s.dims("heads", "qk_nope", "v", "kv_lora")
    return product(replace(s, held="dense"), heads * (nope + v), lora, tokens)


def _apply_q(s: Sizes, tokens: int) -> OpWork:
    copied = tokens * s.facts.dims["heads"] * s.facts.dims["qk_rope"] * s.item
    short, long, rest = _absorbed(s, s.facts.dims["qk_nope"], tokens)
    return rest + OpWork(reads=short + copied, writes=long + copied)


def _apply_v(s: Sizes, tokens: int) -> OpWork:
    short, long, rest = _absorbed(s, s.facts.dims["v"], tokens)
    return rest + OpWork(reads=long, writes=short)


def _absorbed(s: Sizes, width: int, tokens: int) -> tuple[float, float, OpWork]:
    """(bytes of rows of this width per head, of latents per head, weight and flops)."""
    heads, lora = s.dims("heads", "kv_lora")
    weight = heads * width * lora * s.item if tokens else 0
    short, long = tokens * heads * width * s.item, tokens * heads * lora * s.item
    return short, long, OpWork(weight, flops=2.0 * tokens * heads * width * lora)


class LatentOps(Area):
    """The weight kv_b, and what is in front of attention."""

    mla_inputs: MlaInputs = op(
        reference="ds_runtime.ops.reference.attention.mla_inputs:ReferenceMlaInputs",
        tolerance={"float32": 5e-5, "bfloat16": 2e-2, "float16": 5e-3},
        results={"apply": lambda f, x, *_: _queries(f, x)},
        writes=("cache",),
        optional=True,
        uses=("linear", "rms_norm", "mla_absorb", "mla_prologue"),
        layout="kv",
        waits=True,
        cost=Cost({"apply": (_hidden, _mla_inputs)}, source=_four, size=by_latent),
        summary="hidden states to absorbed queries and cache entries, fused",
    )
    mla_prologue: MlaPrologue = op(
        reference=f"{_REF}:mla_prologue",
        tolerance=_TOLERANCE,
        results={"": lambda f, q, kv, weight, *_: _prologue(q, kv, weight.shape[0])},
        rows={"": (0, 1, 4, 7)},
        writes=("cache",),
        composition=f"{__name__}:compose_mla_prologue",
        uses=("rms_norm", "rope", "cache_write"),
        layout="kv",
        waits=True,
        cost=Cost({"": (_prologue_inputs, _mla_prologue)}, size=by_latent),
        summary="latent norm, rotation and cache write, fused",
    )
    mla_absorb: MlaAbsorb = op(
        reference=f"{_REF}:ReferenceMlaAbsorb",
        tolerance={**_TOLERANCE, "fp8_w8a8": 6e-2},  # as in linear.py
        results={
            "expand": lambda f, x, packed: _expanded(f, x),
            "apply_q": lambda f, q, rope, packed: of_heads(q, f.dims["kv_lora"] + rope.shape[2]),
            "apply_v": lambda f, x, packed: of_heads(x, f.dims["v"]),
        },
        rows={"expand": (0,), "apply_q": (0, 1), "apply_v": (0,)},
        sized=True,
        heavy=True,
        cost=Cost(
            {
                "apply_q": (_q_inputs, _apply_q),
                "apply_v": (_v_inputs, _apply_v),
                "expand": (_expand_inputs, _expand),
            },
            step=("apply_q", "apply_v"),
        ),
        summary="kv_b: expansion for prefill, absorption for decode",
    )
