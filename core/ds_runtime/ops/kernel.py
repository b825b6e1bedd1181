"""What a kernel says of itself, by groups: its promises, rows, memory, compilation. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

# Packings that kernels may share (`RowRange.packing`), and what `Packed.tensors` holds under these
# names: e4m3 values, and a float32 scale for each 128 × 128 block. Whoever packed may keep more.
FP8_ROWS = "fp8_rows.v1"  # weight [out, in], scale [⌈out / 128⌉, ⌈in / 128⌉]
FP8_EXPERTS = "fp8_experts.v1"  # gate_up [experts, 2 · I, H] (gate rows first), gate_up_scale,
# down [experts, H, I], down_scale; H and I in whole blocks. ue8m0, where it is there: whether all
# scales are powers of two, so that those of activations are, too
DENSE_EXPERTS = "dense_experts.v1"  # gate_up and down, as FP8_EXPERTS, in the compute dtype
DENSE_ROWS = "dense_rows.v1"  # weight [out, in] in the compute dtype


@dataclass(frozen=True, slots=True)
class Promises:
    """What holds in every call of a kernel. The binder refuses a kernel if a run needs a promise
    that it lacks. Conformance tests every promise.

    * deterministic: the same bits in every run, as `Facts.deterministic` demands.
    * graph_safe: calls may be recorded and replayed, as `Facts.graph_capture` demands.
    * batch_invariant: the bits of a row depend on that row alone, not on the number of rows
      (`Facts.own_bits`).
    * skips_absent: experts of number −1, which other ranks have, add nothing. Ranks that divide
      experts by number need it.
    * takes_codes: the object has the methods of QuantizedExperts, so that ranks may send each other
      codes.
    * many_rows: of MlaDecode: any number of rows of a sequence is fast, as its contract says.
    """

    deterministic: bool = True
    graph_safe: bool = True
    batch_invariant: bool = False
    skips_absent: bool = False
    takes_codes: bool = False
    many_rows: bool = False


@dataclass(frozen=True, slots=True)
class RowRange:
    """The calls of a place that a kernel takes, if several kernels divide them by rows.

    Kernels of one packing may serve one place. A kernel with bounds serves the calls within them.
    The kernel without bounds packs, and serves the rest. If all have bounds, the best of them
    packs. Functions need no packing: those that rank before the first without bounds divide its
    calls in this way.

    * packing: the shared form in which `pack` leaves a weight if it can, such as FP8_ROWS.
    * first: the least number of rows.
    * below: one more than the largest number of rows. 0: no bound.
    * methods: those that the bounds are about. Empty: all. Other methods are served by the kernel
      that packs, for any number of rows.
    * bits: a tag. Kernels of an op with the same tag give a row the same bits. They may divide
      calls even if rows must have bits of their own.

    Raises ValueError for bounds that hold no number of rows.
    """

    packing: str = ""
    first: int = 0
    below: int = 0
    methods: frozenset[str] = frozenset()
    bits: str = ""

    def __post_init__(self) -> None:
        if min(self.first, self.below) < 0 or 0 < self.below <= self.first:
            raise ValueError(f"{self}: no number of rows is at least first and below `below`")

    @property
    def bounded(self) -> bool:
        """Whether it asks for calls of some sizes alone."""
        return bool(self.first or self.below)

    def holds(self, rows: int) -> bool:
        """Whether a call of this many rows lies within the bounds."""
        return self.first <= rows and (not self.below or rows < self.below)


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory that a kernel takes, and the bytes that its calls read.

    * keeps: the weight formats that stay packed in their own encoding. Others are held in the
      compute dtype. None: no format, if the kernel reads dense weights, else every format that it
      reads.
    * copies: how often `pack` keeps the weight, laid out for several uses.
    * second_form: the size of a further form of a weight of a shared packing, as a share of the
      weight. The object then has `hold_second_form(packed) -> Packed` and `serves(rows, packed) ->
      bool`. The first is called once the weight is packed, by whichever kernel, and adds the form
      if it can. The second says whether a call within the bounds is one for the kernel. If memory
      has no room for the form, the kernel is refused.
    * workspace: `(facts, rows) -> int`, the bytes that a call of `rows` rows holds at most besides
      its arguments, weights and results. Conformance tests it. None says nothing.
    * reads: `(facts) -> float`, if the kernel packs weights tighter than their own format: the
      share of that format's bytes that a call reads. It says what a step must read. The estimate of
      memory does not use it.

    Raises TypeError or ValueError naming the field for other values.
    """

    keeps: frozenset[str] | None = None
    copies: float = 1
    second_form: float = 0
    workspace: Callable[[Any, int], int] | None = None
    reads: Callable[[Any], float] | None = None

    def __post_init__(self) -> None:
        for name, zero in (("copies", False), ("second_form", True)):
            _check_share(f"Footprint: {name}", getattr(self, name), zero)
        for name in ("workspace", "reads"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise TypeError(f"Footprint: {name} is {value!r}: give a function, or leave it out")
        keeps: Any = self.keeps
        if keeps is not None and not (
            isinstance(keeps, frozenset) and all(isinstance(one, str) for one in keeps)
        ):
            raise TypeError(
                f"Footprint: keeps is {keeps!r}: give a frozenset of names of weight formats"
            )


def _check_share(name: str, value: Any, zero: bool) -> None:
    """Raise for a value that is no finite number above 0, or at least 0."""
    wanted = f"give a finite number {'of at least' if zero else 'above'} 0"
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: {wanted}")
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} is {value!r}: {wanted}")


@dataclass(frozen=True, slots=True)
class Compiles:
    """Functions that compile a kernel's calls before they run, if it compiles on first use. Each is
    lazy, `"module:attr"`, or empty.

    * ahead: `(facts, rows) -> None` compiles calls of each of these numbers of rows into a cache on
      disk, without weights. `rows` has all numbers that a step can have. Other processes call it
      while weights are loaded, with the device as torch's current one. Torch may take 8 GiB of its
      memory there.
    * rehearsal: `() -> context manager`, whose value says whether it works here. Within it, calls
      of all kernels that name it compile and do not run. Their results are zeros. Leaving it waits
      until all have compiled.
    * variant: `(facts, rows) -> Hashable`. Numbers of rows with the same value share what was
      compiled for one of them. For attention over prompts `rows` is the longest sequence. It is
      asked of every number that a step can have. Empty: one call compiles for all.

    Raises TypeError or ValueError for a text that is no such path.
    """

    ahead: str = ""
    rehearsal: str = ""
    variant: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            path: Any = getattr(self, field.name)
            if not isinstance(path, str) or (path and not _is_lazy(path)):
                raise (ValueError if isinstance(path, str) else TypeError)(
                    f"Compiles: {field.name} is {path!r}: give a lazy 'module:attr', or leave it "
                    "out"
                )


def _is_lazy(path: str) -> bool:
    """Whether it is a "module:attr"."""
    module, _, attr = path.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), attr))


_GROUPS = {"promises": Promises, "rows": RowRange, "footprint": Footprint, "compiles": Compiles}


def check_groups(kernel: str, **given: object) -> None:
    """Raise TypeError if a kernel's group is none: a plugin's files need no type checker."""
    for name, group in given.items():
        if not isinstance(group, kind := _GROUPS[name]):
            raise TypeError(f"{kernel}: {name} is {group!r}: give {kind.__name__}(…)")


@dataclass(frozen=True, slots=True)
class Layout:
    """A byte layout that several kernels must agree on, such as that of the KV cache.

    A cache of one layer is a tensor of blocks along its first dim, of `facts.page_size` entries
    each. A block is a page, or the state of a request (`CacheGroup`).

    * name, version: make the tag, `name.vVERSION`. Other bytes need another version.
    * allocate: lazy `(blocks, facts, device) -> Tensor`, the zeroed cache of one layer.
    * bytes_per_token: `(facts) -> int`, the bytes of one entry of one layer.
    * page_sizes: the numbers of entries that a block may have. Empty: any.
    * copy: lazy `(cache, sources, targets) -> None`. Blocks `targets` become what blocks `sources`
      are, both [n] int64. No block is named twice.
    * export: lazy `(cache, blocks) -> Tensor`, [n, bytes of a block] uint8 for blocks [n] int64.
    * restore: lazy `(cache, blocks, exported) -> None`, the inverse of `export`.

    The defaults of the last three fit if a block lies along the first dim and nowhere else.
    """

    name: str
    version: int
    allocate: str
    bytes_per_token: Callable[[Any], int]
    page_sizes: tuple[int, ...] = ()  # entries of a block; empty: any
    copy: str = "ds_runtime.ops.reference.attention.cache:copy_blocks"
    export: str = "ds_runtime.ops.reference.attention.cache:export_blocks"
    restore: str = "ds_runtime.ops.reference.attention.cache:restore_blocks"

    @property
    def tag(self) -> str:
        """What kernels name in `Kernel.layouts`."""
        return f"{self.name}.v{self.version}"
