"""Torch references of linear, embedding and activation quantisation.

`ReferenceLinear` multiplies dequantised weights. `Fp8W8A8Linear` keeps FP8 weights and does the
arithmetic of DeepSeek's FP8 training framework: a yardstick for native FP8 kernels, chosen only
by a pin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime.ops.contract import Facts
from ds_runtime.ops.contracts.linear import Groups
from ds_runtime.ops.dtypes import decode_scale, fp8_vectors, torch_dtype, wide
from ds_runtime.ops.formats import FORMATS
from ds_runtime.ops.reference.cases import OTHERS, Call, Case, Maker, Saved, case, site
from ds_runtime.ops.reference.matrices import fp8_blocks
from ds_runtime.ops.weight import Packed, Weight, WeightPart


class ReferenceLinear:
    """Reference of Linear: weights dequantised to the compute dtype, then one matmul."""

    tag = "reference.linear"

    def __init__(self, facts: Facts) -> None:
        self.dtype = torch_dtype(facts.dtype)

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        values = _whole_tiles(weight.dequantise(self.dtype))
        return Packed(
            tag=self.tag,
            shape=weight.shape,
            tensors={"weight": values},
            nbytes=values.nbytes,
            restore=_restore_weight,
        )

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        return F.linear(_whole_tiles(x), packed.tensors["weight"])

    def quantizes(self, rows: int, packed: Packed) -> Groups | None:
        """Nothing: x is multiplied as it is."""
        return None

    def apply_quantized(self, q: Tensor, scale: Tensor, packed: Packed) -> Tensor:
        """`apply` of what q and scale stand for."""
        compute = wide(self.dtype)
        width = q.shape[1] // scale.shape[1]
        values = q.to(compute) * scale.to(compute).repeat_interleave(width, 1)
        return self.apply(values.to(self.dtype), packed)

    def gives_float32(self, rows: int, packed: Packed) -> bool:
        """No: a float32 copy of the weight costs more than rounding."""
        return False

    def apply_float32(self, x: Tensor, packed: Packed, out: Tensor | None = None) -> Tensor:
        """`apply` with float32 copies, where that is asked for all the same."""
        packed.expect(self.tag)
        compute = wide(self.dtype)
        y = F.linear(_whole_tiles(x).to(compute), packed.tensors["weight"].to(compute))
        return y if out is None else out.copy_(y)


@cache
def sums_in_float32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's matmul of this dtype has float32 results on such a device."""
    if dtype == torch.float32:
        return True
    a = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        return bool(torch.mm(a, a, out_dtype=torch.float32)[0, 0] == 16)
    except RuntimeError:  # among them NotImplementedError, of a device without such a matmul
        return False


def float32_product(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """x [tokens, in] · weightᵀ of weight [out, in], float32 and not rounded before, where
    `sums_in_float32`: in `out` or a new tensor.
    """
    if out is None:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    if x.dtype == torch.float32:
        return torch.mm(x, weight.t(), out=out)
    return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)


def _whole_tiles(rows: Tensor) -> Tensor:
    """Rows filled up with zeros to a multiple of 32 columns, where they are 16-bit on a CPU.

    On processors with matrix tiles, torch's matmul reads shorter rows beyond their end: the NaN
    of a neighbour would spoil them.
    """
    if rows.device.type != "cpu" or rows.dtype.itemsize != 2 or rows.shape[1] % 32 == 0:
        return rows
    return F.pad(rows, (0, -rows.shape[1] % 32))


def _restore_weight(packed: Packed) -> Tensor:
    values: Tensor = packed.tensors["weight"][:, : packed.shape[1]]
    return values.to(wide(values.dtype))


class Fp8W8A8Linear:
    """FP8 × FP8 with one scale per token and 128 channels, and per weight block.

    Each block of 128 input channels accumulates in fp32 and is scaled before it is added. Weight
    scales that are all powers of two, in whatever type, ask for such activation scales too.
    """

    tag = "reference.linear_fp8_w8a8"

    def __init__(self, facts: Facts) -> None:
        self.dtype = torch_dtype(facts.dtype)

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        weight.expect(("fp8_block",), self.tag)
        ue8m0 = all(
            fp8_blocks.powers_of_two(decode_scale(p.tensors["scale"], torch.float64))
            for p in weight.parts
        )
        tensors: dict[str, object] = {"weight": weight, "ue8m0": ue8m0}
        nbytes = sum(t.nbytes for p in weight.parts for t in p.tensors.values())
        return Packed(self.tag, weight.shape, tensors, nbytes, restore=_restore_parts)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        weight: Weight = packed.tensors["weight"]
        ue8m0: bool = packed.tensors["ue8m0"]
        return torch.cat([_w8a8(x, part, ue8m0) for part in weight.parts], dim=-1).to(x.dtype)


def _restore_parts(packed: Packed) -> Tensor:
    weight: Weight = packed.tensors["weight"]
    return weight.dequantise(torch.float32)


def _w8a8(x: Tensor, part: WeightPart, ue8m0: bool) -> Tensor:
    """[tokens, in] × one FP8 part → [tokens, rows], fp32 (float64 if x is)."""
    assert part.block is not None
    compute = wide(x.dtype)
    (rows, cols), (height, width), (row0, col0) = part.shape, part.block, part.offset
    scale = decode_scale(part.tensors["scale"], compute).repeat_interleave(height, 0)[
        row0 : row0 + rows
    ]
    weight = part.tensors["weight"]
    # A shard may begin inside a block: padding restores the groups that the scales describe.
    padded = F.pad(x.to(compute), (col0, -(col0 + cols) % width))
    q, x_scale = quantize_group(padded, width, ue8m0)
    out = torch.zeros(x.shape[0], rows, dtype=compute, device=x.device)
    for block in range(x_scale.shape[1]):
        lo, hi = max(block * width, col0), min((block + 1) * width, col0 + cols)
        product = q[:, lo:hi].to(compute) @ weight[:, lo - col0 : hi - col0].to(compute).T
        out += product * x_scale[:, block, None].to(compute) * scale[:, block]
    return out


def embed(ids: Tensor, table: Tensor, start: int) -> Tensor:
    """Reference of Embed."""
    local = ids - start
    held = (local >= 0) & (local < table.shape[0])
    if table.shape[0] == 0:
        return table.new_zeros(ids.shape[0], table.shape[1])
    rows = table[local.clamp(0, table.shape[0] - 1)]  # [tokens, hidden]
    return torch.where(held.unsqueeze(-1), rows, rows.new_zeros(()))


def quantize_group(x: Tensor, group: int, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Reference of QuantizeGroup; scales are float64 for a float64 input."""
    compute = wide(x.dtype)
    tokens, n = x.shape
    q, scale = fp8_vectors(x.to(compute).reshape(tokens, n // group, group), ue8m0)
    return q.reshape(tokens, n), scale


def _quantised(weight: Weight, inputs: Sequence[Tensor]) -> Iterator[Call]:
    """Calls of a whole FP8 weight with inputs quantised by groups of 128, for kernels that take
    these; scales that are powers of two serve the others, too. Scales lie both ways."""
    parts = weight.parts
    whole = weight.shape[1] % 128 == 0 and all(p.offset == (0, 0) for p in parts)
    for x in inputs if weight.format == "fp8_block" and whole else ():
        for ue8m0 in (False, True):
            q, scale = quantize_group(x, 128, ue8m0)
            answers = tuple(Groups(128, power) for power in (False, True)[: 1 + ue8m0])
            for laid in (scale, scale.T.contiguous().T):
                yield Call(
                    (q, laid, Saved("packed")),
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
        yield Call(
            (x, Saved("packed"), *into),
            method="apply_float32",
            written=(2,) * len(into),
            asks="gives_float32",
            answers=(True,),
        )


def _linear_case(label: str, facts: Facts, weight: Weight, *inputs: Tensor) -> Case:
    """FP8 weights of whole groups: also by activations that are quantised already."""
    facts = site(facts, weight)
    foreign = Packed("nobody.nothing", weight.shape, {}, 0)
    return Case(
        label,
        facts,
        (
            Call((weight, facts), method="pack", save="packed"),
            *(Call((x, Saved("packed")), method="apply") for x in inputs),
            *_quantised(weight, inputs),
            *(call for x in inputs for call in _in_float32(x, weight.shape[0])),
            Call((inputs[-1], foreign), method="apply", raises=TypeError),
        ),
    )


# label, shape, rows of parts, offset, format
_Sample = tuple[str, tuple[int, int], tuple[int, ...], tuple[int, int], str]


def _others() -> Iterator[_Sample]:
    """Of the formats that few kernels read."""
    for fmt in OTHERS:
        yield f"{fmt} even", (128, 256), (), (0, 0), fmt
        yield f"{fmt} odd", (77, 131), (31, 46), (0, 0), fmt
        height, width = FORMATS[fmt.partition(" ")[0]].block
        cut = (5 if height > 1 else 0, 7 if width and fmt != "int4_actorder" else 0)
        if any(cut):
            yield f"{fmt} cut", (70, 81), (), cut, fmt


def linear_samples(facts: Facts) -> Iterator[Case]:
    """Dense and FP8 weights, joined parts, partial blocks, shards that cut a block."""
    for out, n in ((1, 1), (3, 5), (64, 128), (130, 70), (257, 384)):
        make = Maker(facts, label := f"dense {out}x{n}")
        inputs = [make.normal(tokens, n) for tokens in (0, 1, 2, 5, 17, 33)]
        inputs[-1][7] = float("nan")  # is no other row's business
        yield _linear_case(label, facts, make.weight(out, n), *inputs)
    make = Maker(facts, "dense parts")
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
    )
    for label, (out, n), parts, offset, scale in blocks:
        make = Maker(facts, label)
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
        make = Maker(facts, label)
        weight = make.weight(out, n, fmt, rows, cut)
        inputs = [make.normal(tokens, n) for tokens in (0, 1, 6)]
        awkward = make.normal(19, n)
        awkward[0], awkward[1], awkward[2] = 0, awkward[1] * 1e-6, awkward[2] * 1e4
        awkward[3, 1] = float("nan")
        yield _linear_case(label, facts, weight, *inputs, make.inside(awkward))


def embed_samples(facts: Facts) -> Iterator[Case]:
    """Shards of a vocabulary: ids before, inside and after it."""
    for tokens, start in ((0, 0), (1, 0), (9, 0), (40, 32)):
        make = Maker(facts, label := f"{tokens} tokens from {start}")
        table = make.normal(32, 48)
        yield case(label, facts, make.integers(0, start + 64, tokens), table, start)
    make = Maker(facts, "all elsewhere")
    yield case("all elsewhere", facts, make.integers(0, 10, 5), make.normal(6, 33), 10)


def quantize_group_samples(facts: Facts) -> Iterator[Case]:
    """Both scale kinds, strides, a group of zeros, outliers."""
    for ue8m0 in (False, True):
        kind = "power-of-two" if ue8m0 else "float"
        for tokens, n in ((0, 128), (1, 128), (7, 384)):
            make = Maker(facts, label := f"{kind} {tokens}x{n}")
            yield case(label, facts, make.normal(tokens, n), 128, ue8m0)
        make = Maker(facts, f"{kind} awkward")
        x = make.normal(5, 256)
        x[1, :128], x[2, 7], x[3] = 0, 3e4, x[3] * 1e-6
        yield case(f"{kind} awkward", facts, make.inside(x), 128, ue8m0)
