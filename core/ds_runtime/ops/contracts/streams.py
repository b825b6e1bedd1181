"""Contracts of residual streams: what a layer reads of several, and how they are mixed again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ds_runtime.ops.contracts.results import form, name_of
from ds_runtime.ops.declare import Area, Cost, OpWork, later, op

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from ds_runtime.ops.contract import Facts
    from ds_runtime.ops.contracts.work import Sizes
    from ds_runtime.ops.reference.cases import Case, Maker
    from ds_runtime.ops.reference.inputs import TrueInputs

_REF = "ds_runtime.ops.reference.streams"
_TOLERANCE = {"float32": 2e-5, "bfloat16": 8e-3, "float16": 2e-3}
_EPS, _ROUNDS = 1e-6, 20
torch = later("torch")
cases = later("ds_runtime.ops.reference.cases")


class HcPre(Protocol):
    """What a sublayer reads of n residual streams, and how its result returns to them.

    x: [tokens, n, d] contiguous; fn: [n · (2 + n), n · d], base: [n · (2 + n)] and scale: [3], all
    float32. All of it runs in fp32:

    * m = fn · flat(x) / sqrt(mean(flat(x)²) + eps), cut into n, n and n · n.
    * pre = σ(m₀ · scale₀ + base₀) + hc_eps.
    * post = 2σ(m₁ · scale₁ + base₁).
    * mix = softmax of the rows of m₂ · scale₂ + base₂ as [n, n], plus hc_eps. Then its columns are
      divided by (their sum + hc_eps). `rounds` − 1 times, its rows and then its columns are divided
      again.

    Returns (Σᵢ preᵢ · xᵢ [tokens, d] in x.dtype, post [tokens, n] float32, mix [tokens, n, n]
    float32). tokens == 0 is legal.
    Source: manifold-constrained hyper-connections, arXiv 2512.24880.
    """

    def __call__(
        self,
        x: Tensor,
        fn: Tensor,
        base: Tensor,
        scale: Tensor,
        eps: float,
        hc_eps: float,
        rounds: int,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class HcPost(Protocol):
    """The streams after a sublayer: postₖ · y + Σⱼ mix[j, k] · xⱼ, computed in fp32.

    * y: [tokens, d], rows may be strided.
    * x: [tokens, n, d] contiguous.
    * post, mix: as HcPre returns them.

    Returns a new contiguous [tokens, n, d] in x.dtype. tokens == 0 is legal.
    """

    def __call__(self, y: Tensor, x: Tensor, post: Tensor, mix: Tensor) -> Tensor: ...


class HcHead(Protocol):
    """The streams of the last layer as one: Σᵢ preᵢ · xᵢ, pre as in HcPre.

    * x: [tokens, n, d] contiguous.
    * fn: [n, n · d], base: [n], scale: [1], all float32.
    * eps, hc_eps: as in HcPre.

    Returns a new [tokens, d] in x.dtype. tokens == 0 is legal.
    """

    def __call__(
        self, x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float, hc_eps: float
    ) -> Tensor: ...


_SHAPES = ((0, 4, 16), (1, 4, 33), (7, 4, 64), (5, 2, 40), (3, 1, 8))


def _weights(make: Maker, rows: int, n: int, d: int, scales: int) -> tuple[Tensor, ...]:
    f32 = torch.float32
    fn = make.normal(rows, n * d, scale=(n * d) ** -0.5, dtype=f32)
    return fn, make.normal(rows, dtype=f32), make.normal(scales, dtype=f32)


def hc_pre_samples(facts: Facts) -> Iterator[Case]:
    """One, two and four streams; large and small ones; few rounds."""
    for tokens, n, d in _SHAPES:
        make = cases.Maker(facts, label := f"{tokens} tokens, {n} streams of {d}")
        x, weights = make.normal(tokens, n, d), _weights(make, n * (2 + n), n, d, 3)
        yield cases.case(label, facts, x, *weights, _EPS, _EPS, _ROUNDS)
    for label, size in (("large", 300.0), ("small", 1e-3)):
        make = cases.Maker(facts, label)
        x = make.normal(6, 4, 32, scale=size)
        yield cases.case(label, facts, x, *_weights(make, 24, 4, 32, 3), _EPS, 1e-4, 1)


def hc_post_samples(facts: Facts) -> Iterator[Case]:
    """The same sizes; strided results of sublayers."""
    for tokens, n, d in _SHAPES:
        make = cases.Maker(facts, label := f"{tokens} tokens, {n} streams of {d}")
        y, x = make.inside(make.normal(tokens, d)), make.normal(tokens, n, d)
        post, mix = make.uniform(tokens, n) * 2, make.uniform(tokens, n, n)
        yield cases.case(label, facts, y, x, post.to(torch.float32), mix.to(torch.float32))


def hc_head_samples(facts: Facts) -> Iterator[Case]:
    """The same sizes."""
    for tokens, n, d in _SHAPES:
        make = cases.Maker(facts, label := f"{tokens} tokens, {n} streams of {d}")
        yield cases.case(label, facts, make.normal(tokens, n, d), *_weights(make, n, n, d, 1),
                         _EPS, _EPS)  # fmt: skip


def _inputs(p: TrueInputs, tokens: int, rows: int, scales: int) -> tuple[Any, ...]:
    n, d = p.dims("streams", "hidden")
    fn = p.in_turn(lambda: p.float32(rows, n * d))
    return p.normal(tokens, n, d), fn, p.float32(rows), p.float32(scales), _EPS, _EPS


def _pre_inputs(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    (n,) = p.dims("streams")
    return *_inputs(p, tokens, n * (2 + n), 3), _ROUNDS


def _post_inputs(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    n, d = p.dims("streams", "hidden")
    shares = p.float32(tokens, n), p.float32(tokens, n, n)
    return p.normal(tokens, d), p.normal(tokens, n, d), *shares


def _collapse(s: Sizes, tokens: int, rows: int) -> OpWork:
    n, d = s.dims("streams", "hidden")
    flops = tokens * (2.0 * rows + 4) * n * d
    return OpWork(4.0 * rows * n * d, tokens * n * d * s.item, tokens * d * s.item, flops)


def _pre(s: Sizes, tokens: int) -> OpWork:
    (n,) = s.dims("streams")
    return _collapse(s, tokens, n * (2 + n)) + OpWork(writes=4.0 * tokens * n * (1 + n))


def _post(s: Sizes, tokens: int) -> OpWork:
    n, d = s.dims("streams", "hidden")
    reads = tokens * ((n + 1) * d * s.item + 4 * n * (1 + n))
    return OpWork(0, reads, tokens * n * d * s.item, 2.0 * tokens * n * (1 + n) * d)


def _pre_forms(x: Tensor) -> tuple[Any, ...]:
    tokens, n, d = x.shape
    one = ((tokens, d), name_of(x))
    return one, ((tokens, n), "float32"), ((tokens, n, n), "float32")


class StreamOps(Area):
    """Several residual streams."""

    hc_pre: HcPre = op(
        reference=f"{_REF}:hc_pre",
        tolerance=_TOLERANCE,
        results={"": lambda f, x, *_: _pre_forms(x)},
        rows={"": (0,)},
        compiles=True,
        cost=Cost({"": (_pre_inputs, _pre)}, step=("",)),
        summary="what a sublayer reads of several residual streams",
    )
    hc_post: HcPost = op(
        reference=f"{_REF}:hc_post",
        tolerance=_TOLERANCE,
        results={"": lambda f, y, x, *_: (form(x),)},
        rows={"": (0, 1, 2, 3)},
        contiguous=True,
        compiles=True,
        cost=Cost({"": (_post_inputs, _post)}),
        summary="the residual streams after a sublayer",
    )
    hc_head: HcHead = op(
        reference=f"{_REF}:hc_head",
        tolerance=_TOLERANCE,
        results={"": lambda f, x, *_: (((x.shape[0], x.shape[2]), name_of(x)),)},
        rows={"": (0,)},
        compiles=True,
        cost=Cost(
            {
                "": (
                    lambda p, n: _inputs(p, n, p.dims("streams")[0], 1),
                    lambda s, n: _collapse(s, n, s.dims("streams")[0]),
                )
            },
            step=("",),
        ),
        summary="the residual streams as one, before the head",
    )
