"""Where a kernel is measured, with how many copies of its weights, and what is timed there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_runtime.ops.batch import Segments
from ds_runtime.ops.contract import Facts, Kernel, Layout, Routing, load_attr
from ds_runtime.ops.dtypes import is_fp8, torch_dtype
from ds_runtime.ops.reference import EXPANDED_PAGES, expanded_width
from ds_runtime.ops.reference.cases import Maker
from ds_runtime.ops.reference.matrices.rounding import quantise_part
from ds_runtime.ops.weight import Weight
from ds_runtime_bench.ops.work import Work
from ds_runtime_kit.checks.inputs import rebuild


@dataclass(frozen=True, slots=True)
class Memory:
    """How weights are kept out of the caches.

    cache: bytes of the last-level cache. model: bytes of the model's weights. most: bytes that
    the copies of one op may take.
    """

    cache: int
    model: int
    most: int

    def copies(self, nbytes: float) -> int:
        """How many of `nbytes` are twice as large as the cache; one if the model fits into it."""
        if self.model <= self.cache or not nbytes:
            return 1
        wanted = -(-2 * self.cache // int(nbytes))
        return max(1, min(wanted, self.most // int(nbytes)))

    def cold(self, nbytes: float, copies: int) -> bool:
        """Whether so many copies cannot all stay in the cache, or need not leave it."""
        return self.model <= self.cache or nbytes * copies > self.cache


@dataclass(frozen=True, slots=True)
class Subject:
    """What is timed: the calls, one after the other and again; `work` is that of one call."""

    method: str
    calls: Sequence[Callable[[], Any]]
    work: Work
    copies: int = 1
    cold: bool = True
    note: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a kernel is measured. width: of the rows of a small op, where its site has no shape.

    context: cached tokens per sequence. vocab: rows of logits and embedding on this rank.
    """

    kernel: Kernel
    facts: Facts
    width: int
    routing: Routing | None
    layout: Layout
    context: int
    vocab: int
    device: torch.device
    memory: Memory

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return torch_dtype(self.facts.dtype)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Gaussian numbers on the device."""
        return torch.randn(shape, device=self.device).to(dtype or self.dtype)

    def positions(self, tokens: int) -> Tensor:
        return torch.arange(tokens, device=self.device)

    def made(self) -> Any:
        """The function, or the object that it makes."""
        fn = load_attr(self.kernel.fn)
        return fn if self.kernel.op.kind == "function" else fn(self.facts)

    def cos_sin(self, positions: int) -> Tensor:
        return torch.rand(max(1, positions), self.facts.dims["qk_rope"], device=self.device)

    @property
    def cached(self) -> int:
        """Values of a cached token but for its rotated key."""
        dims = self.facts.dims
        expanded = self.layout.tag == EXPANDED_PAGES.tag
        return expanded_width(dims) - dims["qk_rope"] if expanded else dims["kv_lora"]

    def cache(self, pages: int) -> Tensor:
        """One layer's cache in the bound layout, with small random contents."""
        made: Tensor = load_attr(self.layout.allocate)(pages, self.facts, self.device)
        if made.dtype.is_floating_point and not is_fp8(made.dtype):
            return made.normal_()
        made.view(torch.uint8).random_(0, 64)  # small numbers in FP8, whatever else it is
        return made

    def segments(self, tokens: int) -> Segments:
        """One sequence."""
        return Segments((tokens,), torch.tensor([0, tokens], dtype=torch.int32, device=self.device))


def random_weight(place: Place, rows: int, cols: int, fmt: str) -> Weight:
    """A [rows, cols] weight in format `fmt` on the device."""
    make = Maker(place.facts, f"{rows}x{cols}")
    if fmt.startswith("int") and fmt != "int4_actorder":
        part = make.weight(rows, cols, dtype=torch.float32).parts[0]
        return copied(Weight((quantise_part(part, fmt),)), place.device)
    return copied(make.weight(rows, cols, fmt), place.device)


def copied(weight: Weight, device: torch.device) -> Weight:
    """The same values in tensors of their own: a kernel may keep, change or drop them."""

    def convert(leaf: Any) -> Any:
        return leaf.to(device, copy=True) if isinstance(leaf, Tensor) else leaf

    found: Weight = rebuild(weight, convert)
    return found


def pack_copies(place: Place, pack: Callable[[], Any]) -> list[Any]:
    """One packed weight, and as many more as keep it out of the cache."""
    first = pack()
    return [first, *(pack() for _ in range(place.memory.copies(first.nbytes) - 1))]


def subject(
    place: Place,
    method: str,
    calls: Sequence[Callable[[], Any]],
    todo: Work,
    packed: Sequence[Any],
    note: str = "",
) -> Subject:
    """A subject that owns weights."""
    cold = place.memory.cold(packed[0].nbytes, len(packed))
    return Subject(method, calls, todo, len(packed), cold, note)


def held(place: Place) -> str:
    """The format in which the kernel keeps its weight: its own or the compute dtype."""
    fmt = place.facts.weight_format
    return fmt if fmt in place.kernel.keeps else "dense"
