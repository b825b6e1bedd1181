"""Random inputs of true sizes on a device: what ops are timed with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_runtime.ops.batch import Segments
from ds_runtime.ops.contract import load_attr
from ds_runtime.ops.contracts.work import Sizes
from ds_runtime.ops.dtypes import is_fp8, torch_dtype
from ds_runtime.ops.kernel import Layout
from ds_runtime.ops.reference.cases import Maker
from ds_runtime.ops.reference.layouts import EXPANDED_PAGES, expanded_width
from ds_runtime.ops.reference.matrices.rounding import quantise_part
from ds_runtime.ops.weight import Weight


class Copies(list[Any]):
    """Copies of one argument that take turns, so that none is found in a cache. A plain list among
    arguments takes turns as well, and its entries differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrueInputs(Sizes):
    """Where a call is timed. layout: that of the cache. copies: how many tensors of this many bytes
    are to take turns."""

    layout: Layout
    device: torch.device
    copies: Callable[[float], int] = lambda nbytes: 1

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return torch_dtype(self.facts.dtype)

    @property
    def cached(self) -> int:
        """Values of a cached token but for its rotated key."""
        dims = self.facts.dims
        expanded = self.layout.tag == EXPANDED_PAGES.tag
        return expanded_width(dims) - dims["qk_rope"] if expanded else dims["kv_lora"]

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Gaussian numbers on the device."""
        return torch.randn(shape, device=self.device).to(dtype or self.dtype)

    def float32(self, *shape: int) -> Tensor:
        """The same in float32."""
        return self.normal(*shape, dtype=torch.float32)

    def positions(self, tokens: int) -> Tensor:
        """0, 1, … of int64: positions, or free slots of a cache."""
        return torch.arange(tokens, device=self.device)

    def cos_sin(self, positions: int) -> Tensor:
        """A table for Rope."""
        return torch.rand(max(1, positions), self.facts.dims["qk_rope"], device=self.device)

    def pages(self, tokens: int) -> int:
        """How many hold this many tokens."""
        return -(-max(1, tokens) // self.facts.page_size)

    def cache(self, pages: int) -> Tensor:
        """One layer's cache in the bound layout, with small random contents."""
        made: Tensor = load_attr(self.layout.allocate)(pages, self.facts, self.device)
        if made.dtype.is_floating_point and not is_fp8(made.dtype):
            return made.normal_()
        made.view(torch.uint8).random_(0, 64)  # small numbers in FP8, whatever else it is
        return made

    def rows(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """(page table, owners, lens) over shuffled pages: a sequence per row, each of `context`
        tokens, or the last rows of a prompt."""
        if self.prompt:
            pages = torch.randperm(self.pages(self.context + tokens)).view(1, -1)
            lens = self.positions(tokens).to(torch.int32) + self.context + 1
            return pages.to(torch.int32).to(self.device), torch.zeros_like(lens), lens
        each = self.pages(self.context)
        table = torch.randperm(tokens * each).view(tokens, each).to(torch.int32).to(self.device)
        owners = torch.arange(tokens, dtype=torch.int32, device=self.device)
        return table, owners, torch.full_like(owners, self.context)

    def segments(self, tokens: int) -> Segments:
        """One sequence."""
        return Segments((tokens,), torch.tensor([0, tokens], dtype=torch.int32, device=self.device))

    def in_turn(self, make: Callable[[], Tensor]) -> Copies:
        """As many as keep each out of the cache."""
        first = make()
        return Copies([first, *(make() for _ in range(self.copies(first.nbytes) - 1))])

    def weight(self, rows: int, cols: int) -> Weight:
        """A [rows, cols] weight in the format of the site, on the host."""
        fmt, make = self.facts.weight_format, Maker(self.facts, f"{rows}x{cols}")
        if fmt.startswith("int") and fmt != "int4_actorder":
            part = make.weight(rows, cols, dtype=torch.float32).parts[0]
            return Weight((quantise_part(part, fmt),))
        return make.weight(rows, cols, fmt)
