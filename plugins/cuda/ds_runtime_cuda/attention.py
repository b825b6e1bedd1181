"""Attention of prompts on compute capability 9.0: csrc/attention.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_runtime.api import Facts, Segments
from ds_runtime_cuda import nvrtc
from ds_runtime_cuda.quant import GROUP, scale_columns

_SOURCE = "attention.cu"
_THREADS, _ON_CHIP = 384, 232_448
_BOXES = (64, 64, 128, 128, 128)  # tokens that are fetched together: of q, q_rope, k, k_rope, v
_SEQUENCES = 512  # of a launch
_CACHED = 16 << 20  # bytes of keys and values that heads may have which are computed together
_LOG2_E = 1.4426950408889634


class _AttentionArgs(ctypes.Structure):
    """Args of csrc/attention.cu."""

    _fields_ = (
        ("maps", ctypes.c_uint64 * 80),
        *((name, ctypes.c_void_p) for name in ("q_cu", "k_cu", "out", "lse", "codes", "scales")),
        ("scale", ctypes.c_float),
        *(
            (name, ctypes.c_int32)
            for name in (
                "sequences", "heads", "causal", "together",
                "q_head", "q_rope_head", "k_head", "v_head", "aligned", "powers",
            )
        ),
        ("_end", ctypes.c_char * 36),  # the struct is a multiple of 64 bytes
    )  # fmt: skip


def _defines() -> dict[str, int]:
    return {"BYTES": _ON_CHIP, "ARGS": ctypes.sizeof(_AttentionArgs), "SEQUENCES": _SEQUENCES}


@cache
def _function(device: torch.device) -> Any:
    """The kernel, for the current device, which `device` is."""
    module = nvrtc.module(_SOURCE, _defines(), "mha_prefill=triton")
    return module.function("attention", _ON_CHIP)


def compile_attention(facts: Facts, rows: Sequence[int]) -> None:
    """`Compiles.ahead`."""
    nvrtc.compile_for_device(_SOURCE, _defines())


class _Place(NamedTuple):
    """Where a tensor [tokens, heads, n] or [tokens, n] of bfloat16 lies."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def columns(self) -> int:
        """From a token's first value to behind its last."""
        sizes = zip(self.shape[1:-1], self.strides[1:-1], strict=True)
        return self.shape[-1] + sum((n - 1) * step for n, step in sizes)

    @property
    def is_read(self) -> bool:
        """By the copy engine: rows of tokens, heads side by side in them."""
        pitch, *_, last = self.strides
        return self.address % 16 == 0 == pitch % 8 and last == 1 and self.columns <= pitch

    def boxes(self, rows: int) -> tuple[int, ...]:
        """Its map, for boxes of so many rows."""
        args = self.address, torch.bfloat16, self.shape[0], self.columns, rows, self.strides[0]
        return nvrtc.box_map(*args)


@lru_cache(maxsize=1024)
def _arguments(places: tuple[_Place, ...], longest: int) -> _AttentionArgs:
    """All that a launch over these tensors has in common with the next. longest: keys of the
    longest sequence."""
    q, q_rope, k, _, v = places
    args, heads = _AttentionArgs(), q.shape[1]
    args.maps[:] = [w for each, n in zip(places, _BOXES, strict=True) for w in each.boxes(n)]
    args.heads, args.q_head, args.q_rope_head = heads, q.strides[1], q_rope.strides[1]
    args.k_head, args.v_head = k.strides[1], v.strides[1]
    most = max(1, _CACHED // max(1, longest * (128 + 128) * 2))
    args.together = next(n for n in range(min(heads, most), 0, -1) if heads % n == 0)
    return args


def mha_prefill(
    q: Tensor,
    q_rope: Tensor,
    k: Tensor,
    k_rope: Tensor,
    v: Tensor,
    q_segs: Segments,
    k_segs: Segments,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """MhaPrefill for 128 + 64 values of a key and 128 of a value, in bfloat16."""
    tokens, heads = q.shape[:2]
    out = torch.empty(tokens, heads, v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if not tokens:
        return out, lse
    if not k.shape[0]:
        return out.zero_(), lse.fill_(float("-inf"))
    each = [q, q_rope, k, k_rope, v]
    args = _read(each, k_segs.longest)
    args.out, args.lse = out.data_ptr(), lse.data_ptr()
    _launch(args, q_segs, k_segs, causal, scale, q.device)
    return out, lse


def mha_prefill_quantize(
    q: Tensor,
    q_rope: Tensor,
    k: Tensor,
    k_rope: Tensor,
    v: Tensor,
    segs: Segments,
    scale: float,
    group: int,
    ue8m0: bool,
) -> tuple[Tensor, Tensor]:
    """MhaPrefillQuantize for the same widths; scales as `scale_columns` lays them."""
    assert group == v.shape[2] == GROUP, f"a group of {group} for heads of {v.shape[2]} values"
    tokens, heads = q.shape[:2]
    codes = torch.empty(tokens, heads * GROUP, dtype=torch.float8_e4m3fn, device=q.device)
    scales = scale_columns(tokens, heads, q.device)
    if tokens:
        each = [q, q_rope, k, k_rope, v]
        args = _read(each, segs.longest)
        args.codes, args.scales = codes.data_ptr(), scales.data_ptr()
        args.aligned, args.powers = scales.stride(1), ue8m0
        _launch(args, segs, segs, True, scale, q.device)
    return codes, scales


def _read(each: list[Tensor], longest: int) -> _AttentionArgs:
    """Arguments with what is read: q, q_rope, k, k_rope and v, in whose place copies come that the
    caller holds until the launch. longest: see `_arguments`."""
    places = [_Place(x.data_ptr(), x.shape, x.stride()) for x in each]
    for i, place in enumerate(places):
        if not place.is_read:
            copy = each[i] = each[i].clone(memory_format=torch.contiguous_format)
            places[i] = _Place(copy.data_ptr(), copy.shape, copy.stride())
    return _AttentionArgs.from_buffer_copy(_arguments(tuple(places), longest))


def _launch(
    args: _AttentionArgs,
    q_segs: Segments,
    k_segs: Segments,
    causal: bool,
    scale: float,
    device: torch.device,
) -> None:
    args.scale, args.causal = scale * _LOG2_E, causal
    function, grid = _function(device), (nvrtc.cores(device), 1)
    for first in range(0, len(q_segs.lens), _SEQUENCES):
        args.sequences = min(_SEQUENCES, len(q_segs.lens) - first)
        args.q_cu = q_segs.cu.data_ptr() + 4 * first
        args.k_cu = k_segs.cu.data_ptr() + 4 * first
        nvrtc.launch(function, grid, _THREADS, _ON_CHIP, args)
