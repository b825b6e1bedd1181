"""Linear: dense weights; FP8 and int8 weights with activations quantised per token and group."""

from __future__ import annotations

from collections.abc import Hashable

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime.api import (
    DENSE_ROWS,
    FP8_ROWS,
    Facts,
    Groups,
    Packed,
    Weight,
    float32_product,
    sums_in_float32,
    torch_dtype,
)
from ds_runtime_triton.blocks import BLOCK, FP8, Blocks, read_blocks, wide_values
from ds_runtime_triton.config import Config, Sizes, chosen
from ds_runtime_triton.jit.gemm import (
    dense_gemm_kernel,
    fp8_gemm_kernel,
    fp8_vector_kernel,
    fp8_wide_kernel,
)
from ds_runtime_triton.launch import COUNTERS, cdiv, counters
from ds_runtime_triton.quant import block_of, quantise_by_group

_MOST_SPLIT, _PROGRAMS, _SHORTEST = 8, 288, 512  # of pieces: how many, in all, and columns
_HELD = 1 << 26  # bytes of pieces at a time
_NARROW = frozenset({"WIDE", "SPLIT", "SWAP", "QUANTISED"})  # not of the kernel for many tokens


def grid_of(config: Config, m: int, n: int) -> tuple[tuple[int, int], int]:
    """(programs, pieces of the inner dimension): one piece where there are too many tiles."""
    tiles = cdiv(m, config["BLOCK_M"]) * cdiv(n, config["BLOCK_N"])
    split = config["SPLIT"] if tiles <= COUNTERS else 1
    return (tiles, split), split


def variant(facts: Facts, op: str, rows: int) -> Hashable:
    """What a product with a weight of facts.shape is compiled for."""
    n, k = facts.shape
    sizes = sizes_of(facts, op, n, k)
    if not rows or sizes.at(rows).get("TORCH"):
        return None
    # SPLIT is read by the kernel for one token, too, of which there is one kind
    split = 0 if sizes.at(rows).get("VECTOR") else grid_of(sizes.at(rows), rows, n)[1]
    return sizes.number(rows), split, block_of(rows)


def sizes_of(facts: Facts, op: str, n: int, k: int) -> Sizes:
    """Of a product with a weight [n, k]."""
    sizes = chosen(facts, op, f"N={n},K={k}")
    if not facts.own_bits:
        return sizes
    split = _split_of(n, k, sizes.configs[0]["BLOCK_N"])
    return Sizes(sizes.bounds, tuple({**config, "SPLIT": split} for config in sizes.configs))


def _split_of(n: int, k: int, block: int) -> int:
    """Pieces of the inner dimension that a shape has whatever the tokens: so that few of these
    occupy a device, and none is short."""
    split, tiles = 1, cdiv(n, block)
    while split < _MOST_SPLIT and tiles * split * 2 <= _PROGRAMS and k >= _SHORTEST * split * 2:
        split *= 2
    return split


def slices(facts: Facts, m: int, n: int, config: Config) -> list[slice]:
    """Rows of each launch: all, unless pieces are fixed, and there are not as many counters as
    tiles, or no room for the pieces."""
    if not (m and facts.own_bits and config["SPLIT"] > 1):
        return [slice(0, m)] if m else []
    piece = 4 * config["BLOCK_M"] * config["BLOCK_N"] * config["SPLIT"]
    tiles = min(COUNTERS, _HELD // piece)
    most = max(1, tiles // cdiv(n, config["BLOCK_N"])) * config["BLOCK_M"]
    return [slice(first, first + most) for first in range(0, m, most)]


def dense_variant(facts: Facts, rows: int) -> Hashable:
    """`Compiles.variant` of LinearDense."""
    return variant(facts, "linear_dense", rows)


def fp8_variant(facts: Facts, rows: int) -> Hashable:
    """Of LinearFp8, which may have to keep a weight dense."""
    return variant(facts, "linear_fp8", rows), dense_variant(facts, rows)


def int8_variant(facts: Facts, rows: int) -> Hashable:
    """Of LinearInt8."""
    return variant(facts, "linear_int8", rows), dense_variant(facts, rows)


def pieces(config: Config, tiles: int, split: int, like: Tensor) -> Tensor:
    size = tiles * split * config["BLOCK_M"] * config["BLOCK_N"] if split > 1 else 1
    return torch.empty(size, dtype=torch.float32, device=like.device)


class LinearDense:
    """Weights in the compute dtype. Few tokens: split over the inner dimension."""

    tag = packing = DENSE_ROWS

    def __init__(self, facts: Facts) -> None:
        self.dtype = torch_dtype(facts.dtype)
        self.facts = facts

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        return self.packed(weight.dequantise(self.dtype).contiguous())

    def packed(self, values: Tensor) -> Packed:
        """[N, K] in the compute dtype, taken over as it is."""
        n, k = values.shape
        tensors = {
            "weight": values,
            "arrived": counters(values),
            "tuned": sizes_of(self.facts, "linear_dense", n, k),
        }
        return Packed(self.tag, (n, k), tensors, values.nbytes, restore=_restore_dense)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        config: Config = packed.tensors["tuned"].at(x.shape[0])
        if config.get("TORCH"):
            return F.linear(x, packed.tensors["weight"])
        y = torch.empty(x.shape[0], packed.shape[0], dtype=x.dtype, device=x.device)
        return self._multiply(x, packed, config, y)

    def gives_float32(self, rows: int, packed: Packed) -> bool:
        """See Float32Linear."""
        if packed.tag != self.tag:
            return False
        weight: Tensor = packed.tensors["weight"]
        by_torch = packed.tensors["tuned"].at(rows).get("TORCH")
        return not by_torch or sums_in_float32(weight.dtype, weight.device)

    def apply_float32(self, x: Tensor, packed: Packed, out: Tensor | None = None) -> Tensor:
        """See Float32Linear."""
        packed.expect(self.tag)
        weight: Tensor = packed.tensors["weight"]
        config: Config = packed.tensors["tuned"].at(x.shape[0])
        if out is None:
            out = torch.empty(x.shape[0], packed.shape[0], dtype=torch.float32, device=x.device)
        if config.get("TORCH"):
            return float32_product(x, weight, out)
        return self._multiply(x, packed, config, out)

    def _multiply(self, x: Tensor, packed: Packed, config: Config, y: Tensor) -> Tensor:
        m, (n, k) = x.shape[0], packed.shape
        w: Tensor = packed.tensors["weight"]
        for rows in slices(self.facts, m, n, config):
            some, into = x[rows], y[rows]
            grid, split = grid_of(config, len(some), n)
            even = k % (config["BLOCK_K"] * split) == 0
            dense_gemm_kernel[grid](
                some, w, into, pieces(config, grid[0], split, x), packed.tensors["arrived"],
                len(some), n, k, x.stride(0), EVEN=even, **{**config, "SPLIT": split},
            )  # fmt: skip
        return y


def _restore_dense(packed: Packed) -> Tensor:
    values: Tensor = packed.tensors["weight"]
    return values.to(torch.float32)


class LinearFp8:
    """FP8 weights as they are. Few tokens are quantised where they are read, many beforehand.

    A shard that cuts a block of columns too finely is kept in the compute dtype.
    """

    tag = "triton.linear_fp8"
    reads = frozenset({"fp8_block"})
    packing = FP8_ROWS  # of whole blocks

    def __init__(self, facts: Facts) -> None:
        self.dense = LinearDense(facts)
        self.facts = facts

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        weight.expect(sorted(self.reads), self.tag)
        blocks = read_blocks(weight)
        if blocks is None:
            inner = self.dense.pack(weight, facts)
            return Packed(self.tag, weight.shape, {"dense": inner}, inner.nbytes, _restore_fp8)
        n, k = weight.shape
        tensors = {
            "dense": None,
            "blocks": blocks,
            "arrived": counters(blocks.values),
            "tuned": sizes_of(self.facts, self.tag.removeprefix("triton."), n, k),
        }
        nbytes = blocks.values.nbytes + blocks.scale.nbytes
        tag = self.tag
        if blocks.group_n == blocks.group_k == BLOCK and self.packing:
            tag = self.packing
            tensors |= {"weight": blocks.values, "scale": blocks.scale}
        return Packed(tag, (n, k), tensors, nbytes, restore=_restore_fp8)

    def apply(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag, self.packing)
        if packed.tensors["dense"] is not None:
            return self.dense.apply(x, packed.tensors["dense"])
        m, n = x.shape[0], packed.shape[0]
        y = torch.empty(m, n, dtype=x.dtype, device=x.device)
        config: Config = packed.tensors["tuned"].at(m)
        for rows in slices(self.facts, m, n, config):
            _fp8_gemm(x[rows], None, packed.tensors["blocks"], y[rows], packed, config)
        return y

    def quantizes(self, rows: int, packed: Packed) -> Groups | None:
        """By the inputs of a block, where that is done beforehand: see QuantizedLinear."""
        blocks: Blocks | None = packed.tensors.get("blocks")
        if not rows or blocks is None or packed.shape[1] % blocks.group_k:
            return None
        if blocks.values.dtype != FP8:
            return None
        config: Config = packed.tensors["tuned"].at(rows)
        beforehand = not config.get("VECTOR") and config["QUANTISED"]
        return Groups(blocks.group_k, blocks.ue8m0) if beforehand else None

    def apply_quantized(self, q: Tensor, scale: Tensor, packed: Packed) -> Tensor:
        """See QuantizedLinear."""
        packed.expect(self.tag, self.packing)
        assert packed.tensors["dense"] is None, "quantised for a weight that is not"
        m, n = q.shape[0], packed.shape[0]
        y = torch.empty(m, n, dtype=self.dense.dtype, device=q.device)
        config: Config = packed.tensors["tuned"].at(max(m, 2))
        columns = scale.T if scale.stride(0) == 1 else scale.T.contiguous()
        for rows in slices(self.facts, m, n, config):
            _fp8_gemm(q[rows], columns[:, rows], packed.tensors["blocks"], y[rows], packed, config)
        return y


def _fp8_gemm(
    x: Tensor, scale: Tensor | None, blocks: Blocks, y: Tensor, packed: Packed, config: Config
) -> None:
    """scale: [groups, tokens] of x, if it is quantised already."""
    (m, n), k = y.shape, x.shape[1]
    if config.get("VECTOR"):
        assert scale is None, "the kernel for one token takes it as it is"
        _fp8_vector(x, blocks, y, packed, config)
        return
    grid, split = grid_of(config, m, n)
    if scale is not None:
        config = {**config, "QUANTISED": 1}
    elif config["QUANTISED"]:
        x, scale = quantise_by_group(x, blocks.group_k, blocks.ue8m0, blocks.values.dtype)
    else:
        scale = blocks.scale
    if config.get("WIDE"):
        fp8_wide_kernel[grid](
            x, scale, blocks.values, blocks.scale, y, m, n, k, x.stride(0),
            blocks.step, scale.stride(0), GROUP_N=blocks.group_n, BLOCK_K=blocks.group_k,
            EVEN=k % blocks.group_k == 0,
            **{name: v for name, v in config.items() if name not in _NARROW},
        )  # fmt: skip
        return
    fp8_gemm_kernel[grid](
        x, scale, blocks.values, blocks.scale, y, pieces(config, grid[0], split, y),
        packed.tensors["arrived"], m, n, k, x.stride(0), blocks.step, scale.stride(0),
        GROUP_N=blocks.group_n, UE8M0=blocks.ue8m0, BLOCK_K=blocks.group_k,
        EVEN=k % blocks.group_k == 0,
        **{**{name: v for name, v in config.items() if name != "WIDE"}, "SPLIT": split},
    )  # fmt: skip


def _fp8_vector(x: Tensor, blocks: Blocks, y: Tensor, packed: Packed, config: Config) -> None:
    (m, n), k = y.shape, x.shape[1]
    assert m == 1, f"a kernel for one token was chosen for {m}"
    own = {name: v for name, v in config.items() if name != "VECTOR"}
    tiles, split = cdiv(n, own["BLOCK_N"]), own["SPLIT"]
    if tiles > COUNTERS:
        own["SPLIT"] = split = 1
    pieces = torch.empty(tiles * split * own["BLOCK_N"], dtype=torch.float32, device=y.device)
    fp8_vector_kernel[(tiles, split)](
        x, blocks.values, blocks.scale, y, pieces, packed.tensors["arrived"], n, k,
        GROUP_N=blocks.group_n, UE8M0=blocks.ue8m0, BLOCK_K=blocks.group_k,
        EVEN=k % (blocks.group_k * own["GROUPS"]) == 0, **own,
    )  # fmt: skip


def _restore_fp8(packed: Packed) -> Tensor:
    inner: Packed | None = packed.tensors["dense"]
    if inner is not None:
        return inner.dequantise()
    b: Blocks = packed.tensors["blocks"]
    return wide_values(b.values, b.scale, b.group_n, b.group_k)


class LinearInt8(LinearFp8):
    """As LinearFp8, in int8: products are exact, scales by row or by block."""

    tag = "triton.linear_int8"
    reads = frozenset({"int8_channel", "int8_block"})
    packing = ""


# The names that the plan shows.
linear_dense = LinearDense
linear_fp8 = LinearFp8
linear_int8 = LinearInt8
