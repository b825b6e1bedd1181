"""How the layers of routed experts in experts.py are launched, and what they hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ds_runtime_triton.blocks import BLOCK
from ds_runtime_triton.config import Config, Sizes, part_of
from ds_runtime_triton.jit.down import down_direct_kernel, down_kernel, down_vector_kernel
from ds_runtime_triton.jit.experts import gate_up_kernel, gate_up_vector_kernel, sort_pairs_kernel
from ds_runtime_triton.jit.narrow import narrow_experts_kernel
from ds_runtime_triton.launch import COUNTERS, cdiv, pow2
from ds_runtime_triton.pairs import Tiles, sort_chunk, sort_rows, sum_of_pairs, tiles_of
from ds_runtime_triton.quant import quantise_by_group
from ds_runtime_triton.stack import Stack


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


class Given(NamedTuple):
    """Rows as a kernel's launches take them. x [tokens, hidden] in the compute dtype, of which only
    the form is read where codes are there. codes: what QuantizedExperts has of them."""

    x: Tensor
    codes: tuple[Tensor, Tensor] | None = None

    def quantised(self, layer: Layer) -> tuple[Tensor, Tensor]:
        """(q [tokens, hidden], scale [groups, tokens])."""
        if self.codes is None:
            return quantised(self.x, layer)
        q, scale = self.codes
        return q, scale.T.contiguous()


def launch(given: Given, weights: Tensor, ids: Tensor, layer: Layer, config: Config) -> Tensor:
    ways = (("VECTOR", _vector), ("FUSED", _fused), ("DIRECT", _direct))
    run = next((way for name, way in ways if config.get(name)), _sorted)
    return run(given, weights, ids, layer, config)


def part_of_config(config: Config, prefix: str) -> dict[str, int]:
    """The entries for one of the two matmuls: named with the prefix, or for both."""
    own = part_of(config, prefix, ("UP_", "DN_"))
    own.pop("DIRECT", None)
    return own


def down_split(low: Config, n: int, tokens: int) -> int:
    """Pieces of the inner dimension in a product of few tokens."""
    tiles = cdiv(n, low["BLOCK_N"])
    return low.get("SPLIT", 1) if tiles * tokens <= COUNTERS else 1


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


def quantised(x: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
    stack = layer.gate_up
    return quantise_by_group(x, stack.group_k, layer.ue8m0, stack.values.dtype)


def _direct(given: Given, weights: Tensor, ids: Tensor, layer: Layer, config: Config) -> Tensor:
    """A few tokens: every pair is a tile of its own, sums stay in registers."""
    like, pairs = given.x, ids.numel()
    tokens = like.shape[0]
    x, x_scale = like, weights  # these scales are not read
    if layer.scaled:
        x, x_scale = given.quantised(layer)
    h, h_scale = _hidden(layer, pairs, like)
    each = Tiles(ids, ids, ids, pairs)
    _gate_up(x, x_scale, (h, h_scale), layer, each, ids, part_of_config(config, "UP_"), True)
    stack = layer.down
    n, k = stack.values.shape[1:]
    out = torch.empty(tokens, n, dtype=like.dtype, device=like.device)
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


def _vector(given: Given, weights: Tensor, ids: Tensor, layer: Layer, config: Config) -> Tensor:
    """As _direct, of tiles so small that the cores finish together."""
    assert given.codes is None, "programs make the codes that they read"
    x = given.x
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


def _sorted(given: Given, weights: Tensor, ids: Tensor, layer: Layer, config: Config) -> Tensor:
    """Tiles of one expert each. Their number is known to the device only; the grid is a bound."""
    x, pairs = given.x, ids.numel()
    tiles, q, x_scale = _arranged(given, weights, ids, layer, config["BLOCK_M"])
    h = _hidden(layer, pairs, x)
    y = torch.empty(pairs, x.shape[1], dtype=x.dtype, device=x.device)
    _gate_up(q, x_scale, h, layer, tiles, ids, part_of_config(config, "UP_"), False)
    stack = layer.down
    n, k = stack.values.shape[1:]
    low = _tile_k(stack, part_of_config(config, "DN_"))
    down_kernel[(tiles.most * cdiv(n, low["BLOCK_N"]),)](
        *h, stack.values, stack.scale, weights, y, *tiles[:3], ids, pairs, n, k,
        cdiv(n, stack.group_n), stack.step, GROUP_N=stack.group_n, SCALED=layer.scaled,
        EVEN=k % low["BLOCK_K"] == 0, **low,
    )  # fmt: skip
    return sum_of_pairs(y, ids, layer.absent)


def _fused(given: Given, weights: Tensor, ids: Tensor, layer: Layer, config: Config) -> Tensor:
    """As _sorted, both matmuls of a tile in one program, see jit/narrow.py."""
    upper, lower = layer.gate_up, layer.down
    n, k = upper.values.shape[2:]
    blocks = {upper.group_n, upper.group_k, lower.group_n, lower.group_k}
    assert n == 2 * BLOCK and k % BLOCK == 0 and blocks == {BLOCK}, "two whole blocks wide"
    own = {name: value for name, value in config.items() if name != "FUSED"}
    x = given.x
    tiles, q, x_scale = _arranged(given, weights, ids, layer, own["BLOCK_M"])
    y = torch.empty(ids.numel(), x.shape[1], dtype=x.dtype, device=x.device)
    narrow_experts_kernel[(tiles.most,)](
        q, x_scale, upper.values, upper.scale, lower.values, lower.scale, weights, y, *tiles[:3],
        ids, ids.numel(), x.shape[0], x.shape[1], q.stride(0), UE8M0=layer.ue8m0,
        TOP_K=ids.shape[1], BLOCK=BLOCK, **own,
    )  # fmt: skip
    return sum_of_pairs(y, ids, layer.absent)


def _arranged(
    given: Given, weights: Tensor, ids: Tensor, layer: Layer, block: int
) -> tuple[Tiles, Tensor, Tensor]:
    """Tiles of up to `block` pairs, and where the experts are scaled the codes and scales of x."""
    x, experts = given.x, layer.down.values.shape[0]
    tokens, pairs = x.shape[0], ids.numel()
    tiles = tiles_of(pairs, experts, block, x.device)
    q, x_scale, tasks, group = x, weights, 0, layer.gate_up.group_k
    rows, warps = sort_rows(tokens)
    if given.codes is not None:
        q, x_scale = given.quantised(layer)
    elif layer.scaled:
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
