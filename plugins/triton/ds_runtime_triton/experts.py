"""Routed experts: sort, gate and up with SiLU, down, sum. No step waits for the host."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ds_runtime.api import (
    DENSE_EXPERTS,
    FP8_EXPERTS,
    ExpertSource,
    Facts,
    Packed,
    Weight,
    fp8_blocks,
    torch_dtype,
)
from ds_runtime_triton.blocks import BLOCK, column_group, row_group
from ds_runtime_triton.config import Config, Sizes, chosen, part_of
from ds_runtime_triton.jit.down import down_direct_kernel, down_kernel, down_vector_kernel
from ds_runtime_triton.jit.experts import gate_up_kernel, gate_up_vector_kernel, sort_pairs_kernel
from ds_runtime_triton.jit.narrow import narrow_experts_kernel
from ds_runtime_triton.launch import COUNTERS, cdiv, counters, pow2
from ds_runtime_triton.pairs import Tiles, sort_chunk, sort_rows, sum_of_pairs, tiles_of
from ds_runtime_triton.quant import block_of, quantise_by_group
from ds_runtime_triton.stack import Stack, dense_stack, fill, scaled_stack


@dataclass
class Layer:
    """The experts of one layer, and how to launch over them."""

    gate_up: Stack  # [experts, 2, intermediate, hidden]
    down: Stack  # [experts, hidden, intermediate]
    sizes: Sizes
    arrived: Tensor  # counters of pieces, see jit/gemm.py
    ue8m0: bool = False
    absent: bool = False  # other ranks have experts, too
    scaled: bool = field(init=False)  # codes and scales, not numbers

    def __post_init__(self) -> None:
        self.scaled = bool(self.gate_up.group_k)


def down_split(low: Config, n: int, tokens: int) -> int:
    """Pieces of the inner dimension in a product of few tokens."""
    tiles = cdiv(n, low["BLOCK_N"])
    return low.get("SPLIT", 1) if tiles * tokens <= COUNTERS else 1


def some_absent(facts: Facts) -> bool:
    """Whether other ranks have experts, too."""
    return facts.ranks.get("ep", 1) > 1


def pairs_of(facts: Facts, tokens: int) -> int:
    """Of a call: every token takes the slots after the routed experts, too."""
    routed = facts.dims["experts"] // facts.ranks.get("ep", 1)
    return tokens * (facts.dims["top_k"] + facts.shape[0] - routed)


def variant(facts: Facts, op: str, tokens: int) -> Hashable:
    """What a call is compiled for, over weights of facts.shape in whole blocks or in others."""
    if not tokens:
        return None
    (experts, inter, hidden), pairs = facts.shape, pairs_of(facts, tokens)
    found = list[Hashable]()
    for key in (f"E={experts},N={inter},K={hidden}", "*"):
        sizes = chosen(facts, op, key)
        config = sizes.at(pairs)
        low = part_of_config(config, "DN_")
        direct = config.get("DIRECT") and not config.get("VECTOR")
        split = down_split(low, hidden, tokens) if direct else 0
        found.append((sizes.number(pairs), split))
    return *found, sort_chunk(pairs), sort_rows(tokens), block_of(tokens), block_of(pairs)


def dense_variant(facts: Facts, rows: int) -> Hashable:
    """`Compiles.variant` of ExpertsDense."""
    return variant(facts, "experts_dense", rows)


def fp8_variant(facts: Facts, rows: int) -> Hashable:
    """Of ExpertsFp8, which may have to keep weights dense."""
    return variant(facts, "experts_fp8", rows), dense_variant(facts, rows)


def int8_variant(facts: Facts, rows: int) -> Hashable:
    """Of ExpertsInt8."""
    return variant(facts, "experts_int8", rows), dense_variant(facts, rows)


class _Experts:
    """What the kernels share: packing in order, and the launches. keeps: formats that stay as they
    are."""

    tag = ""
    keeps: frozenset[str] = frozenset()
    packing = ""  # of what is dense, or in whole blocks

    def __init__(self, facts: Facts) -> None:
        self.dtype = torch_dtype(facts.dtype)
        self.facts = facts

    def pack(self, source: ExpertSource, facts: Facts) -> Packed:
        count, hidden, inter = source.num_experts, source.hidden, source.intermediate
        if self.keeps and source.format not in self.keeps:
            read = " and ".join(sorted(self.keeps))
            raise TypeError(f"{self.tag} reads {read}, not {source.format}")
        layer: Layer | None = None
        for e in range(count):
            weights = source.expert(e)
            if layer is None:
                layer = self._empty(count, hidden, inter, weights)
            gate, up, down = weights
            fill(layer.gate_up, (e, 0), gate)
            fill(layer.gate_up, (e, 1), up)
            fill(layer.down, (e,), down)
        assert layer is not None, "a layer without experts"
        if layer.scaled:
            scales = layer.gate_up.scale, layer.down.scale
            layer.ue8m0 = all(fp8_blocks.powers_of_two(scale) for scale in scales)
        layer.absent = some_absent(facts)
        nbytes = layer.gate_up.nbytes + layer.down.nbytes
        shared = _shared(layer, self.packing)
        tensors = {"layer": layer, **shared}
        tag = self.packing if shared else self.tag
        return Packed(tag, (count, hidden, inter), tensors, nbytes, _restore)

    def _empty(
        self, count: int, hidden: int, inter: int, weights: tuple[Weight, Weight, Weight]
    ) -> Layer:
        wide, low = (count, 2, inter, hidden), (count, hidden, inter)
        key = f"E={count},N={inter},K={hidden}"
        gate, up, down = weights
        values = gate.parts[0].tensors["weight"]
        device = values.device
        same = column_group(gate) == column_group(up) and row_group_or_0(gate) == row_group_or_0(up)
        if self.keeps and same and column_group(gate) and column_group(down):
            stacks = scaled_stack(wide, gate), scaled_stack(low, down)
            blocks = {size for stack in stacks for size in (stack.group_n, stack.group_k)}
            # entries of a shape are tuned for, and some kernels take, the usual blocks only
            name = key if blocks == {BLOCK} else "*"
            sizes = chosen(self.facts, self.tag.removeprefix("triton."), name)
            return Layer(*stacks, sizes, counters(values))
        return Layer(
            dense_stack(wide, self.dtype, device),
            dense_stack(low, self.dtype, device),
            chosen(self.facts, "experts_dense", key),
            counters(values),
        )

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag, self.packing)
        if x.shape[0] == 0 or ids.shape[1] == 0:
            return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        layer: Layer = packed.tensors["layer"]
        config = layer.sizes.at(ids.numel())
        x = x if x.stride(1) == 1 else x.contiguous()
        ways = (("VECTOR", _vector), ("FUSED", _fused), ("DIRECT", _direct))
        run = next((way for name, way in ways if config.get(name)), _sorted)
        return run(x, weights.contiguous(), ids.contiguous(), layer, config)


def _shared(layer: Layer, packing: str) -> dict[str, Any]:
    """What a packing holds; nothing where the weights are not of its kind."""
    upper, lower = layer.gate_up, layer.down
    if packing == DENSE_EXPERTS and not layer.scaled:
        return {"gate_up": upper.values.flatten(1, 2), "down": lower.values}
    if packing != FP8_EXPERTS or not layer.scaled:
        return {}
    sizes = (*upper.values.shape[2:], *lower.values.shape[1:])
    blocks = {upper.group_n, upper.group_k, lower.group_n, lower.group_k}
    if blocks != {BLOCK} or any(n % BLOCK for n in sizes):
        return {}
    return {
        "gate_up": upper.values.flatten(1, 2),
        "gate_up_scale": upper.scale.flatten(1, 2),
        "down": lower.values,
        "down_scale": lower.scale,
        "ue8m0": layer.ue8m0,
    }


def row_group_or_0(weight: Weight) -> int:
    """row_group for weights in blocks, else 0."""
    return row_group(weight) if column_group(weight) else 0


def part_of_config(config: Config, prefix: str) -> dict[str, int]:
    """The entries for one of the two matmuls: named with the prefix, or for both."""
    own = part_of(config, prefix, ("UP_", "DN_"))
    own.pop("DIRECT", None)
    return own


def _tile_k(stack: Stack, config: dict[str, int]) -> dict[str, int]:
    """Codes are multiplied one group of columns at a time."""
    return {**config, "BLOCK_K": stack.group_k} if stack.group_k else config


def _hidden(layer: Layer, pairs: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Room for the activations between the matmuls, and their scales."""
    inter = layer.gate_up.values.shape[2]
    dtype = layer.down.values.dtype if layer.scaled else like.dtype
    groups = cdiv(inter, layer.down.group_k) if layer.scaled else 1
    scale = torch.empty(
        groups, pairs if layer.scaled else 1, dtype=torch.float32, device=like.device
    )
    return torch.empty(pairs, inter, dtype=dtype, device=like.device), scale


def _gate_up(
    x: Tensor,
    scale: Tensor,
    h: tuple[Tensor, Tensor],
    layer: Layer,
    tiles: Tiles,
    ids: Tensor,
    config: dict[str, int],
    direct: bool,
) -> None:
    """The rows of `h` that are pairs of these tiles. direct: every pair is a tile of its own."""
    stack, pairs, (tokens, top_k) = layer.gate_up, ids.numel(), ids.shape
    n, k = stack.values.shape[2:]
    config = _tile_k(stack, config)
    gate_up_kernel[(tiles.most * cdiv(n, config["BLOCK_N"]),)](
        x, scale, stack.values, stack.scale, *h, *tiles[:3], ids, pairs, tokens, n, k,
        x.stride(0), cdiv(n, stack.group_n), stack.step, GROUP_N=stack.group_n, SCALED=layer.scaled,
        UE8M0=layer.ue8m0, OUT_GROUP=layer.down.group_k or 1, TOP_K=top_k, DIRECT=direct,
        EVEN=k % config["BLOCK_K"] == 0, ABSENT=layer.absent and direct, **config,
    )  # fmt: skip


def _quantised(x: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
    stack = layer.gate_up
    return quantise_by_group(x, stack.group_k, layer.ue8m0, stack.values.dtype)


def _direct(x: Tensor, weights: Tensor, ids: Tensor, layer: Layer, config: Config) -> Tensor:
    """A few tokens: every pair is a tile of its own, sums stay in registers."""
    tokens, pairs = x.shape[0], ids.numel()
    x_scale = weights  # not read
    given = x
    if layer.scaled:
        x, x_scale = _quantised(x, layer)
    h, h_scale = _hidden(layer, pairs, given)
    each = Tiles(ids, ids, ids, pairs)
    _gate_up(x, x_scale, (h, h_scale), layer, each, ids, part_of_config(config, "UP_"), True)
    stack = layer.down
    n, k = stack.values.shape[1:]
    out = torch.empty(tokens, n, dtype=given.dtype, device=given.device)
    low = _tile_k(stack, part_of_config(config, "DN_"))
    low.pop("GROUP")
    tiles = cdiv(n, low["BLOCK_N"])
    low["SPLIT"] = split = down_split(low, n, tokens)
    pieces = torch.empty(
        tokens * tiles * split * low["BLOCK_N"], dtype=torch.float32, device=out.device
    )
    down_direct_kernel[(tiles, split, tokens)](
        h, h_scale, stack.values, stack.scale, weights, ids, out, pieces, layer.arrived,
        pairs, n, k, cdiv(n, stack.group_n), stack.step, GROUP_N=stack.group_n,
        SCALED=layer.scaled, ABSENT=layer.absent,
        TOP_K=ids.shape[1], EVEN=k % low["BLOCK_K"] == 0, **low,
    )  # fmt: skip
    return out


def _vector(x: Tensor, weights: Tensor, ids: Tensor, layer: Layer, config: Config) -> Tensor:
    """As _direct, of tiles so small that the cores finish together."""
    tokens, pairs, top_k = x.shape[0], ids.numel(), ids.shape[1]
    upper, lower = layer.gate_up, layer.down
    n, k = upper.values.shape[2:]
    assert not layer.scaled or upper.step == lower.step == 1, "a scale per group of columns"
    own = {"SCALED": layer.scaled, "UE8M0": layer.ue8m0, "TOP_K": top_k, "ABSENT": layer.absent}
    up = _whole(upper, part_of_config(config, "UP_"), k)
    h = torch.empty(pairs, n, dtype=torch.float32, device=x.device)
    gate_up_vector_kernel[(cdiv(n, up["BLOCK_N"]), pairs)](
        x, upper.values, upper.scale, h, ids, n, k, x.stride(0), cdiv(n, upper.group_n),
        GROUP_N=upper.group_n, **own, **up,
    )  # fmt: skip
    low = _whole(lower, part_of_config(config, "DN_"), n)
    out = torch.empty(tokens, k, dtype=x.dtype, device=x.device)
    down_vector_kernel[(cdiv(k, low["BLOCK_N"]), tokens)](
        h, lower.values, lower.scale, weights, ids, out, k, n, cdiv(k, lower.group_n),
        GROUP_N=lower.group_n, **own, **low,
    )  # fmt: skip
    return out


def _whole(stack: Stack, config: dict[str, int], k: int) -> dict[str, int]:
    """_tile_k for kernels that take several groups of columns at once."""
    config = _tile_k(stack, {n: v for n, v in config.items() if n != "VECTOR"})
    return {**config, "EVEN": k % (config["BLOCK_K"] * config["GROUPS"]) == 0}


def _sorted(x: Tensor, weights: Tensor, ids: Tensor, layer: Layer, config: Config) -> Tensor:
    """Tiles of one expert each. Their number is known to the device only; the grid is a bound."""
    pairs = ids.numel()
    tiles, q, x_scale = _arranged(x, weights, ids, layer, config["BLOCK_M"])
    h = _hidden(layer, pairs, x)
    y = torch.empty(pairs, x.shape[1], dtype=x.dtype, device=x.device)
    _gate_up(q, x_scale, h, layer, tiles, ids, part_of_config(config, "UP_"), False)
    stack = layer.down
    n, k = stack.values.shape[1:]
    low = _tile_k(stack, part_of_config(config, "DN_"))
    down_kernel[(tiles.most * cdiv(n, low["BLOCK_N"]),)](
        *h, stack.values, stack.scale, weights, y, *tiles[:3], ids, pairs, n, k,
        cdiv(n, stack.group_n), stack.step, GROUP_N=stack.group_n, SCALED=layer.scaled,
        TOP_K=ids.shape[1], EVEN=k % low["BLOCK_K"] == 0, **low,
    )  # fmt: skip
    return sum_of_pairs(y, ids, layer.absent)


def _fused(x: Tensor, weights: Tensor, ids: Tensor, layer: Layer, config: Config) -> Tensor:
    """As _sorted, both matmuls of a tile in one program, see jit/narrow.py."""
    upper, lower = layer.gate_up, layer.down
    n, k = upper.values.shape[2:]
    blocks = {upper.group_n, upper.group_k, lower.group_n, lower.group_k}
    assert n == 2 * BLOCK and k % BLOCK == 0 and blocks == {BLOCK}, "two whole blocks wide"
    own = {name: value for name, value in config.items() if name != "FUSED"}
    tiles, q, x_scale = _arranged(x, weights, ids, layer, own["BLOCK_M"])
    y = torch.empty(ids.numel(), x.shape[1], dtype=x.dtype, device=x.device)
    narrow_experts_kernel[(tiles.most,)](
        q, x_scale, upper.values, upper.scale, lower.values, lower.scale, weights, y, *tiles[:3],
        ids, ids.numel(), x.shape[0], x.shape[1], q.stride(0), UE8M0=layer.ue8m0,
        TOP_K=ids.shape[1], BLOCK=BLOCK, **own,
    )  # fmt: skip
    return sum_of_pairs(y, ids, layer.absent)


def _arranged(
    x: Tensor, weights: Tensor, ids: Tensor, layer: Layer, block: int
) -> tuple[Tiles, Tensor, Tensor]:
    """Tiles of up to `block` pairs, and where the experts are scaled the codes and scales of x."""
    tokens, pairs, experts = x.shape[0], ids.numel(), layer.down.values.shape[0]
    tiles = tiles_of(pairs, experts, block, x.device)
    q, x_scale, tasks, group = x, weights, 0, layer.gate_up.group_k
    rows, warps = sort_rows(tokens)
    if layer.scaled:
        groups = cdiv(x.shape[1], group)
        q = torch.empty(x.shape, dtype=layer.gate_up.values.dtype, device=x.device)
        x_scale = torch.empty(groups, tokens, dtype=torch.float32, device=x.device)
        tasks = cdiv(tokens, rows) * groups
    sort_pairs_kernel[(cdiv(experts, 2) + tasks,)](
        ids, *tiles[:3], pairs, experts, x, q, x_scale, tokens, x.shape[1], x.stride(0),
        EXPERTS=pow2(experts, 2), BLOCK_M=block, CHUNK=sort_chunk(pairs),
        GROUP_K=group, UE8M0=layer.ue8m0, ROWS=rows, num_warps=warps,
    )  # fmt: skip
    return tiles, q, x_scale


def _restore(packed: Packed) -> Tensor:
    """[experts, 2 · intermediate, hidden]: gate rows, then up rows."""
    layer: Layer = packed.tensors["layer"]
    count, hidden, inter = packed.shape
    return layer.gate_up.wide().view(count, 2 * inter, hidden)


class ExpertsDense(_Experts):
    """Weights in the compute dtype."""

    tag = "triton.experts_dense"
    packing = DENSE_EXPERTS


class ExpertsFp8(_Experts):
    """FP8 weights as they are, activations quantised per token and group before each matmul."""

    tag = "triton.experts_fp8"
    keeps = frozenset({"fp8_block"})
    packing = FP8_EXPERTS


class ExpertsInt8(_Experts):
    """As ExpertsFp8, in int8: products are exact, scales by row or by block."""

    tag = "triton.experts_int8"
    keeps = frozenset({"int8_channel", "int8_block"})


# The names that the plan shows.
experts_dense = ExpertsDense
experts_fp8 = ExpertsFp8
experts_int8 = ExpertsInt8
