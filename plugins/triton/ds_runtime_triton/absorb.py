"""MlaAbsorb: kv_b held once, dense or in FP8, for prefill's expansion and decode's two products."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_runtime.api import FP8_ROWS, Facts, Packed, Weight, torch_dtype
from ds_runtime_triton.blocks import BLOCK, FP8, Blocks, read_blocks, wide_values
from ds_runtime_triton.config import Sizes, chosen, part_of
from ds_runtime_triton.jit.absorb import absorb_kernel, widen_kernel
from ds_runtime_triton.launch import cdiv, pow2
from ds_runtime_triton.linear import LinearDense

_FP8 = "float8_e4m3fn"


def variant(facts: Facts, rows: int) -> Hashable:
    """`Compiles.variant`."""
    return _sizes(facts).number(rows)


def _sizes(facts: Facts) -> Sizes:
    return chosen(facts, "absorb", f"H={facts.dims['heads']}")


class MlaAbsorb:
    """Decode multiplies FP8 weights as they are by activations in the compute dtype."""

    tag = "triton.mla_absorb"

    def __init__(self, facts: Facts) -> None:
        dims = facts.dims
        self.dtype = torch_dtype(facts.dtype)
        self.heads, self.nope, self.v = dims["heads"], dims["qk_nope"], dims["v"]
        self.latent = dims["kv_lora"]
        self.keeps_fp8 = _FP8 in facts.device.fast_dtypes and facts.dtype != "float32"
        self.sizes = _sizes(facts)
        self.whole = LinearDense(facts) if facts.own_bits else None

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        blocks = read_blocks(weight) if self.keeps_fp8 else None
        if blocks is None:
            values = weight.dequantise(self.dtype).contiguous()
            none = torch.empty(1, dtype=torch.float32, device=values.device)
            blocks = Blocks(values, none, 1, 0, False)
        nbytes = blocks.values.nbytes + (blocks.scale.nbytes if blocks.group_k else 0)
        tag, tensors = self.tag, dict[str, Any](blocks=blocks)
        if blocks.group_n == blocks.group_k == BLOCK and blocks.values.dtype == FP8:
            tag, tensors = FP8_ROWS, {**tensors, "weight": blocks.values, "scale": blocks.scale}
        return Packed(tag, weight.shape, tensors, nbytes, restore=_restore)

    def expand(self, latent: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
        packed.expect(self.tag, FP8_ROWS)
        wide = self._wide(packed.tensors["blocks"])
        if self.whole is None:
            both = F.linear(latent, wide)
        else:  # what torch calls sums in another order for other numbers of rows
            both = self.whole.apply(latent, self.whole.packed(wide))
        both = both.view(latent.shape[0], self.heads, self.nope + self.v)
        return both[..., : self.nope], both[..., self.nope :]

    def apply_q(self, q_nope: Tensor, q_rope: Tensor, packed: Packed) -> Tensor:
        return self._multiply(q_nope, packed, self.latent, self.nope, 0, q_rope)

    def apply_v(self, x: Tensor, packed: Packed) -> Tensor:
        return self._multiply(x, packed, self.v, self.latent, self.nope)

    def _wide(self, blocks: Blocks) -> Tensor:
        """The weight in the compute dtype; an FP8 one is widened anew, for one product of many
        tokens."""
        if not blocks.group_k:
            return blocks.values
        rows, cols = blocks.values.shape
        out = torch.empty(rows, cols, dtype=self.dtype, device=blocks.values.device)
        widen_kernel[(cdiv(rows, 32), cdiv(cols, 128))](
            blocks.values, blocks.scale, out, rows, cols, blocks.scale.shape[1],
            blocks.group_n, blocks.group_k, 32, 128, num_warps=4,
        )  # fmt: skip
        return out

    def _multiply(
        self, x: Tensor, packed: Packed, n: int, k: int, first: int, behind: Tensor | None = None
    ) -> Tensor:
        """x [T, heads, k] by rows of each head's part, or, with `behind` [T, heads, rest] to copy,
        by its columns: [T, heads, n + rest]."""
        packed.expect(self.tag, FP8_ROWS)
        tokens, down = x.shape[0], behind is None
        rest = 0 if behind is None else behind.shape[2]
        out = torch.empty(tokens, self.heads, n + rest, dtype=x.dtype, device=x.device)
        if tokens == 0:
            return out
        if x.stride(2) != 1:
            x = x.contiguous()
        if behind is None:
            behind = x  # not read
        elif behind.stride(2) != 1:
            behind = behind.contiguous()
        blocks: Blocks = packed.tensors["blocks"]
        config, per_head = self.sizes.at(tokens), self.nope + self.v
        config = part_of(config, "V_" if down else "Q_", ("Q_", "V_"))
        tile = (config["BLOCK_N"], config["BLOCK_K"])
        rows, cols = tile if down else tile[::-1]
        group = blocks.group_n
        one_block = (
            blocks.group_k > 0
            and per_head % group == 0 == first % group
            and group % rows == 0 == blocks.group_k % cols
        )
        tiles = config.pop("TILES", 0)
        if config["BLOCK_K"] < k:
            tiles = 0
        steps = cdiv(tokens, config["BLOCK_M"] * max(1, tiles))
        absorb_kernel[(self.heads, cdiv(n, config["BLOCK_N"]), steps)](
            x, blocks.values, blocks.scale, behind, out, tokens, n, k, first, per_head, self.latent,
            rest, *x.stride()[:2], *behind.stride()[:2], *out.stride()[:2],
            cdiv(self.latent, blocks.group_k or 1), GROUP_N=group, GROUP_K=blocks.group_k,
            UNIFORM=one_block, DOWN=down, REST=pow2(rest), TILES=tiles,
            EVEN=n % config["BLOCK_N"] == 0 == k % config["BLOCK_K"], **config,
        )  # fmt: skip
        return out


def _restore(packed: Packed) -> Tensor:
    b: Blocks = packed.tensors["blocks"]
    if b.group_k:
        return wide_values(b.values, b.scale, b.group_n, b.group_k)
    return b.values.to(torch.float32)


# The name that the plan shows.
mla_absorb = MlaAbsorb
