"""Tiles of packed codes to tiles of numbers: one helper per kind of code.

A word of 16 bits holds one code of each of 4 planes (4 bits) or 2 planes (8 bits), plane 0 in the
low bits. The columns of a plane are neighbours, so a word's codes are never rearranged. PTX works
on two words in one register, with bit operations on both halves; it makes bfloat16. Without it the
same is written for every device and dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

_E2M1_BIAS, _E4M3_BIAS = 126, 120  # exponents by which the bits below are too small in bfloat16


def _asm(lines: list[str]) -> tl.constexpr:
    return tl.constexpr("{ .reg .b32 t, u;\n" + "\n".join(lines) + "\n}")


def _int4(plane: int) -> list[str]:
    """Output `plane`: 128 + code."""
    source = "$4" if plane == 0 else "t"
    shift = [f"shr.b32 t, $4, {4 * plane};"] if plane else []
    return [*shift, f"lop3.b32 ${plane}, {source}, 0x000f000f, 0x43004300, 0xea;"]


def _e2m1(plane: int) -> list[str]:
    """Output `plane`: the sign, and the other bits as exponent and mantissa."""
    left, place = 12 - 4 * plane, 6 - 4 * plane
    sign = [f"shl.b32 t, $4, {left};"] if left else ["mov.b32 t, $4;"]
    move = f"shl.b32 u, $4, {place};" if place > 0 else f"shr.b32 u, $4, {-place};"
    merge = f"lop3.b32 ${plane}, t, 0x80008000, u, 0xea;"
    return [*sign, move, "and.b32 u, u, 0x01c001c0;", merge]


def _e4m3(plane: int) -> list[str]:
    sign = "shl.b32 t, $2, 8;" if plane == 0 else "mov.b32 t, $2;"
    move = "shl.b32 u, $2, 4;" if plane == 0 else "shr.b32 u, $2, 4;"
    merge = f"lop3.b32 ${plane}, t, 0x80008000, u, 0xea;"
    return [sign, move, "and.b32 u, u, 0x07f007f0;", merge]


def _each(op: str, first: int, planes: int, step: int = 1) -> list[str]:
    """`op` of every output with its operand, the operands beginning at `first`."""
    return [f"{op}.bf16x2 ${i}, ${i}, ${first + i * step};" for i in range(planes)]


def _all(one, planes: int) -> list[str]:  # type: ignore[no-untyped-def]
    return [line for plane in range(planes) for line in one(plane)]


_INT4 = _asm([*_all(_int4, 4), *_each("sub", 5, 4, 0)])
_INT4_SCALED = _asm([*_all(_int4, 4), *_each("sub", 5, 4), *_each("mul", 9, 4)])
_E2M1 = _asm([*_all(_e2m1, 4), *_each("mul", 5, 4)])
_E4M3 = _asm([*_all(_e4m3, 2), *_each("mul", 3, 2)])
_BYTES = tl.constexpr("{ .reg .b32 t;\nand.b32 $0, $2, 0x0f0f0f0f;\nshr.b32 t, $2, 4;\n"
                      "and.b32 $1, t, 0x0f0f0f0f; }")  # fmt: skip


@triton.jit
def decode_int4(
    word, z0, z1, z2, z3, s0, s1, s2, s3, SCALED: tl.constexpr, PTX: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Four planes (code − z) · s; without SCALED only z0 counts, and no s. Scales and zeros are
    float32, with PTX bfloat16."""
    if PTX:
        if SCALED:
            return tl.inline_asm_elementwise(
                _INT4_SCALED, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r",
                [word, z0 + 128, z1 + 128, z2 + 128, z3 + 128, s0, s1, s2, s3],
                (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                _INT4, "=r,=r,=r,=r,r,r", [word, z0 + 128],
                (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2,
            )  # fmt: skip
    else:
        w0, w1 = (word & 15).to(tl.float32), ((word >> 4) & 15).to(tl.float32)
        w2, w3 = ((word >> 8) & 15).to(tl.float32), ((word >> 12) & 15).to(tl.float32)
        if SCALED:
            w0, w1, w2, w3 = (w0 - z0) * s0, (w1 - z1) * s1, (w2 - z2) * s2, (w3 - z3) * s3
        else:
            w0, w1, w2, w3 = w0 - z0, w1 - z0, w2 - z0, w3 - z0
        return w0.to(dtype), w1.to(dtype), w2.to(dtype), w3.to(dtype)


@triton.jit
def e2m1_value(code):
    """Codes of 4 bits in int32 as float32."""
    exponent = (code >> 1) & 3
    size = ((code & 1) + tl.where(exponent > 0, 2, 0)) << tl.maximum(exponent - 1, 0)
    return tl.where((code & 8) != 0, -size, size).to(tl.float32) * 0.5


@triton.jit
def e4m3_value(code):
    """Codes of 8 bits in int32, no NaN among them, as float32: m · 2^(e − 10)."""
    exponent = (code >> 3) & 15
    size = ((code & 7) + tl.where(exponent > 0, 8, 0)).to(tl.float32)
    power = ((tl.maximum(exponent, 1) + 117) << 23).to(tl.float32, bitcast=True)
    return tl.where((code & 128) != 0, -size, size) * power


@triton.jit
def decode_e2m1(word, s0, s1, s2, s3, PTX: tl.constexpr, dtype: tl.constexpr):
    """Four planes code · s. PTX: s is 2^126 too large."""
    if PTX:
        return tl.inline_asm_elementwise(
            _E2M1, "=r,=r,=r,=r,r,r,r,r,r", [word, s0, s1, s2, s3],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2,
        )  # fmt: skip
    else:
        code = word.to(tl.int32)
        w0, w1 = e2m1_value(code & 15) * s0, e2m1_value((code >> 4) & 15) * s1
        w2, w3 = e2m1_value((code >> 8) & 15) * s2, e2m1_value((code >> 12) & 15) * s3
        return w0.to(dtype), w1.to(dtype), w2.to(dtype), w3.to(dtype)


@triton.jit
def decode_e4m3(word, s0, s1, PTX: tl.constexpr, dtype: tl.constexpr):
    """Two planes code · s. PTX: s is 2^120 too large."""
    if PTX:
        return tl.inline_asm_elementwise(
            _E4M3, "=r,=r,r,r,r", [word, s0, s1], (tl.bfloat16, tl.bfloat16), True, 2
        )
    else:
        code = word.to(tl.int32)
        w0, w1 = e4m3_value(code & 255) * s0, e4m3_value((code >> 8) & 255) * s1
        return w0.to(dtype), w1.to(dtype)


@triton.jit
def decode_int8(word, z0, z1, s0, s1, dtype: tl.constexpr):
    """Two planes (code − z) · s."""
    code = word.to(tl.int32)
    w0, w1 = (code << 24) >> 24, (code << 16) >> 24
    return ((w0 - z0) * s0).to(dtype), ((w1 - z1) * s1).to(dtype)


@triton.jit
def decode_bytes(word, PTX: tl.constexpr, dtype: tl.constexpr):
    """Words of 8 bits, two planes of 4: codes 0 … 15 as e4m3 numbers code · 2^-9. The bits of an
    e4m3 number below 2^-5 are that integer, so a mask is all it takes."""
    if PTX:
        low, high = tl.inline_asm_elementwise(
            _BYTES, "=r,=r,r", [word], (tl.uint8, tl.uint8), True, 4
        )
    else:
        low, high = word & 15, word >> 4
    return low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)


@triton.jit
def byte_scale(bits, SHIFT: tl.constexpr, MORE: tl.constexpr, PTX: tl.constexpr):
    """A scale's byte in int32 as a number. SHIFT 7: 2^(byte − 127). SHIFT 4: 5 bits of exponent,
    of 2^(e − 31), and 3 of mantissa. PTX: 2^MORE times that, in bfloat16."""
    base: tl.constexpr = 96 * 128 if SHIFT == 4 else 0
    made = (bits << SHIFT) + base
    if PTX:
        return (made + MORE * 128).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return (made << 16).to(tl.float32, bitcast=True)
