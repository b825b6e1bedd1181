"""What a sample is made of: the calls of one case, and makers of awkward inputs.

Each `*_samples(facts)` generator yields `Case`s for one op, references and third-party kernels
alike. Inputs are made on the host; `ds_runtime.testing.conformance` copies them to the device,
strides included, and runs the reference on float64 copies.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ds_runtime.ops.batch import Segments
from ds_runtime.ops.reference.formats import torch_dtype
from ds_runtime.ops.spec import Facts
from ds_runtime.ops.weight import Weight, WeightPart

BLOCK = (128, 128)


@dataclass(frozen=True)
class Saved:
    """Stands in a call's arguments for what an earlier call of the case returned."""

    name: str


@dataclass(frozen=True)
class PagedCache:
    """Stands for one layer's cache with these logical rows: slot → latent and rope key.

    rows: [pages · page_size, kv_lora + rope] in facts.kv_dtype; NaN where no kernel may look.
    The harness writes them in the layout that the kernel under test reads.
    """

    rows: Tensor
    page_size: int


@dataclass(frozen=True)
class Call:
    """One call of the kernel (of `method`, for objects) and what may come of it.

    save: keep the result under this name instead of comparing it. written: arguments written in
    place, compared afterwards. free: arguments that the kernel may overwrite. raises: the call
    must raise this.
    """

    args: tuple[Any, ...]
    method: str = ""
    save: str = ""
    written: tuple[int, ...] = ()
    free: tuple[int, ...] = ()
    raises: type[Exception] | None = None


@dataclass(frozen=True)
class Case:
    """A labelled sequence of calls on one kernel, under these facts."""

    label: str
    facts: Facts
    calls: tuple[Call, ...]


def case(label: str, facts: Facts, *args: Any, written: tuple[int, ...] = ()) -> Case:
    """A case of one function call."""
    return Case(label, facts, (Call(args, written=written),))


def site(facts: Facts, weight: Weight) -> Facts:
    """The facts of a site that owns this weight."""
    return replace(facts, weight_format=weight.format, shape=weight.shape)


def segments(*lens: int) -> Segments:
    """Segments of these lengths."""
    return Segments(lens, torch.tensor([0, *lens]).cumsum(0).to(torch.int32))


class Maker:
    """Random inputs of one case in the compute dtype; the same label gives the same numbers."""

    def __init__(self, facts: Facts, label: str) -> None:
        self.dtype = torch_dtype(facts.dtype)
        self.kv_dtype = torch_dtype(facts.kv_dtype)
        self.facts = facts
        self.generator = torch.Generator().manual_seed(zlib.crc32(label.encode()))

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Gaussian numbers of this scale."""
        values = torch.randn(shape, generator=self.generator) * scale
        return values.to(dtype or self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        """float64 in [0, 1)."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int64 in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator)

    def order(self, n: int) -> Tensor:
        """A permutation of 0 … n − 1."""
        return torch.randperm(n, generator=self.generator)

    def inside(self, values: Tensor, left: int = 3, right: int = 5) -> Tensor:
        """The same values as a slice of a wider tensor whose other columns are NaN."""
        width = left + values.shape[-1] + right
        outer = values.new_full((*values.shape[:-1], width), float("nan"))
        view = outer[..., left : left + values.shape[-1]]
        view.copy_(values)
        return view

    def cos_sin(self, positions: int, d: int) -> Tensor:
        """A table as Rope wants it, of plain frequencies: [positions, d] float32."""
        frequency = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
        angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
        return torch.cat((angle.cos(), angle.sin()), dim=-1).to(torch.float32)

    def weight(
        self,
        out: int,
        n: int,
        fmt: str = "dense",
        parts: tuple[int, ...] = (),
        offset: tuple[int, int] = (0, 0),
        scale: str = "float32",
        dtype: torch.dtype | None = None,
    ) -> Weight:
        """A weight [out, n] whose product with unit inputs has unit size; `parts` rows each."""
        made = [self._part(f"part{i}", (rows, n), fmt, offset, scale, dtype)
                for i, rows in enumerate(parts or (out,))]  # fmt: skip
        weight = Weight(tuple(made))
        assert weight.shape == (out, n)
        return weight

    def _part(
        self,
        name: str,
        shape: tuple[int, int],
        fmt: str,
        offset: tuple[int, int],
        scale: str,
        dtype: torch.dtype | None,
    ) -> WeightPart:
        if fmt == "dense":
            values = self.normal(*shape, scale=shape[1] ** -0.5, dtype=dtype)
            return WeightPart(name, fmt, shape, {"weight": values})
        values = self.normal(*shape, scale=64.0, dtype=torch.float32).clamp(-448, 448)
        rows, cols = (-(-(n + o) // b) for n, o, b in zip(shape, offset, BLOCK, strict=True))
        if scale == "ue8m0":
            middle = 127 - 6 - round(math.log2(shape[1]) / 2)
            grid = self.integers(middle - 1, middle + 2, rows, cols).to(torch.uint8)
        else:
            grid = (self.uniform(rows, cols) + 0.5) / (64.0 * shape[1] ** 0.5)
            grid = grid.to(torch_dtype(scale))
        tensors = {"weight": values.to(torch.float8_e4m3fn), "scale": grid}
        return WeightPart(name, fmt, shape, tensors, block=BLOCK, offset=offset)

    def paged(self, lens: tuple[int, ...], spare: int = 2) -> tuple[PagedCache, Tensor]:
        """A cache that holds sequences of these lengths, and their page table.

        Pages are shuffled; rows behind a sequence's end and pages of nobody are NaN; unused table
        entries name a page of nobody.
        """
        size = self.facts.page_size
        counts = [-(-n // size) for n in lens]
        order = self.order(sum(counts) + spare).to(torch.int32)
        table = order[-1].repeat(len(lens), max(counts, default=0) + 1)
        width = self.facts.dims["kv_lora"] + self.facts.dims["qk_rope"]
        rows = torch.full((len(order) * size, width), float("nan"), dtype=self.kv_dtype)
        used = 0
        for i, (n, count) in enumerate(zip(lens, counts, strict=True)):
            table[i, :count] = order[used : used + count]
            used += count
            tokens = torch.arange(n)
            slots = table[i][tokens // size].to(torch.int64) * size + tokens % size
            rows[slots] = self.normal(n, width, dtype=self.kv_dtype)
        return PagedCache(rows, size), table


class SampleExperts:
    """An ExpertSource over ready weights that insists on being read once, in order."""

    def __init__(self, experts: list[tuple[Weight, Weight, Weight]]) -> None:
        self.experts = experts
        self.num_experts = len(experts)
        self.intermediate, self.hidden = experts[0][0].shape
        self.format = experts[0][0].format
        self._next = 0

    def expert(self, index: int) -> tuple[Weight, Weight, Weight]:
        """(gate, up, down) of the expert whose turn it is."""
        if index != self._next:
            raise ValueError(f"expert {index} read out of order: expert {self._next} is next")
        self._next += 1
        return self.experts[index]
