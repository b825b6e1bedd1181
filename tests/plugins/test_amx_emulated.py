"""The emulated matrix units (tests/native/amx_emulated.h) against what Intel's manual says of them,
in exact arithmetic. `tools/check_native.py amx` runs kernels on them.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

HEADER = Path(__file__).parents[1] / "native" / "amx_emulated.h"
pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="the header is for x86-64"
)
# to += a * b with a caller whose own rounding is up; returns its state afterwards.
SOURCE = """
extern "C" unsigned multiply(int kind, const void* config, const void* c, const void* a, long lda,
                             const void* b, long ldb, void* to) {
  const unsigned before = _mm_getcsr(), up = (before & ~0x8040u) | 0x4000;
  _mm_setcsr(up);
  _tile_loadconfig(config);
  if (c)
    _tile_loadd(0, c, 64);
  else
    _tile_zero(0);
  _tile_loadd(1, a, lda);
  _tile_loadd(2, b, ldb);
  if (kind == 0) _tile_dpbf16ps(0, 1, 2);
  if (kind == 1) _tile_dpbssd(0, 1, 2);
  if (kind == 2) _tile_dpbsud(0, 1, 2);
  if (kind == 3) _tile_dpbusd(0, 1, 2);
  if (kind == 4) _tile_dpbuud(0, 1, 2);
  _tile_stored(0, to, 64);
  _tile_release();
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  return after == up;
}
extern "C" void unconfigured() { _tile_zero(3); }
"""
Multiply = Callable[..., np.ndarray]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("amx")
    source, made = folder / "amx.cpp", folder / "amx.so"
    source.write_text(SOURCE)
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-shared", "-fPIC"]
    done = subprocess.run(
        [*command, "-include", HEADER, source, "-o", made], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return made


def shape_of(rows: int, depth: int, columns: int) -> np.ndarray:
    """A configuration of tiles 0 (sums), 1 and 2; depth and columns in words."""
    config = np.zeros(64, np.uint8)
    config[0] = 1
    for tile, (height, words) in enumerate([(rows, columns), (rows, depth), (depth, columns)]):
        config[16 + 2 * tile] = 4 * words
        config[48 + tile] = height
    return config


@pytest.fixture(scope="module")
def multiply(library) -> Multiply:
    call = ctypes.CDLL(str(library)).multiply

    def run(kind: int, a: np.ndarray, b: np.ndarray, c: np.ndarray | None) -> np.ndarray:
        """Bytes a [rows, 4 depth] and b [depth, 4 columns], words c [rows, columns] to words."""
        rows, depth, columns = len(a), len(b), b.shape[1] // 4
        wide_a, wide_b = np.full((rows, 96), 7, np.uint8), np.full((depth, 80), 7, np.uint8)
        wide_a[:, : a.shape[1]], wide_b[:, : b.shape[1]] = a, b
        out = np.full((16, 16), 0xABABABAB, np.uint32)
        sums = None
        if c is not None:
            sums = np.zeros((16, 16), np.uint32)
            sums[:rows, :columns] = c
        pointer = [None if x is None else x.ctypes.data_as(ctypes.c_void_p) for x in (sums, out)]
        config = shape_of(rows, depth, columns).ctypes.data_as(ctypes.c_void_p)
        ours = (
            *(pointer[0], wide_a.ctypes.data_as(ctypes.c_void_p), ctypes.c_long(96)),
            *(wide_b.ctypes.data_as(ctypes.c_void_p), ctypes.c_long(80), pointer[1]),
        )
        assert call(kind, config, *ours) == 1, "the caller's rounding has changed"
        beyond = np.ones((16, 16), bool)
        beyond[:rows, :columns] = False
        assert (out[beyond] == 0xABABABAB).all(), "more was stored than the tile has"
        return out[:rows, :columns]

    return run


def flushed(x: Fraction) -> Fraction:
    """To the nearest float32, ties to even; what would be subnormal is zero."""
    if x == 0:
        return x
    size = abs(x)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    unit = Fraction(2) ** (exponent - 23)
    nearest = round(size / unit) * unit
    return Fraction(0) if nearest < Fraction(2) ** -126 else nearest * (1 if x > 0 else -1)


def read(bits: int) -> Fraction:
    """A float32 as tiles read it."""
    return flushed(Fraction(float(np.uint32(bits).view(np.float32))))


def by_the_manual(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """TDPBF16PS over pairs a [rows, depth, 2], b [depth, columns, 2] and sums c, as bits."""
    out = np.zeros(c.shape, np.float32)
    for m, n in np.ndindex(c.shape):
        parts = [Fraction(0), Fraction(0)]
        for k in range(len(b)):
            for i in range(2):
                parts[i] = flushed(parts[i] + read(a[m, k, i]) * read(b[k, n, i]))
        out[m, n] = float(flushed(read(c[m, n]) + flushed(parts[0] + parts[1])))
    return out


# Exponents: ordinary ones, all that neither overflow nor stay, and around the smallest products.
EXPONENTS = [(120, 134), (1, 185), (56, 72), (0, 2)]
sizes = st.integers(1, 16)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), sizes, st.integers(1, 5), st.sampled_from(EXPONENTS), st.integers(0, 99))
def test_bfloat16_is_summed_as_the_manual_says(multiply, rows, depth, columns, exponents, seed):
    rng = np.random.default_rng(seed)

    def bfloat16(*shape: int) -> np.ndarray:
        exponent = rng.integers(*exponents, shape, endpoint=True).astype(np.uint32) << 7
        return (
            exponent
            | rng.integers(0, 128, shape).astype(np.uint32)
            | rng.integers(0, 2, shape).astype(np.uint32) << 15
        )

    a, b = bfloat16(rows, depth, 2), bfloat16(depth, columns, 2)
    c = (bfloat16(rows, columns) << 16 | rng.integers(0, 1 << 16, (rows, columns))).astype(
        np.uint32
    )
    bytes_of = [x.astype(np.uint16).reshape(len(x), -1).view(np.uint8) for x in (a, b)]
    found = multiply(0, *bytes_of, c).view(np.float32)
    np.testing.assert_array_equal(found, by_the_manual(a << 16, b << 16, c))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), sizes, sizes, sizes, st.booleans(), st.integers(0, 99))
def test_bytes_are_multiplied_by_their_signs(multiply, kind, rows, depth, columns, fresh, seed):
    rng = np.random.default_rng(seed)
    a, b = (
        rng.integers(0, 256, (n, 4 * w), np.uint8) for n, w in [(rows, depth), (depth, columns)]
    )
    c = None if fresh else rng.integers(0, 1 << 32, (rows, columns), np.uint32)
    signed = {1: (1, 1), 2: (1, 0), 3: (0, 1), 4: (0, 0)}[kind]
    x, y = (
        v.view(np.int8 if s else np.uint8).astype(np.int64)
        for v, s in zip((a, b), signed, strict=True)
    )
    dots = x @ y.reshape(depth, columns, 4).transpose(0, 2, 1).reshape(4 * depth, columns)
    want = (dots + (0 if c is None else c)).astype(np.uint32)
    np.testing.assert_array_equal(multiply(kind, a, b, c), want)


@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_what_is_no_number_comes_through(multiply, number):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s).astype(np.float32) for s in [(3, 8), (4, 10)])
    a[1, 5] = number
    halves = [(x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8) for x in (a, b)]
    found = multiply(0, *halves, None).view(np.float32)
    assert np.isfinite(found[[0, 2]]).all() and not np.isfinite(found[1]).any()


FAULTS = {
    "an unknown palette": (lambda c: c.__setitem__(0, 2), "a palette that is not 0 or 1"),
    "a reserved byte": (lambda c: c.__setitem__(40, 1), "a reserved byte that is not zero"),
    "a long row": (lambda c: c.__setitem__(16, 68), "more than 16 rows or 64 bytes"),
    "many rows": (lambda c: c.__setitem__(49, 17), "more than 16 rows or 64 bytes"),
    "no rows": (lambda c: c.__setitem__(48, 0), "rows without bytes, or the other way"),
    "an unlike depth": (lambda c: c.__setitem__(50, 3), "tiles whose shapes do not fit"),
    "half a word": (lambda c: c.__setitem__(18, 6), "rows that are not whole words"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_processor_is_one_here(library, name):
    change, says = FAULTS[name]
    config = shape_of(2, 2, 2)
    change(config)
    code = f"""
import ctypes
memory = ctypes.create_string_buffer(4096)
at = ctypes.c_void_p(ctypes.addressof(memory))
step = ctypes.c_long(64)
ctypes.CDLL({str(library)!r}).multiply(0, {config.tobytes()!r}, at, at, step, at, step, at)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode and "AMX fault: " in done.stderr and says in done.stderr


def test_tiles_must_be_configured(library):
    code = f"import ctypes; ctypes.CDLL({str(library)!r}).unconfigured()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode and "AMX fault: tiles that are not configured" in done.stderr
