"""Routed experts for few tokens, about as fast as their weights can be read.

The kernels are csrc/experts_streaming.cu.

Both matmuls are one launch whose blocks fetch weights all the time. Weights lie as FP8_EXPERTS and
DENSE_EXPERTS say, so that kernels for more tokens read them, too. There may be a second form in
fewer bits, too (packed12/format.py of bfloat16, fp8_compressed.py of FP8), which is read instead.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ds_runtime.api import (
    DENSE_EXPERTS,
    FP8_EXPERTS,
    ExpertSource,
    Facts,
    Packed,
    ReferenceExperts,
)
from ds_runtime_cuda import fp8_compressed, nvrtc
from ds_runtime_cuda.expert_weights import MakesCodes, pack_blocks
from ds_runtime_cuda.gates import quantises
from ds_runtime_cuda.packed12 import experts as token_experts
from ds_runtime_cuda.packed12 import format as packed12
from ds_runtime_cuda.packed12.format import readable

_SOURCE, _PIN = "experts_streaming.cu", "experts=triton"
_THREADS = 64 + 256
_ON_CHIP = {1: 232_448, 2: 115_712}  # bytes for each block, by the blocks of a multiprocessor
_BOX, _EIGHT = 128, 8  # rows that are fetched together: of weights, of pairs
_PART = 1024  # columns that a block of `arrange` or `combine` takes at a time
_FEW = 32  # tokens up to which `arrange` has a block for every part of a row


class Form(NamedTuple):
    """What is compiled: pairs of an expert that are multiplied together; blocks of a
    multiprocessor, and stages of weights that each has on their way. coded: weights are held in
    fewer bits."""

    fp8: bool
    coded: bool
    pairs: int
    blocks: int
    stages: int


# By measurement on an H200, benchmarks/results/device_decode.md: by the most tokens, for weights in
# FP8 or not, as they are or in fewer bits.
_ANY = 1 << 30
_FORMS = {
    (True, False): {_ANY: Form(True, False, 16, 2, 4)},
    (True, True): {_ANY: Form(True, True, 16, 2, 4)},
    (False, False): {_ANY: Form(False, False, 32, 1, 6)},
    (False, True): {
        4: Form(False, True, 32, 1, 6),
        96: Form(False, True, 16, 2, 4),
        _ANY: Form(False, True, 32, 2, 4),
    },
}
_HELD = "tiles of fewer bits"  # in Packed.tensors: gate_up's and down's
_MOST = 16384  # tokens of a launch: experts' pairs and tiles are counted in 16 bits


class _StreamedArgs(ctypes.Structure):
    """Args of csrc/experts_streaming.cu."""

    _fields_ = (
        ("maps", ctypes.c_uint64 * 64),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "gate_up_scale", "down_scale", "x_scale", "h_scale", "x_rows", "h_rows", "y",
                "pair_of", "weight_of", "begins", "state", "input", "scales", "weights", "ids",
                "out",
            )
        ),
        *((name, ctypes.c_int64) for name in ("stride", "scale_row", "scale_group")),
        *(
            (name, ctypes.c_int32)
            for name in ("tokens", "top_k", "experts", "hidden", "inter", "rows", "most",
                         "powers")
        ),
        *((name, ctypes.c_void_p) for name in ("gate_up_tiles", "down_tiles")),
        *((name, ctypes.c_int32) for name in ("gate_up_stride", "down_stride",
                                                  "gate_up_base", "down_base")),
        *(
            (name, ctypes.c_float)
            for name in ("gate_up_back", "gate_up_lift", "down_back", "down_lift")
        ),
        ("_end", ctypes.c_char * 24),  # the struct is a multiple of 64 bytes
    )  # fmt: skip


def _form(fp8: bool, coded: bool, tokens: int) -> Form:
    return next(form for most, form in _FORMS[fp8, coded].items() if tokens <= most)


def _defines(form: Form) -> dict[str, int]:
    return {"FP8": int(form.fp8), "CODED": int(form.coded), "BM": form.pairs,
            "BLOCKS": form.blocks, "BYTES": _ON_CHIP[form.blocks], "STAGES": form.stages,
            "ARGS": ctypes.sizeof(_StreamedArgs)}  # fmt: skip


@cache
def _module(form: Form, device: torch.device) -> nvrtc.Module:
    """Of the current device, which `device` is."""
    return nvrtc.module(_SOURCE, _defines(form), _PIN)


def _compile(facts: Facts, coded: bool, rows: Sequence[int]) -> None:
    fp8 = facts.weight_format == "fp8_block"
    for form in dict.fromkeys(_form(fp8, coded, count) for count in rows if count):
        nvrtc.compile_for_device(_SOURCE, _defines(form))


def compile_experts(facts: Facts, rows: Sequence[int]) -> None:
    """`Compiles.ahead` of ExpertsFp8 and ExpertsDense."""
    _compile(facts, False, rows)


def compile_coded(facts: Facts, rows: Sequence[int]) -> None:
    """`Compiles.ahead` of ExpertsBlock7 and ExpertsDense12."""
    _compile(facts, True, rows)
    few = any(0 < count <= token_experts.MOST_TOKENS for count in rows)
    if few and facts.weight_format != "fp8_block":
        nvrtc.compile_for_device(token_experts.SOURCE, token_experts.defines())


def _run(
    x: Tensor, weights: Tensor, ids: Tensor, packed: Packed, scale: Tensor | None = None
) -> Tensor:
    """scale [tokens, groups]: of x, where that is codes."""
    held, (experts, hidden, inter) = packed.tensors, packed.shape
    upper, lower = held["gate_up"], held["down"]
    coded = held.get(_HELD)
    dtype, device, (tokens, top_k) = upper.dtype, x.device, ids.shape
    if tokens > _MOST:
        cut = [slice(begin, begin + _MOST) for begin in range(0, tokens, _MOST)]
        each = [(x[own], weights[own], ids[own]) for own in cut]
        sizes = [None if scale is None else scale[own] for own in cut]
        return torch.cat([_run(*p, packed, s) for p, s in zip(each, sizes, strict=True)])
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=device)
    pairs, fp8 = tokens * top_k, dtype == torch.float8_e4m3fn
    if not pairs:
        return out.zero_()
    x = readable(x)
    weights, ids = weights.contiguous(), ids.contiguous()
    if coded is not None and not fp8 and token_experts.fits(tokens, top_k, hidden, inter):
        return token_experts.run(x, weights, ids, coded, inter)
    form = _form(fp8, coded is not None, tokens)
    most = pairs // form.pairs + min(experts, pairs)  # tiles
    rows = most * form.pairs
    x_rows = torch.empty(rows, hidden, dtype=dtype, device=device)
    h_rows = torch.empty(rows, inter, dtype=dtype, device=device)
    y = torch.empty(pairs, hidden, dtype=torch.bfloat16, device=device)
    scales = torch.empty((hidden + inter) // 128 * fp8, rows, dtype=torch.float32, device=device)
    of = torch.empty(2, rows, dtype=torch.int32, device=device)
    counts = torch.empty(1 + most + experts + 1, dtype=torch.int32, device=device)
    args = _StreamedArgs()
    maps = (
        nvrtc.box_map(upper.data_ptr(), dtype, experts * 2 * inter, hidden, _BOX),
        nvrtc.box_map(lower.data_ptr(), dtype, experts * hidden, inter, _BOX),
        nvrtc.box_map(x_rows.data_ptr(), dtype, rows, hidden, _EIGHT),
        nvrtc.box_map(h_rows.data_ptr(), dtype, rows, inter, _EIGHT),
    )
    args.maps[:] = [word for each in maps for word in each]
    if fp8:
        args.gate_up_scale = held["gate_up_scale"].data_ptr()
        args.down_scale = held["down_scale"].data_ptr()
        args.x_scale, args.h_scale = scales.data_ptr(), scales[hidden // 128 :].data_ptr()
    if coded is not None:
        for name, each in zip(("gate_up", "down"), coded, strict=True):
            for field, value in each.fields().items():
                setattr(args, f"{name}_{field}", value)
    args.x_rows, args.h_rows, args.y = x_rows.data_ptr(), h_rows.data_ptr(), y.data_ptr()
    args.pair_of, args.weight_of = of.data_ptr(), of[1].data_ptr()
    args.state, args.begins = counts.data_ptr(), counts[1 + most :].data_ptr()
    args.input, args.stride, args.out = x.data_ptr(), x.stride(0), out.data_ptr()
    if scale is not None:
        args.scales = scale.data_ptr()
        args.scale_row, args.scale_group = scale.stride()
    args.weights, args.ids = weights.data_ptr(), ids.data_ptr()
    args.tokens, args.top_k, args.experts = tokens, top_k, experts
    args.hidden, args.inter, args.rows, args.most = hidden, inter, rows, most
    args.powers = int(held.get("ue8m0", False))
    module, room = _module(form, device), _ON_CHIP[form.blocks]
    parts = -(-hidden // _PART)
    arranging = (tokens, parts if tokens <= _FEW else 1)
    nvrtc.launch(module.function("arrange"), arranging, 256, 0, args)
    grid = (nvrtc.cores(device) * form.blocks, 1)
    nvrtc.launch(module.function("experts", room), grid, _THREADS, room, args)
    nvrtc.launch(module.function("combine"), (tokens, parts), 128, 0, args)
    return out


class _Beside:
    """A kernel that reads what it holds beside in fewer bits, where weights can be held so."""

    _encode: Callable[..., fp8_compressed.CodedFp8 | packed12.CodedDense | None]

    def serves(self, rows: int, packed: Packed) -> bool:
        """See Footprint.second_form."""
        return _HELD in packed.tensors

    def hold_second_form(self, packed: Packed) -> Packed:
        """See Footprint.second_form."""
        upper = self._encode(packed.tensors["gate_up"], _PIN, halves=2)
        lower = None if upper is None else self._encode(packed.tensors["down"], _PIN)
        if upper is None or lower is None:
            return packed
        tensors = {**packed.tensors, _HELD: (upper, lower)}
        nbytes = packed.nbytes + upper.tiles.nbytes + lower.tiles.nbytes
        return replace(packed, tensors=tensors, nbytes=nbytes)


class ExpertsFp8(MakesCodes):
    """FP8 weights in blocks, activations quantised per token and group before each matmul."""

    def __init__(self, facts: Facts) -> None:
        self._quantises = quantises(facts) is None

    def quantize(self, rows: int, x: Tensor, packed: Packed) -> tuple[Tensor, Tensor] | None:
        """See QuantizedExperts."""
        return super().quantize(rows, x, packed) if self._quantises else None

    def pack(self, source: ExpertSource, facts: Facts) -> Packed:
        return pack_blocks(source)

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        packed.expect(FP8_EXPERTS)
        return _run(x, weights, ids, packed)

    def apply_quantized(
        self, q: Tensor, scale: Tensor, weights: Tensor, ids: Tensor, packed: Packed
    ) -> Tensor:
        """See QuantizedExperts."""
        packed.expect(FP8_EXPERTS)
        return _run(q, weights, ids, packed, scale)


class ExpertsBlock7(_Beside, ExpertsFp8):
    """The same, read in about 7.3 bits each."""

    _encode = staticmethod(fp8_compressed.encode)

    def pack(self, source: ExpertSource, facts: Facts) -> Packed:
        return self.hold_second_form(super().pack(source, facts))


class ExpertsDense(ReferenceExperts):
    """Weights in bfloat16."""

    tag = DENSE_EXPERTS

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        return _run(x, weights, ids, packed)


class ExpertsDense12(_Beside, ExpertsDense):
    """The same, read in 12 bits each."""

    _encode = staticmethod(packed12.encode)

    def pack(self, source: ExpertSource, facts: Facts) -> Packed:
        return self.hold_second_form(super().pack(source, facts))
