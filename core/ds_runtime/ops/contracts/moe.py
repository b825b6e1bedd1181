"""Mixture-of-experts contracts: router logits, routing, routed experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ds_runtime.ops.contract import Dims, Routing
from ds_runtime.ops.contracts.results import form
from ds_runtime.ops.contracts.work import by_choice, distinct_experts, matrix_bytes, rows_of
from ds_runtime.ops.declare import Area, Cost, OpWork, later, op

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from ds_runtime.ops.contract import Facts
    from ds_runtime.ops.contracts.work import Sizes
    from ds_runtime.ops.declare import Form
    from ds_runtime.ops.reference.cases import Case, Maker
    from ds_runtime.ops.reference.inputs import TrueInputs
    from ds_runtime.ops.reference.judging import Verdict
    from ds_runtime.ops.weight import ExpertSource, Packed

_REF = "ds_runtime.ops.reference.matrices.moe"
_CHOICES = 16  # of experts, where they are timed: every call has others
_GAP = 1e-5  # scores closer than this, relative to the largest, count as tied
torch = later("torch")
cases = later("ds_runtime.ops.reference.cases")
judging = later("ds_runtime.ops.reference.judging")
held = later("ds_runtime.ops.weight")
reference = later(_REF)
# Two matmuls, as in linear.py.
_COARSE = {"fp8_w8a8": 8e-2, "int8_w8a8": 4e-2, "int4_w4a8": 4e-2, "mxfp4_w4a4": 0.25}


class RouterLogits(Protocol):
    """x · Wᵀ with both operands in fp32.

    * x: [tokens, hidden] in the compute dtype, rows may be strided.
    * weight: [experts, hidden] float32.

    Returns a new [tokens, experts] float32. tokens == 0 is legal.
    """

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor: ...


class Route(Protocol):
    """Choose `routing.top_k` experts per token. s is the softmax or sigmoid of the logits, as
    `routing.scoring` says.

    * logits: [tokens, experts] float32.
    * bias: [experts] float32 or None.

    `routing.method` is one of these:

    * greedy: top-k of s.
    * group_limited_greedy: group score = max of s in it, keep topk_group groups, others 0, top-k.
    * noaux_tc: c = s + bias. Group score = sum of the two largest c (one, if a group has one
      expert). Keep topk_group groups, others −inf, top-k by c.

    Weights are s (never c) at the chosen experts. If renormalize, they are divided by (sum +
    1e-20). Then they are multiplied by scale. After the chosen come routing.shared slots that every
    token takes: weight 1, ids num_experts, num_experts + 1 and so on. Returns new (weights float32
    [tokens, top_k + shared], ids int32 of the same shape). The order of the chosen is free, ids are
    distinct; at ties any choice is right. tokens == 0 is legal. Source: the DeepSeek-V2 and V3
    technical reports.
    """

    def __call__(
        self, logits: Tensor, bias: Tensor | None, routing: Routing
    ) -> tuple[Tensor, Tensor]: ...


class Experts(Protocol):
    """Routed SwiGLU experts: Σ_k weights[t,k] · down_e(silu(gate_e x) · up_e x), e = ids[t,k].

    * `pack(source, facts)` reads experts one by one, of the formats that the kernel names.
    * `apply(x, weights, ids, packed)`: x [tokens, hidden] in facts.dtype; weights float32 and ids
      int32 [tokens, top_k]. No token has an id twice. All columns of `ids` count as top_k, slots
      of shared experts among them.

    `apply` returns a new contiguous [tokens, hidden] in x.dtype; products accumulate in fp32.
    Experts without tokens and tokens == 0 are legal. An id of −1 adds nothing, whatever its weight:
    another rank has that expert (`Facts.ranks["ep"]` > 1). There, rows of x may be strided. It
    raises TypeError for another kernel's Packed.
    """

    def pack(self, source: ExpertSource, facts: Facts) -> Packed: ...

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor: ...


class QuantizedExperts(Protocol):
    """What Experts have in addition if they round rows to FP8 before they multiply. Ranks can then
    send each other codes (`Promises.takes_codes`).

    * `quantize(rows, x, packed)`: x [n, hidden] as `apply` quantises it in a call of `rows` rows.
      Returns (q [n, hidden] float8_e4m3fn, scale [n, groups] float32, of any strides), or None if
      `apply` does not quantise. A row's codes depend on that row alone.
    * `apply_quantized(q, scale, weights, ids, packed)`: returns the bits of `apply(x, weights, ids,
      packed)` for x that have these codes. Rows of q may be strided, and begin at whole 16 bytes.
    """

    def quantize(self, rows: int, x: Tensor, packed: Packed) -> tuple[Tensor, Tensor] | None: ...

    def apply_quantized(
        self, q: Tensor, scale: Tensor, weights: Tensor, ids: Tensor, packed: Packed
    ) -> Tensor: ...


def router_logits_samples(facts: Facts) -> Iterator[Case]:
    """Low-precision activations against a float32 router."""
    for tokens, hidden, experts in ((0, 64, 8), (1, 33, 5), (17, 512, 64)):
        make = cases.Maker(facts, label := f"{tokens}x{hidden}, {experts} experts")
        weight = make.normal(experts, hidden, dtype=torch.float32)
        yield cases.case(label, facts, make.normal(tokens, hidden), weight)
    make = cases.Maker(facts, "strided")
    weight = make.normal(6, 96, dtype=torch.float32)
    yield cases.case("strided, large", facts, make.inside(make.normal(5, 96, scale=100)), weight)


_V2 = Routing(6, 40, 8, 3, "softmax", "group_limited_greedy", False, 16.0)


_V3 = Routing(8, 64, 8, 4, "sigmoid", "noaux_tc", True, 2.5)


_ROUTINGS: tuple[tuple[str, Routing], ...] = (
    ("greedy", Routing(top_k=6, num_experts=64)),
    ("greedy renormalised", Routing(2, 8, renormalize=True)),
    ("all experts", Routing(4, 4, scale=0.5)),
    ("groups by maximum", _V2),
    ("groups by two best", _V3),
    ("one group", Routing(8, 48, 1, 1, "sigmoid", "noaux_tc", True, 2.827)),
    ("groups of one", Routing(3, 8, 8, 4, "sigmoid", "noaux_tc", True, 1.0)),
    ("softmax with bias", replace(_V3, scoring="softmax", renormalize=False)),
    ("two shared slots", replace(_V2, shared=2)),
    ("one shared slot", replace(_V3, shared=1)),
)


def route_samples(facts: Facts) -> Iterator[Case]:
    """Every method; negative biases, saturated scores and ties."""
    f32 = torch.float32
    for label, routing in _ROUTINGS:
        experts = routing.num_experts
        for tokens in (0, 1, 33):
            make = cases.Maker(facts, f"{label} {tokens}")
            bias = make.normal(experts, dtype=f32) if routing.method == "noaux_tc" else None
            logits = make.normal(tokens, experts, scale=2, dtype=f32)
            yield cases.case(f"{label}, {tokens} tokens", facts, logits, bias, routing)
    make = cases.Maker(facts, "extremes")
    logits = make.normal(9, 64, scale=2, dtype=f32)
    yield cases.case("no bias", facts, logits, None, _V3)
    yield cases.case("negative biases", facts, logits, -5 - make.normal(64, dtype=f32).abs(), _V3)
    yield cases.case("saturated", facts, logits * 40, make.normal(64, dtype=f32), _V3)
    yield cases.case("ties", facts, torch.zeros(3, 64), torch.zeros(64), _V3)
    yield cases.case("ties of maxima", facts, torch.zeros(3, 40), None, _V2)


def _experts_case(
    make: Maker,
    label: str,
    sizes: tuple[int, int, int],
    fmt: str = "dense",
    cut: int = 0,
    absent: bool = False,
) -> Case:
    """absent: of some choices another rank has the expert, of some tokens of all."""
    experts, hidden, inter = sizes
    triples = [
        (
            make.weight(inter, hidden, fmt, offset=(cut, 0)),
            make.weight(inter, hidden, fmt, offset=(cut, 0)),
            make.weight(hidden, inter, fmt, offset=(0, cut)),
        )
        for _ in range(experts)
    ]
    packed_from = fmt.partition(" ")[0]
    facts = replace(make.facts, weight_format=packed_from, shape=(experts, inter, hidden))
    if absent:
        facts = replace(facts, ranks=Dims({**facts.ranks, "ep": 2}))
    calls = [cases.Call((cases.SampleExperts(triples), facts), method="pack", save="packed")]
    top_k = min(3, experts)
    for tokens in (0, 1, 2, 19):
        # The last expert never gets a token.
        ids = [make.order(max(top_k, experts - 1))[:top_k] for _ in range(tokens)]
        chosen = torch.stack(ids).int() if ids else torch.empty(0, top_k, dtype=torch.int32)
        weights = make.uniform(tokens, top_k).to(torch.float32)
        weights[: tokens // 4, 0] = 0
        if absent:
            chosen[::2, 1:] = -1
            chosen[1::3] = -1
        x = make.normal(tokens, hidden)
        args = (make.inside(x) if absent else x, weights, chosen, cases.Saved("packed"))
        calls.append(cases.Call(args, method="apply"))
    empty = (torch.empty(0, top_k), torch.empty(0, top_k, dtype=torch.int32))
    foreign = (make.normal(0, hidden), *empty, held.Packed("nobody.nothing", (), {}, 0))
    calls.append(cases.Call(foreign, method="apply", raises=TypeError))
    made: Case = cases.Case(label, facts, tuple(calls))
    return made


def experts_samples(facts: Facts) -> Iterator[Case]:
    """Experts without tokens, zero weights, odd widths, FP8 with partial and cut blocks."""
    dense = (
        ("dense", (8, 64, 48)),
        ("dense odd", (5, 33, 17)),
        ("dense one expert", (1, 32, 64)),
        ("dense blocks", (5, 384, 256)),
    )
    for label, sizes in dense:
        yield _experts_case(cases.Maker(facts, label), label, sizes)
    for fmt in ("dense", "fp8_block", "int8_channel", "int4_group"):
        label = f"{fmt} of other ranks"
        yield _experts_case(cases.Maker(facts, label), label, (4, 128, 128), fmt, absent=True)
    label = "fp8 blocks of other ranks"  # as wide as matrix units want them
    yield _experts_case(cases.Maker(facts, label), label, (5, 256, 256), "fp8_block", absent=True)
    quantised = (
        ("fp8", (4, 128, 128), 0),
        ("fp8 partial", (3, 192, 176), 0),
        ("fp8 cut", (3, 128, 192), 64),
        ("fp8 blocks", (5, 256, 384), 0),
    )
    for label, sizes, cut in quantised:
        yield _experts_case(cases.Maker(facts, label), label, sizes, "fp8_block", cut)
    for fmt in ("int8_channel", "int4_group", "int4_group zeros"):
        for sizes in ((4, 128, 96), (3, 77, 43)):
            label = f"{fmt} {sizes[1]}x{sizes[2]}"
            yield _experts_case(cases.Maker(facts, label), label, sizes, fmt)
    for fmt in cases.OTHERS:
        sizes = (3, 160, 72)
        yield _experts_case(cases.Maker(facts, label := f"{fmt} 160x72"), label, sizes, fmt)
    for fmt in ("mxfp8", "nvfp4", "mxfp4"):  # matrix units of these want whole tiles
        label = f"{fmt} 256x256"
        yield _experts_case(cases.Maker(facts, label), label, (3, 256, 256), fmt)


def routed(logits: Tensor, routing: Routing) -> tuple[Form, Form]:
    shape = logits.shape[0], routing.top_k + routing.shared
    return (shape, "float32"), (shape, "int32")


def settled_tokens(logits: Tensor, bias: Tensor | None, routing: Routing) -> Tensor:
    """Tokens whose choice of groups and experts is clear by more than rounding: bool [tokens]."""
    _, choice = reference.scores_and_choice(logits, bias, routing)
    slack = _GAP * choice.abs().amax(-1)
    settled: Tensor = _gap(reference.mask_groups(choice, routing), routing.top_k) > slack
    if routing.method != "greedy" and routing.topk_group < routing.n_group:
        settled &= _gap(reference.group_scores(choice, routing), routing.topk_group) > slack
    return settled


def _gap(scores: Tensor, k: int) -> Any:
    if k >= scores.shape[-1]:
        return torch.full(scores.shape[:-1], float("inf"), dtype=scores.dtype)
    ordered = scores.sort(-1, descending=True).values
    return ordered[:, k - 1] - ordered[:, k]


def _judge_route(
    args: Sequence[Any], got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float
) -> Verdict:
    logits, bias, routing = args
    weights, ids = (t.cpu() for t in got)
    experts, k = routing.num_experts, routing.top_k
    if not (torch.equal(weights[:, k:], want[0][:, k:].to(weights.dtype))
            and torch.equal(ids[:, k:].long(), want[1][:, k:].long())):  # fmt: skip
        return float("inf"), f"shared slots are not {experts}, {experts} + 1, … with weight 1"
    weights, ids = weights[:, :k], ids[:, :k]
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= experts):
        return float("inf"), f"ids outside [0, {experts})"
    ordered = ids.long().sort(-1).values
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        return float("inf"), "an expert is chosen twice for one token"
    settled = settled_tokens(logits, bias, routing)
    if not torch.equal(ordered[settled], want[1][:, :k].long().sort(-1).values[settled]):
        return float("inf"), "chooses other experts where the choice is clear"
    expected = reference.scores_and_choice(logits, bias, routing)[0].gather(1, ids.long())
    if routing.renormalize:
        expected = expected / (expected.sum(-1, keepdim=True) + 1e-20)
    return judging.disagreement(weights, expected * routing.scale, tolerance)  # type: ignore[no-any-return]


def _outputs(s: Sizes) -> int:
    """Experts, or heads of an indexer: both have such logits."""
    return s.facts.dims["index_heads" if "indexer" in s.facts.module else "experts"]


def _hidden(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    hidden = p.facts.dims["hidden"]
    return p.normal(tokens, hidden), p.in_turn(lambda: p.float32(_outputs(p), hidden))


def _logits(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    assert p.routing is not None
    count = p.routing.num_experts
    bias = p.float32(count) * 0.05 if p.routing.method == "noaux_tc" else None
    return p.float32(tokens, count), bias, p.routing


def _slots(s: Sizes) -> tuple[int, int]:
    """(of shared experts, which every token takes; chosen and shared ones of a token)."""
    shared = s.facts.shape[0] - s.facts.dims["experts"] // s.facts.ranks.get("ep", 1)
    return shared, s.facts.dims["top_k"] + shared


def routed_tokens(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    """Distinct experts for each token, all as likely, −1 for those of other ranks, and the slots of
    shared ones."""
    (count, _, hidden), (shared, top_k) = p.facts.shape, _slots(p)
    own = torch.arange(count - shared, count).expand(tokens, shared)

    def choose() -> Tensor:
        routed = torch.rand(tokens, p.facts.dims["experts"]).topk(top_k - shared).indices
        routed[routed >= count - shared] = -1
        chosen: Tensor = torch.cat((routed, own), 1).to(torch.int32).to(p.device)
        return chosen

    shares = torch.rand(tokens, top_k, device=p.device)
    return p.normal(tokens, hidden), shares, [choose() for _ in range(_CHOICES)]


def _router_logits(s: Sizes, tokens: int) -> OpWork:
    """A float32 weight, float32 results."""
    out, hidden = _outputs(s), s.facts.dims["hidden"]
    return OpWork(
        out * hidden * 4 if tokens else 0,
        tokens * hidden * s.item,
        tokens * out * 4,
        2.0 * tokens * out * hidden,
    )


def experts_work(s: Sizes, tokens: int) -> OpWork:
    """Of as many experts as even routing reaches."""
    (_, inter, hidden), (shared, top_k) = s.facts.shape, _slots(s)
    routed, dtype = s.facts.dims["experts"], s.facts.dtype
    parts = s.facts.ranks.get("ep", 1)  # of the routed experts, one of which is here
    reached = distinct_experts(routed, s.facts.dims["top_k"], tokens) / parts
    reached += shared if tokens else 0
    up, down = (inter, hidden), (hidden, inter)
    one = 2 * matrix_bytes(*up, s.held, dtype) + matrix_bytes(*down, s.held, dtype)
    return OpWork(
        reached * one,
        tokens * hidden * s.item + tokens * top_k * 8,
        tokens * hidden * s.item,
        6.0 * tokens * top_k / parts * inter * hidden,
    )


def scored(s: Sizes, tokens: int) -> OpWork:
    """Logits, and the bias where the choice has one; weights and ids of the chosen."""
    assert s.routing is not None
    count, scoring = s.routing.num_experts, s.routing.scoring
    biased = s.routing.method == "noaux_tc" or scoring == "sqrtsoftplus"
    chosen = 8 * (s.routing.top_k + s.routing.shared)
    return rows_of(tokens, 4 * count, chosen, 4.0 * count, once=4 * count * biased)


class ExpertOps(Area):
    """Routed experts, and what chooses them."""

    router_logits: RouterLogits = op(
        reference=f"{_REF}:router_logits",
        tolerance={"float32": 1e-5, "bfloat16": 1e-5, "float16": 1e-5},
        results={"": lambda f, x, w: (((x.shape[0], w.shape[0]), "float32"),)},
        rows={"": (0,)},
        cost=Cost({"": (_hidden, _router_logits)}, step=("",), size=by_choice, float32=True),
        summary="router scores in fp32",
    )
    route: Route = op(
        reference=f"{_REF}:route",
        tolerance={"float32": 1e-5, "bfloat16": 1e-5, "float16": 1e-5},
        results={"": lambda f, logits, bias, routing: routed(logits, routing)},
        rows={"": (0,)},
        judge=_judge_route,
        compiles=True,
        cost=Cost({"": (_logits, scored)}, size=by_choice, float32=True),
        summary="grouped top-k expert choice",
    )
    experts: Experts = op(
        reference=f"{_REF}:ReferenceExperts",
        absent=True,
        tolerance={"float32": 2e-5, "bfloat16": 1.5e-2, "float16": 4e-3} | _COARSE,
        results={
            "apply": lambda f, x, *_: (form(x),),
            "apply_quantized": lambda f, q, *_: ((tuple(q.shape), f.dtype),),
        },
        rows={"apply": (0, 1, 2), "apply_quantized": (0, 1, 2, 3)},
        contiguous=True,
        heavy=True,
        waits=True,
        beside=(f"{__name__}:QuantizedExperts",),
        cost=Cost({"apply": (routed_tokens, experts_work)}, step=("apply",)),
        summary="routed experts, packed once",
    )
