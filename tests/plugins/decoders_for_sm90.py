"""Compiles for sm90 what decodes packed codes by PTX, which the interpreter never reaches. Needs no
GPU; run as a script, since Triton compiles or interprets in a process, not both."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from ds_runtime_triton.jit.decode import decode_bytes, decode_e2m1, decode_e4m3, decode_int4

SIZE = tl.constexpr(256)


@triton.jit
def int4(words, out, SCALED: tl.constexpr):
    at = tl.arange(0, SIZE)
    one = tl.full((SIZE,), 1.0, tl.bfloat16)
    a, b, c, d = decode_int4(
        tl.load(words + at), one, one, one, one, one, one, one, one, SCALED, True, tl.bfloat16
    )
    tl.store(out + at, a + b + c + d)


@triton.jit
def e2m1(words, out, SCALED: tl.constexpr):
    at = tl.arange(0, SIZE)
    one = tl.full((SIZE,), 1.0, tl.bfloat16)
    a, b, c, d = decode_e2m1(tl.load(words + at), one, one, one, one, True, tl.bfloat16)
    tl.store(out + at, a + b + c + d)


@triton.jit
def e4m3(words, out, SCALED: tl.constexpr):
    at = tl.arange(0, SIZE)
    one = tl.full((SIZE,), 1.0, tl.bfloat16)
    a, b = decode_e4m3(tl.load(words + at), one, one, True, tl.bfloat16)
    tl.store(out + at, a + b)


@triton.jit
def numbers(words, out, SCALED: tl.constexpr):
    at = tl.arange(0, SIZE)
    a, b = decode_bytes(tl.load(words + at).to(tl.uint8), True, tl.float8e4nv)
    tl.store(out + at, a.to(tl.bfloat16) + b.to(tl.bfloat16))


def instructions(kernel: triton.JITFunction, scaled: bool = True) -> str:
    types = {"words": "*i16", "out": "*bf16", "SCALED": "constexpr"}
    source = ASTSource(kernel, types, {(2,): scaled})
    return str(compile_kernel(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])


if __name__ == "__main__":
    for scaled in (True, False):
        assert "lop3.b32" in instructions(int4, scaled), scaled
    for kernel in (e2m1, e4m3):
        assert "lop3.b32" in instructions(kernel), kernel
    assert "0x0f0f0f0f" in instructions(numbers)
