"""Contracts of DeepSeek-V4's experts: other scores, given choices, limited activations."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ds_runtime.ops.contract import Routing
from ds_runtime.ops.contracts import moe
from ds_runtime.ops.contracts.results import form, half, name_of
from ds_runtime.ops.contracts.work import by_choice, rows_of
from ds_runtime.ops.declare import Area, Cost, OpWork, later, op

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from ds_runtime.ops.contract import Facts
    from ds_runtime.ops.contracts.work import Sizes
    from ds_runtime.ops.reference.cases import Call, Case
    from ds_runtime.ops.reference.inputs import TrueInputs
    from ds_runtime.ops.reference.judging import Verdict
    from ds_runtime.ops.weight import ExpertSource, Packed

_REF = "ds_runtime.ops.reference.matrices.limited"
_LIMIT = 10.0
torch = later("torch")
cases = later("ds_runtime.ops.reference.cases")
judging = later("ds_runtime.ops.reference.judging")
reference = later(_REF)


class RouteSoftplus(Protocol):
    """Choose `routing.top_k` experts per token, or weigh those that are given.

    * logits: [tokens, experts] float32.
    * bias: [experts] float32 or None.
    * chosen: [tokens, top_k] int64, distinct per token, or None.

    s = sqrt(softplus(logits)). The experts are `chosen`, or else the top-k of s + bias. Weights are
    s (never s + bias) at these, divided by (their sum + 1e-20), times routing.scale. Returns new
    (weights float32 [tokens, top_k], ids int32 of the same shape). The order of the chosen is free;
    given ones keep their order. At ties any choice is right. tokens == 0 is legal.
    """

    def __call__(
        self, logits: Tensor, bias: Tensor | None, chosen: Tensor | None, routing: Routing
    ) -> tuple[Tensor, Tensor]: ...


class SiluMulLimited(Protocol):
    """silu(min(gate, limit)) · clamp(up, −limit, limit). gate_up and the result are
    as in SiluMul.
    """

    def __call__(self, gate_up: Tensor, limit: float) -> Tensor: ...


class ExpertsLimited(Protocol):
    """Experts with SiluMulLimited for SwiGLU. `apply` also gets its limit. All else is as in
    Experts: source, facts, x, weights, ids, packed and the result.
    """

    def pack(self, source: ExpertSource, facts: Facts) -> Packed: ...

    def apply(
        self, x: Tensor, weights: Tensor, ids: Tensor, limit: float, packed: Packed
    ) -> Tensor: ...


def route_softplus_samples(facts: Facts) -> Iterator[Case]:
    """Chosen and given experts, with and without a bias; saturated scores and ties."""
    f32 = torch.float32
    for top_k, experts in ((6, 64), (2, 8), (4, 4)):
        routing = Routing(top_k, experts, 1, 1, "sqrtsoftplus", "noaux_tc", True, 1.5)
        for tokens in (0, 1, 33):
            make = cases.Maker(facts, label := f"{top_k} of {experts}, {tokens} tokens")
            logits = make.normal(tokens, experts, scale=2, dtype=f32)
            bias = make.normal(experts, dtype=f32)
            yield cases.case(label, facts, logits, bias, None, routing)
            given = [make.order(experts)[:top_k] for _ in range(tokens)]
            ids = torch.stack(given) if given else torch.empty(0, top_k, dtype=torch.int64)
            yield cases.case(f"{label}, given", facts, logits, None, ids, routing)
    make = cases.Maker(facts, "extremes")
    routing = Routing(3, 16, 1, 1, "sqrtsoftplus", "noaux_tc", True, 2.5)
    logits = make.normal(9, 16, scale=40, dtype=f32)
    yield cases.case("saturated, no bias", facts, logits, None, None, routing)
    yield cases.case("negative biases", facts, logits / 20, -5 - logits[0].abs(), None, routing)
    yield cases.case("ties", facts, torch.zeros(3, 16), torch.zeros(16), None, routing)


def silu_mul_limited_samples(facts: Facts) -> Iterator[Case]:
    """Values on both sides of the limit, odd widths, strides."""
    for tokens, n in ((0, 64), (1, 1), (5, 33), (17, 256)):
        make = cases.Maker(facts, label := f"{tokens}x{n}")
        yield cases.case(label, facts, make.inside(make.normal(tokens, 2 * n, scale=9)), _LIMIT)
    yield cases.case("low", facts, cases.Maker(facts, "low").normal(5, 64, scale=3), 0.5)


def experts_limited_samples(facts: Facts) -> Iterator[Case]:
    """Those of Experts, with inputs whose products reach the limit."""
    for case in moe.experts_samples(facts):
        calls: list[Call] = []
        for call in case.calls:
            if call.method == "apply":
                x, weights, ids, packed = call.args
                call = replace(call, args=(x * 3, weights, ids, 2.0, packed))
            calls.append(call)
        yield replace(case, calls=tuple(calls))


def _judge_route(
    args: Sequence[Any], got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float
) -> Verdict:
    logits, bias, chosen, routing = args
    weights, ids = (t.cpu() for t in got)
    ordered = ids.long().sort(-1).values
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < routing.num_experts:
        return judging.wrong(f"ids outside [0, {routing.num_experts})")  # type: ignore[no-any-return]
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        return judging.wrong("an expert is chosen twice for one token")  # type: ignore[no-any-return]
    if chosen is not None and not torch.equal(ids.long(), chosen.long()):
        return judging.wrong("other experts than those given")  # type: ignore[no-any-return]
    settled = moe.settled_tokens(logits, bias, routing)
    if chosen is None and not torch.equal(
        ordered[settled], want[1].long().sort(-1).values[settled]
    ):
        return judging.wrong("chooses other experts where the choice is clear")  # type: ignore[no-any-return]
    expected = reference.route_softplus(logits, bias, ids.long(), routing)[0]
    return judging.disagreement(weights, expected, tolerance)  # type: ignore[no-any-return]


def _logits(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    assert p.routing is not None
    count = p.routing.num_experts
    return p.float32(tokens, count), p.float32(count) * 0.05, None, p.routing


def _routed_tokens(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    return *moe.routed_tokens(p, tokens), _LIMIT


def _multiplied(s: Sizes, tokens: int) -> OpWork:
    return rows_of(tokens, 2 * s.width * s.item, s.width * s.item, 7.0 * s.width)


class LimitedOps(Area):
    """Experts of DeepSeek-V4."""

    route_softplus: RouteSoftplus = op(
        reference=f"{_REF}:route_softplus",
        tolerance={"float32": 1e-5, "bfloat16": 1e-5, "float16": 1e-5},
        results={
            "": lambda f, logits, bias, chosen, routing: moe.routed(logits, routing),
        },
        rows={"": (0, 2)},
        judge=_judge_route,
        cost=Cost({"": (_logits, moe.scored)}, size=by_choice, float32=True),
        summary="expert choice by the root of softplus, or by token id",
    )
    silu_mul_limited: SiluMulLimited = op(
        reference=f"{_REF}:silu_mul_limited",
        tolerance={"float32": 1e-5, "bfloat16": 1.2e-2, "float16": 2e-3},
        results={"": lambda f, x, limit: ((half(x), name_of(x)),)},
        rows={"": (0,)},
        contiguous=True,
        compiles=True,
        cost=Cost(
            {"": (lambda p, n: (p.normal(n, 2 * p.width), _LIMIT), _multiplied)},
            by_width=True,
        ),
        summary="SwiGLU activation of limited values",
    )
    experts_limited: ExpertsLimited = op(
        reference=f"{_REF}:ReferenceLimitedExperts",
        absent=True,
        tolerance=moe.ExpertOps.experts.tolerance,  # type: ignore[attr-defined]
        results={"apply": lambda f, x, *_: (form(x),)},
        rows={"apply": (0, 1, 2)},
        contiguous=True,
        heavy=True,
        waits=True,
        cost=Cost({"apply": (_routed_tokens, moe.experts_work)}, step=("apply",)),
        summary="routed experts with limited activations, packed once",
    )
