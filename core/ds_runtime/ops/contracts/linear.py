"""Contracts of everything that is a matrix: linear, embedding, activation quantisation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ds_runtime.ops.contracts.results import codes, name_of, of_weight
from ds_runtime.ops.contracts.work import GROUP, ID, by_vocab, coded, product, rows_of
from ds_runtime.ops.declare import Area, Cost, OpWork, later, op
from ds_runtime.ops.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from ds_runtime.ops.contract import Facts
    from ds_runtime.ops.contracts.work import Sizes
    from ds_runtime.ops.reference.cases import Call, Case
    from ds_runtime.ops.reference.inputs import TrueInputs
    from ds_runtime.ops.reference.judging import Verdict
    from ds_runtime.ops.weight import Packed, Weight

_REF = "ds_runtime.ops.reference.matrices.linear"
torch = later("torch")
cases = later("ds_runtime.ops.reference.cases")
judging = later("ds_runtime.ops.reference.judging")
held = later("ds_runtime.ops.weight")
reference = later(_REF)
# Activations rounded as well: e4m3 by group, int8 by token, int8 by token and group.
_COARSE = {"fp8_w8a8": 6e-2, "int8_w8a8": 3e-2, "int4_w4a8": 3e-2, "mxfp4_w4a4": 0.2}


class Linear(Protocol):
    """y = x · Wᵀ for one weight [out, in] in `facts.weight_format`.

    * `pack(weight, facts)`: called once at load. It may release or convert the components, and owns
      the tensors that it keeps. weight: a `WeightPart` of a format that the kernel names.
    * `apply(x, packed)`: x [tokens, in] in facts.dtype, last dim contiguous, rows may be strided.

    `apply` returns a new contiguous [tokens, out] in x.dtype, accumulated in fp32. tokens == 0 is
    legal; `in` and `out` may be any number. It raises TypeError for another kernel's Packed.
    """

    def pack(self, weight: Weight, facts: Facts) -> Packed: ...

    def apply(self, x: Tensor, packed: Packed) -> Tensor: ...


class GroupedLinear(Protocol):
    """Each group of columns times rows of its own: y[:, g] = x[:, g] · W[g]ᵀ.

    * `pack(weight, facts)`: as in Linear, a weight [groups · out, in], its groups in order.
    * `apply(x, packed)`: x [tokens, groups, in] in facts.dtype, last dim contiguous.

    `apply` returns a new contiguous [tokens, groups · out] in x.dtype, accumulated in fp32. tokens
    == 0 is legal. It raises TypeError for another kernel's Packed.
    """

    def pack(self, weight: Weight, facts: Facts) -> Packed: ...

    def apply(self, x: Tensor, packed: Packed) -> Tensor: ...


class Groups(NamedTuple):
    """How activations are quantised. size: columns of a scale. ue8m0: as in QuantizeGroup."""

    size: int
    ue8m0: bool


class QuantizedLinear(Protocol):
    """What a Linear has in addition if it takes activations that the op before it quantised.

    * `quantizes(rows, packed)`: returns the Groups by which `apply` quantises that number of rows
      before it multiplies, or None if it does not.
    * `apply_quantized(q, scale, packed)`: returns `apply` of x ≈ q · scale. Both are as
      QuantizeGroup returns them for these groups: q [tokens, in] float8_e4m3fn, and scale
      [tokens, in / group] float32, of any strides.
    """

    def quantizes(self, rows: int, packed: Packed) -> Groups | None: ...

    def apply_quantized(self, q: Tensor, scale: Tensor, packed: Packed) -> Tensor: ...


class Float32Linear(Protocol):
    """What a Linear has in addition if it can return its sums unrounded, for the head's logits.

    * `gives_float32(rows, packed)`: returns whether it can for this number of rows.
    * `apply_float32(x, packed, out)`: returns `apply(x, packed)` in float32, in `out`, a contiguous
      [tokens, out] float32. If that is None or left out, the tensor is new.
    """

    def gives_float32(self, rows: int, packed: Packed) -> bool: ...

    def apply_float32(self, x: Tensor, packed: Packed, out: Tensor | None = None) -> Tensor: ...


class Embed(Protocol):
    """Rows of a table. ids: [tokens] int64. table: [rows, hidden]. start: the id of its first row.

    Ids outside [start, start + rows) give zero rows, because shards of the vocabulary are summed
    later. Returns a new contiguous [tokens, hidden] in table.dtype. tokens == 0 is legal.
    """

    def __call__(self, ids: Tensor, table: Tensor, start: int) -> Tensor: ...


class QuantizeGroup(Protocol):
    """Per-token, per-group FP8 e4m3 quantisation of activations.

    x: [tokens, n], n a multiple of `group`; rows may be strided. group: columns that share a scale.
    ue8m0: whether scales are rounded up to a power of two.

    scale = max(amax, 1e-4) / 448 per group. Returns new (q [tokens, n] float8_e4m3fn, scale
    [tokens, n / group] float32, of any strides) with x ≈ q · scale. tokens == 0 is legal. Source:
    DeepSeek-V3 technical report, section 3.3.
    """

    def __call__(self, x: Tensor, group: int, ue8m0: bool) -> tuple[Tensor, Tensor]: ...


def _quantised(weight: Weight, inputs: Sequence[Tensor]) -> Iterator[Call]:
    """Calls of a whole FP8 weight with inputs quantised by groups of 128, for kernels that take
    these; scales that are powers of two serve the others, too. Scales lie both ways."""
    parts = weight.parts
    whole = weight.shape[1] % 128 == 0 and all(p.offset == (0, 0) for p in parts)
    for x in inputs if weight.format == "fp8_block" and whole else ():
        for ue8m0 in (False, True):
            q, scale = reference.quantize_group(x, 128, ue8m0)
            answers = tuple(Groups(128, power) for power in (False, True)[: 1 + ue8m0])
            for laid in (scale, scale.T.contiguous().T):
                yield cases.Call(
                    (q, laid, cases.Saved("packed")),
                    method="apply_quantized",
                    asks="quantizes",
                    answers=answers,
                )


_NO_RESULT = -12345.6789


def _in_float32(x: Tensor, out: int) -> Iterator[Call]:
    """Calls of kernels that give their sums as they are: into a new tensor, and into one."""
    # No result is that number. NaN is one of inputs with NaN, and its bits are the device's choice.
    held = torch.full((x.shape[0], out), _NO_RESULT, dtype=torch.float32, device=x.device)
    for into in ((), (held,)):
        yield cases.Call(
            (x, cases.Saved("packed"), *into),
            method="apply_float32",
            written=(2,) * len(into),
            asks="gives_float32",
            answers=(True,),
        )


def _linear_case(label: str, facts: Facts, weight: Weight, *inputs: Tensor) -> Case:
    """FP8 weights of whole groups: also by activations that are quantised already."""
    facts = cases.site(facts, weight)
    foreign = held.Packed("nobody.nothing", weight.shape, {}, 0)
    made: Case = cases.Case(
        label,
        facts,
        (
            cases.Call((weight, facts), method="pack", save="packed"),
            *(cases.Call((x, cases.Saved("packed")), method="apply") for x in inputs),
            *_quantised(weight, inputs),
            *(call for x in inputs for call in _in_float32(x, weight.shape[0])),
            cases.Call((inputs[-1], foreign), method="apply", raises=TypeError),
        ),
    )
    return made


# label, shape, rows of parts, offset, format
_Sample = tuple[str, tuple[int, int], tuple[int, ...], tuple[int, int], str]


def _others() -> Iterator[_Sample]:
    """Of the formats that few kernels read."""
    for fmt in cases.OTHERS:
        yield f"{fmt} even", (128, 256), (), (0, 0), fmt
        yield f"{fmt} odd", (77, 131), (31, 46), (0, 0), fmt
        height, width = FORMATS[fmt.partition(" ")[0]].block
        cut = (5 if height > 1 else 0, 7 if width and fmt != "int4_actorder" else 0)
        if any(cut):
            yield f"{fmt} cut", (70, 81), (), cut, fmt


def linear_samples(facts: Facts) -> Iterator[Case]:
    """Dense and FP8 weights, joined parts, partial blocks, shards that cut a block."""
    for out, n in ((1, 1), (3, 5), (64, 128), (130, 70), (257, 384)):
        make = cases.Maker(facts, label := f"dense {out}x{n}")
        inputs = [make.normal(tokens, n) for tokens in (0, 1, 2, 5, 17, 33)]
        inputs[-1][7] = float("nan")  # is no other row's business
        yield _linear_case(label, facts, make.weight(out, n), *inputs)
    make = cases.Maker(facts, "dense parts")
    weight = make.weight(160, 96, parts=(96, 33, 31))
    yield _linear_case("dense parts, strided", facts, weight, make.inside(make.normal(4, 96)))
    weight = make.weight(48, 64, dtype=torch.bfloat16)
    yield _linear_case("bfloat16 weight, large", facts, weight, make.normal(3, 64, scale=500))
    blocks = (
        ("fp8", (256, 256), (), (0, 0), "float32"),
        ("fp8 partial", (200, 330), (), (0, 0), "float32"),
        ("fp8 small", (7, 64), (), (0, 0), "bfloat16"),
        ("fp8 cut rows", (192, 256), (), (64, 0), "float32"),
        ("fp8 cut columns", (128, 192), (), (0, 64), "float32"),
        ("fp8 cut both", (100, 150), (), (37, 101), "float32"),
        ("fp8 parts", (576, 128), (320, 256), (0, 0), "float32"),
        ("fp8 power-of-two scales", (256, 384), (), (0, 0), "ue8m0"),
        ("fp8 wide", (144, 1024), (), (0, 0), "float32"),
    )
    for label, (out, n), parts, offset, scale in blocks:
        make = cases.Maker(facts, label)
        weight = make.weight(out, n, "fp8_block", parts, offset, scale)
        inputs = [make.normal(tokens, n) for tokens in (0, 1, 6)]
        yield _linear_case(label, facts, weight, *inputs, make.inside(make.normal(19, n)))
    integers: tuple[_Sample, ...] = (
        ("int8", (128, 256), (), (0, 0), "int8_channel"),
        ("int8 odd", (77, 131), (), (0, 0), "int8_channel"),
        ("int8 parts", (96, 64), (31, 65), (0, 0), "int8_channel"),
        ("int4", (128, 256), (), (0, 0), "int4_group"),
        ("int4 odd", (77, 70), (), (0, 0), "int4_group"),
        ("int4 parts", (96, 64), (31, 65), (0, 0), "int4_group"),
        ("int4 cut columns", (64, 80), (), (0, 16), "int4_group"),
        ("int4 cut anywhere", (64, 81), (), (0, 7), "int4_group"),
        ("int4 zero points", (70, 96), (), (0, 0), "int4_group zeros"),
        *_others(),
    )
    for label, (out, n), rows, cut, fmt in integers:
        make = cases.Maker(facts, label)
        weight = make.weight(out, n, fmt, rows, cut)
        inputs = [make.normal(tokens, n) for tokens in (0, 1, 6)]
        awkward = make.normal(19, n)
        awkward[0], awkward[1], awkward[2] = 0, awkward[1] * 1e-6, awkward[2] * 1e4
        awkward[3, 1] = float("nan")
        yield _linear_case(label, facts, weight, *inputs, make.inside(awkward))


def grouped_linear_samples(facts: Facts) -> Iterator[Case]:
    """Dense and quantised weights; groups that end within a block of scales."""
    for groups, out, n, fmt in (
        (1, 3, 5, "dense"),
        (4, 32, 48, "dense"),
        (2, 128, 256, "fp8_block"),
        (3, 72, 130, "fp8_block"),
        (2, 33, 96, "int8_channel"),
        (2, 64, 96, "mxfp4"),
        (2, 40, 96, "int4_group"),
        (3, 64, 70, "int4_group zeros"),
        *((2, 24, 64, fmt) for fmt in cases.OTHERS),
    ):
        make = cases.Maker(facts, label := f"{fmt} {groups} groups {out}x{n}")
        weight = make.weight(groups * out, n, fmt)
        inputs = [make.normal(tokens, groups, n) for tokens in (0, 1, 6)]
        inputs.append(make.inside(make.normal(5, groups, n), 8, 8))
        own = cases.site(facts, weight)
        foreign = held.Packed("nobody.nothing", weight.shape, {}, 0)
        calls = (
            cases.Call((weight, own), method="pack", save="packed"),
            *(cases.Call((x, cases.Saved("packed")), method="apply") for x in inputs),
            cases.Call((inputs[-1], foreign), method="apply", raises=TypeError),
        )
        yield cases.Case(label, own, calls)


def embed_samples(facts: Facts) -> Iterator[Case]:
    """Shards of a vocabulary: ids before, inside and after it."""
    for tokens, start in ((0, 0), (1, 0), (9, 0), (40, 32)):
        make = cases.Maker(facts, label := f"{tokens} tokens from {start}")
        table = make.normal(32, 48)
        yield cases.case(label, facts, make.integers(0, start + 64, tokens), table, start)
    make = cases.Maker(facts, "all elsewhere")
    yield cases.case("all elsewhere", facts, make.integers(0, 10, 5), make.normal(6, 33), 10)


def quantize_group_samples(facts: Facts) -> Iterator[Case]:
    """Both scale kinds, strides, a group of zeros, outliers."""
    for ue8m0 in (False, True):
        kind = "power-of-two" if ue8m0 else "float"
        for tokens, n in ((0, 128), (1, 128), (7, 384)):
            make = cases.Maker(facts, label := f"{kind} {tokens}x{n}")
            yield cases.case(label, facts, make.normal(tokens, n), 128, ue8m0)
        make = cases.Maker(facts, f"{kind} awkward")
        x = make.normal(5, 256)
        x[1, :128], x[2, 7], x[3] = 0, 3e4, x[3] * 1e-6
        yield cases.case(f"{kind} awkward", facts, make.inside(x), 128, ue8m0)


def _judge_codes(
    args: Sequence[Any], got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float
) -> Verdict:
    group, ue8m0 = args[1], args[2]
    scale = got[1].cpu()
    if ue8m0 and not judging.powers_of_two(scale):
        return float("inf"), "a scale is no power of two"
    if (error := judging.relative_error(scale, want[1])) > 1e-5:
        return error, f"scales: relative error {error:.3g} is above 1e-05"
    made, right = (judging.decoded(pair, group) for pair in (got, want))
    return judging.disagreement(made, right, tolerance)  # type: ignore[no-any-return]


def _ids(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    table = torch.zeros(p.vocab, p.facts.dims["hidden"], dtype=p.dtype, device=p.device)
    return torch.randint(p.vocab, (tokens,), device=p.device), table, 0


def _rows(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    return (p.normal(tokens, p.facts.shape[1]),)


def _hidden(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    return p.normal(tokens, p.facts.dims["hidden"]), GROUP, False


def _embed(s: Sizes, tokens: int) -> OpWork:
    """Only the rows that are asked for."""
    row = s.facts.dims["hidden"] * s.item
    return OpWork(tokens * row, tokens * ID, tokens * row)


def _linear(s: Sizes, tokens: int) -> OpWork:
    rows, cols = s.facts.shape
    return product(s, rows, cols, tokens)


def _grouped_rows(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    groups = p.facts.dims["o_groups"]
    return (p.normal(tokens, groups, p.facts.shape[1]),)


def _grouped(s: Sizes, tokens: int) -> OpWork:
    """A row of the weight meets the columns of its group alone."""
    rows, cols = s.facts.shape
    one = product(s, rows, cols, tokens)
    return one + OpWork(reads=(s.facts.dims["o_groups"] - 1) * tokens * cols * s.item)


def _rounded(s: Sizes, tokens: int) -> OpWork:
    hidden = s.facts.dims["hidden"]
    return rows_of(tokens, hidden * s.item, coded(hidden), 3.0 * hidden)


class EmbeddingOps(Area):
    """The table of tokens."""

    embed: Embed = op(
        reference=f"{_REF}:embed",
        tolerance={"float32": 0.0, "bfloat16": 0.0, "float16": 0.0},
        results={
            "": lambda f, ids, table, start: (((ids.shape[0], table.shape[1]), name_of(table)),)
        },
        rows={"": (0,)},
        contiguous=True,
        plain=True,
        cost=Cost({"": (_ids, _embed)}, size=by_vocab),
        summary="token embedding lookup",
    )


class MatrixOps(Area):
    """Weights, and the rounding of what they multiply."""

    linear: Linear = op(
        reference=f"{_REF}:ReferenceLinear",
        tolerance={"float32": 2e-5, "bfloat16": 1e-2, "float16": 2e-3} | _COARSE,
        results={
            "apply": lambda f, x, *_: of_weight(f, x, name_of(x)),
            "apply_float32": lambda f, x, *_: of_weight(f, x, "float32"),
            "apply_quantized": lambda f, q, *_: of_weight(f, q, f.dtype),
        },
        rows={"apply": (0,), "apply_quantized": (0, 1), "apply_float32": (0, 2)},
        contiguous=True,
        heavy=True,
        beside=(f"{__name__}:QuantizedLinear", f"{__name__}:Float32Linear"),
        cost=Cost({"apply": (_rows, _linear)}, step=("apply",)),
        summary="dense projection, packed once",
    )
    grouped_linear: GroupedLinear = op(
        reference=f"{_REF}:ReferenceGroupedLinear",
        tolerance={"float32": 2e-5, "bfloat16": 1e-2, "float16": 2e-3} | _COARSE,
        results={"apply": lambda f, x, *_: of_weight(f, x, name_of(x))},
        rows={"apply": (0,)},
        contiguous=True,
        heavy=True,
        cost=Cost({"apply": (_grouped_rows, _grouped)}, step=("apply",)),
        summary="each group of columns times rows of its own, packed once",
    )
    quantize_group: QuantizeGroup = op(
        reference=f"{_REF}:quantize_group",
        tolerance={"float32": 1e-2, "bfloat16": 1e-2, "float16": 1e-2},
        results={"": lambda f, x, group, u: codes(tuple(x.shape), group)},
        rows={"": (0,)},
        judge=_judge_codes,
        plain=True,
        cost=Cost({"": (_hidden, _rounded)}),
        summary="per-token-group FP8 quantisation",
    )
