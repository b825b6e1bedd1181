"""Routed experts with weights of few bits, kept as they are: sort, gate and up, down, sum."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_runtime.api import ExpertSource, Facts, Packed, UnsupportedError, Weight, torch_dtype
from ds_runtime_triton.coded import (
    CODES,
    Coded,
    Form,
    coded,
    form_of,
    taking_turns,
    wide_values,
)
from ds_runtime_triton.config import Config, Sizes, folder, tuned
from ds_runtime_triton.expert_launches import part_of_config
from ds_runtime_triton.experts import (
    ExpertsDense,
    dense_variant,
    some_absent,
    variant,
)
from ds_runtime_triton.jit.coded import coded_experts_kernel
from ds_runtime_triton.launch import cdiv
from ds_runtime_triton.pairs import Tiles, sorted_pairs, sum_of_pairs
from ds_runtime_triton.quant import quantise_for_int4
from ds_runtime_triton.weight_only import ptx


@dataclass
class CodedStack:
    """One matrix of every expert: the tensors of `Coded`, with a dimension of experts before."""

    form: Form
    rows: int
    words: Tensor
    scale: Tensor
    zero: Tensor
    row_scale: Tensor

    @staticmethod
    def like(held: Coded, count: int) -> CodedStack:
        """Room for `count` of these."""
        tensors = (held.words, held.scale, held.zero, held.row_scale)
        made = [t.new_empty((count, *t.shape)) for t in tensors]
        return CodedStack(held.form, held.words.shape[1], *made)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.words, self.scale, self.zero, self.row_scale))

    @property
    def scale_rows(self) -> int:
        """Numbers of one expert's scales and zeros, in rows of the matrix."""
        return self.scale.shape[1] if self.form.scales else 0

    def put(self, at: int, held: Coded) -> None:
        """Raises UnsupportedError if this expert's weight is not kept as the first one's is."""
        if held.form != self.form:
            raise UnsupportedError(f"expert {at} is stored as {held.form}, expert 0 as {self.form}")
        self.words[at], self.scale[at] = held.words, held.scale
        self.zero[at], self.row_scale[at] = held.zero, held.row_scale

    def one(self, at: int) -> Coded:
        tensors = (self.words, self.scale, self.zero, self.row_scale)
        return Coded(self.form, *(t[at] for t in tensors))


@dataclass
class CodedLayer:
    """The experts of one layer, and how to launch over them."""

    gate_up: CodedStack  # rows of gate and up in turns: [experts, 2 · intermediate, hidden]
    down: CodedStack  # [experts, hidden, intermediate]
    sizes: Sizes
    absent: bool  # other ranks have experts, too


def weight_only_variant(facts: Facts, rows: int) -> Hashable:
    """`Compiles.variant` of ExpertsWeightOnly, which may have to keep weights dense."""
    return variant(facts, "experts_weight_only", rows), dense_variant(facts, rows)


def w4afp8_variant(facts: Facts, rows: int) -> Hashable:
    """Of ExpertsW4AFp8."""
    return variant(facts, "experts_w4afp8", rows), dense_variant(facts, rows)


class _Replayed:
    """A source of which the first expert was read already."""

    def __init__(self, source: ExpertSource, first: tuple[Weight, Weight, Weight]) -> None:
        self._source, self._first = source, first
        self.num_experts, self.format = source.num_experts, source.format
        self.hidden, self.intermediate = source.hidden, source.intermediate

    def expert(self, index: int) -> tuple[Weight, Weight, Weight]:
        return self._first if index == 0 else self._source.expert(index)


class ExpertsWeightOnly:
    """Tokens stay in the compute dtype; so are shards kept that cut groups too finely."""

    tag = "triton.experts_weight_only"
    fp8_tokens = False
    reads = frozenset(CODES)

    def __init__(self, facts: Facts) -> None:
        self.dtype = torch_dtype(facts.dtype)
        self.dense = ExpertsDense(facts)
        self.arch = folder(facts.device.arch, facts.dtype)

    def pack(self, source: ExpertSource, facts: Facts) -> Packed:
        if source.format not in self.reads:
            read = " and ".join(sorted(self.reads))
            raise TypeError(f"{self.tag} reads {read}, not {source.format}")
        count, hidden, inter = source.num_experts, source.hidden, source.intermediate
        first = source.expert(0)
        forms = self._forms(first)
        replayed = _Replayed(source, first)
        if forms is None:
            inner = self.dense.pack(replayed, facts)
            return Packed(self.tag, inner.shape, {"dense": inner}, inner.nbytes, _restore)
        layer: CodedLayer | None = None
        for e in range(count):
            gate, up, down = (coded(w, f) for w, f in zip(replayed.expert(e), forms, strict=True))
            turns = taking_turns(gate, up)
            if layer is None:
                key = f"E={count},N={inter},K={hidden}"
                sizes = tuned(self.arch, self.tag.removeprefix("triton."), key)
                stacks = CodedStack.like(turns, count), CodedStack.like(down, count)
                layer = CodedLayer(*stacks, sizes, some_absent(facts))
            layer.gate_up.put(e, turns)
            layer.down.put(e, down)
        assert layer is not None, "a layer without experts"
        nbytes = layer.gate_up.nbytes + layer.down.nbytes
        tensors = {"dense": None, "layer": layer}
        return Packed(self.tag, (count, hidden, inter), tensors, nbytes, _restore)

    def _forms(self, weights: tuple[Weight, Weight, Weight]) -> tuple[Form, Form, Form] | None:
        """How each is kept; None: dense. FP8 tokens only where all weights take them."""
        for fp8 in (True, False) if self.fp8_tokens else (False,):
            gate, up, down = (form_of(w, fp8) for w in weights)
            if gate is not None and gate == up and down is not None:
                return gate, up, down
        return None

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        if packed.tensors["dense"] is not None:
            return self.dense.apply(x, weights, ids, packed.tensors["dense"])
        if x.shape[0] == 0 or ids.shape[1] == 0:
            return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        layer: CodedLayer = packed.tensors["layer"]
        x = x if x.stride(1) == 1 else x.contiguous()
        return run(x, weights.contiguous(), ids.contiguous(), layer, layer.sizes.at(ids.numel()))


def run(x: Tensor, weights: Tensor, ids: Tensor, layer: CodedLayer, config: Config) -> Tensor:
    pairs = ids.numel()
    if config["DIRECT"]:
        tiles = Tiles(ids, ids, ids, pairs)
    else:
        tiles = sorted_pairs(ids, layer.down.words.shape[0], config["BLOCK_M"])
    inter, hidden = layer.gate_up.rows // 2, layer.down.rows
    h = torch.empty(pairs, inter, dtype=x.dtype, device=x.device)
    absent = layer.absent and bool(config["DIRECT"])
    up, down = ({**part_of_config(config, name), "ABSENT": absent} for name in ("UP_", "DN_"))
    multiply(x, layer.gate_up, weights, h, tiles, ids, up, True)
    y = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    multiply(h, layer.down, weights, y, tiles, ids, down, False)
    return sum_of_pairs(y, ids, layer.absent)


def multiply(
    x: Tensor,
    stack: CodedStack,
    weights: Tensor,
    out: Tensor,
    tiles: Tiles,
    ids: Tensor,
    config: dict[str, int],
    is_gate_up: bool,
) -> None:
    form, (rows, k) = stack.form, x.shape
    a8 = form.word == torch.uint8
    decode = bool(config.pop("PTX", 0)) if a8 else ptx(config, form, x.dtype)
    x_scale = x_less = weights  # not read
    if a8:
        x, x_scale, x_less = quantise_for_int4(
            x, form.span // form.scales, form.spans * form.scales
        )
    direct = tiles[0] is ids
    step = config.get("STEP", 1)
    config = {**config, "PTX": decode, "STEP": step if form.spans % step == 0 else 1}
    coded_experts_kernel[(tiles.most * cdiv(stack.rows, config["BLOCK_N"]),)](
        x, x_scale, x_less, stack.words, stack.scale, stack.zero, stack.row_scale, weights, out,
        *tiles[:3], ids, ids.numel(), rows, stack.rows, k, x.stride(0), form.lead, form.spans,
        stack.scale_rows, **form.launch(), A8=a8, TOP_K=ids.shape[1], GATED=is_gate_up,
        DIRECT=direct, **config,
    )  # fmt: skip


def _restore(packed: Packed) -> Tensor:
    """[experts, 2 · intermediate, hidden]: gate rows, then up rows."""
    inner: Packed | None = packed.tensors["dense"]
    if inner is not None:
        return inner.dequantise()
    stack: CodedStack = packed.tensors["layer"].gate_up
    turns = [wide_values(stack.one(e)) for e in range(packed.shape[0])]
    return torch.stack([torch.cat((t[::2], t[1::2])) for t in turns])


class ExpertsW4AFp8(ExpertsWeightOnly):
    """Tokens quantised to FP8 by group before each matmul; int4 codes are FP8 as they are."""

    tag = "triton.experts_w4afp8"
    fp8_tokens = True
    reads = frozenset({"w4afp8"})


# The names that the plan shows.
experts_weight_only = ExpertsWeightOnly
experts_w4afp8 = ExpertsW4AFp8
