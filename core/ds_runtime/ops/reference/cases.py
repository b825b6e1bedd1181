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
from ds_runtime.ops.contract import FP4_KEYS, FP8_GROUPS, Facts
from ds_runtime.ops.dtypes import fp8_vectors, is_fp8, torch_dtype
from ds_runtime.ops.reference.attention.index import fp4_groups, fp4_values
from ds_runtime.ops.reference.matrices.rounding import quantise_part
from ds_runtime.ops.weight import Packed, Weight, WeightPart

BLOCK = (128, 128)
OTHERS = (  # formats that few kernels read: sampled more briefly
    *("fp8_tensor", "fp8_channel", "fp8_group", "mxfp8", "int8_block", "int8_group zeros"),
    *("int4_actorder", "w4afp8", "nvfp4", "mxfp4"),
)


@dataclass(frozen=True)
class Saved:
    """Stands in a call's arguments for what an earlier call of the case returned."""

    name: str


@dataclass(frozen=True)
class PagedCache:
    """Stands for one layer's cache with these logical rows: slot → latent and rope key.

    rows: [pages · page_size, kv_lora + rope] in facts.kv_dtype; NaN where no kernel may look.
    The harness writes them in the layout that the kernel under test reads. role "index": index
    keys [pages · page_size, d] in facts.index_dtype, or for FP8 and FP4 in float32 what it is
    for.
    """

    rows: Tensor
    page_size: int
    role: str = "kv"


@dataclass(frozen=True)
class Call:
    """One call of the kernel (of `method`, for objects) and what may come of it.

    save: keep the result under this name instead of comparing it. written: arguments written in
    place, compared afterwards. free: arguments that the kernel may overwrite. raises: the call must
    raise this. asks: a method of the kernel that says, given the rows of the first argument and the
    Packed among them, how it is to be called. Without it, or where it gives none of `answers`, the
    kernel is left out.
    """

    args: tuple[Any, ...]
    method: str = ""
    save: str = ""
    written: tuple[int, ...] = ()
    free: tuple[int, ...] = ()
    raises: type[Exception] | None = None
    asks: str = ""
    answers: tuple[Any, ...] = ()

    def left_out(self, target: Any, args: tuple[Any, ...]) -> bool:
        """Whether this kernel is not called with these arguments."""
        if not self.asks:
            return False
        ask = getattr(target, self.asks, None)
        packed = next(a for a in args if isinstance(a, Packed))
        return ask is None or ask(args[0].shape[0], packed) not in self.answers


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
        scaled = facts.kv_dtype == FP8_GROUPS  # its layout rounds what is written
        self.kv_dtype = self.dtype if scaled else torch_dtype(facts.kv_dtype)
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
        if fmt.startswith(("int8_channel", "int8_group", "int4")):
            return self._integers(name, shape, fmt, offset)
        if fmt != "fp8_block":
            return self._rounded(name, shape, fmt, offset)
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

    def _integers(
        self, name: str, shape: tuple[int, int], fmt: str, offset: tuple[int, int]
    ) -> WeightPart:
        """ "int8_channel", groups of 32: "int8_group", "int4_group", each also with "zeros", and
        "int4_actorder"."""
        rows, cols = shape
        fmt, _, zeros = fmt.partition(" ")
        block = (1, max(1, cols) if fmt == "int8_channel" else 32)
        low, high = (0, 16) if zeros else (-8, 8)
        if fmt.startswith("int8"):
            low, high = (-128 if zeros else -127, 128)
        groups = -(-(cols + offset[1]) // block[1])
        spread = (high - low) * 0.29  # of uniform codes
        scale = (self.uniform(rows, groups) + 0.5) / (spread * cols**0.5)
        tensors = {
            "weight": self.integers(low, high, rows, cols).to(torch.int8),
            "scale": scale.to(torch.float32),
        }
        if zeros:
            around = (-20, 21) if fmt.startswith("int8") else (5, 11)
            tensors["zero"] = self.integers(*around, rows, groups).to(torch.int8)
        if fmt == "int4_actorder":
            tensors["group"] = (self.order(cols) // 32).to(torch.int32)
        return WeightPart(name, fmt, shape, tensors, block, offset)

    def _rounded(
        self, name: str, shape: tuple[int, int], fmt: str, offset: tuple[int, int]
    ) -> WeightPart:
        """Gaussian numbers in any other format: a corner of a matrix that has `offset` more."""
        (rows, cols), (up, left) = shape, offset
        values = self.normal(rows + up, cols + left, scale=cols**-0.5, dtype=torch.float32)
        whole = WeightPart(name, "dense", (rows + up, cols + left), {"weight": values})
        made = quantise_part(whole, fmt, 32)
        codes = made.tensors["weight"].view(torch.uint8)[up:, left:].contiguous()
        tensors = {**made.tensors, "weight": codes.view(made.tensors["weight"].dtype)}
        if fmt in ("w4afp8", "fp8_tensor", "nvfp4"):
            tensors["input_scale"] = torch.tensor([0.0625])
        return replace(made, shape=shape, tensors=tensors, offset=offset)

    def table(self, lens: tuple[int, ...], spare: int = 2) -> Tensor:
        """A page table of sequences of these lengths: [sequences, pages] int32.

        Pages are shuffled, with `spare` that are nobody's; unused entries name one of these.
        """
        counts = [-(-n // self.facts.page_size) for n in lens]
        order = self.order(sum(counts) + spare).to(torch.int32)
        table = order[-1].repeat(len(lens), max(counts, default=0) + 1)
        used = 0
        for i, count in enumerate(counts):
            table[i, :count] = order[used : used + count]
            used += count
        return table

    def paged(
        self, lens: tuple[int, ...], spare: int = 2, width: int = 0
    ) -> tuple[PagedCache, Tensor]:
        """A cache that holds sequences of these lengths, and their page table.

        Rows behind a sequence's end and pages of nobody are NaN. width: of a row, by default that
        of a latent and its key.
        """
        width = width or self.facts.dims["kv_lora"] + self.facts.dims["qk_rope"]
        return self._paged(lens, spare, width, self.kv_dtype)

    def paged_index(self, lens: tuple[int, ...]) -> tuple[PagedCache, Tensor]:
        """The same of index keys, which facts.index_dtype can hold exactly if it is FP8 or FP4."""
        dtype = torch_dtype(self.facts.index_dtype)
        cache, table = self._paged(lens, 2, self.facts.dims["index_dim"], torch.float32)
        if is_fp8(dtype) or self._packed:
            held = ~cache.rows.isnan().any(-1)
            cache.rows[held] = self._held(cache.rows[held])
            return replace(cache, role="index"), table
        return replace(cache, rows=cache.rows.to(dtype), role="index"), table

    def index_queries(self, rows: int, heads: int) -> tuple[Tensor, Tensor]:
        """(queries [rows, heads, d] as IndexEncode has them, scales [rows, heads] float32)."""
        dtype, shape = torch_dtype(self.facts.index_dtype), (rows, heads)
        q = self.normal(*shape, self.facts.dims["index_dim"], dtype=torch.float32)
        if self._packed:
            return self._held(q).to(self.dtype), torch.ones(shape)
        return fp8_vectors(q) if is_fp8(dtype) else (q.to(dtype), torch.ones(shape))

    @property
    def _packed(self) -> bool:
        return self.facts.index_dtype == FP4_KEYS

    def _held(self, vectors: Tensor) -> Tensor:
        """What FP8 or FP4 makes of them, in float32."""
        if self._packed:
            return fp4_values(*fp4_groups(vectors))
        codes, scale = fp8_vectors(vectors)
        return codes.to(torch.float32) * scale.unsqueeze(-1)

    def rows(self, lens: tuple[int, ...], counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """(owners, lens) int32 of the last `counts` rows of sequences of these lengths."""
        pairs = list(zip(lens, counts, strict=True))
        owners = [i for i, (_, count) in enumerate(pairs) for _ in range(count)]
        seen = [n - count + 1 + j for n, count in pairs for j in range(count)]
        return torch.tensor(owners, dtype=torch.int32), torch.tensor(seen, dtype=torch.int32)

    def _paged(
        self, lens: tuple[int, ...], spare: int, width: int, dtype: torch.dtype
    ) -> tuple[PagedCache, Tensor]:
        size = self.facts.page_size
        table = self.table(lens, spare)
        pages = sum(-(-n // size) for n in lens) + spare
        rows = torch.full((pages * size, width), float("nan"), dtype=dtype)
        for i, n in enumerate(lens):
            tokens = torch.arange(n)
            slots = table[i][tokens // size].to(torch.int64) * size + tokens % size
            rows[slots] = self.normal(n, width, dtype=dtype)
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
