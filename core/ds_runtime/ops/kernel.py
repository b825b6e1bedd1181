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
    """What holds in every call. The binder refuses a kernel where a run needs what it lacks.

    `deterministic`: the same bits in every run (`Facts.deterministic` needs it). `graph_safe`:
    calls may be recorded and replayed (`Facts.graph_capture`). `batch_invariant`: a row's bits
    depend on that row alone, not on how many others there are (`Facts.own_bits`). `skips_absent`:
    experts of number −1, which other ranks have, add nothing; needed where ranks divide experts by
    number. `takes_codes`: has what QuantizedExperts lists, so that ranks may send each other
    codes. Conformance holds a kernel to each of these. `many_rows`, of MlaDecode: any number of
    rows of a sequence are fast (see there).
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

    `packing` names the shared form in which `pack` leaves a weight where it can (FP8_ROWS, say).
    Kernels of one packing may serve one place. Those with bounds serve the calls of `first` rows or
    more and fewer than `below` (0: no bound). One without bounds packs, and serves the rest. If all
    have bounds, the best of them does. Functions need no packing: those that rank before the first
    without bounds divide its calls so. `methods`: those of which the bounds hold; empty: all.
    Others are served by the one that packs, for any number of rows. `bits`: kernels of an op with
    the same tag give a row the same bits, and may divide calls where rows must have bits of their
    own.
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

    `keeps`: the formats that stay packed in their own encoding; others are held in the compute
    dtype. None: none where the kernel reads dense weights, otherwise all that it reads. `copies`
    says how often `pack` keeps the weight (laid out for several uses). `second_form`, of a kernel
    that reads a weight of a shared packing in a form of its own, is how much that takes as a share
    of the weight. What `fn` gives then has two methods. `hold_second_form(packed) -> Packed` is
    called once the weight is packed, by whichever kernel, and adds the form if it can.
    `serves(rows, packed)` says whether a call within its bounds is one for it. Where memory has no
    room, the kernel is refused. `workspace(facts, rows)` gives the bytes that a call of `rows` rows
    holds at most beyond its arguments, weights and results; None says nothing. Conformance holds a
    kernel to it.
    `reads(facts)`, of a kernel that may pack weights tighter than their own format, is the share of
    that format's bytes that its calls read then. It says what a step must read; the estimate of
    memory does not count on it. Raises TypeError or ValueError naming the field for other values.
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
    """Compiles the calls of a kernel before they run, if it compiles on first use. Each is lazy,
    `"module:attr"`.

    `ahead` names a function `(facts, rows) -> None` that has calls of each of these numbers of rows
    compiled, all that a step can have, without weights, into a cache on disk. Other processes call
    it while weights are loaded, with the device as torch's current one. `rehearsal` names a
    function that gives a context, whose value says whether it works here. Within it, calls of all
    kernels that name it compile and do not run. Their results are zeros, and leaving it waits until
    all have compiled. `variant` names a function `(facts, rows) -> Hashable`. Calls of numbers of
    rows for which it is the same are served by what one of them had compiled (rows of attention
    over prompts: the longest sequence's). It is asked of every number that a step can have; empty:
    one call serves for all. Raises TypeError or ValueError for what is no such path.
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

    `allocate` is a lazy function `(blocks, facts, device) -> Tensor`, for one layer, with blocks of
    `facts.page_size` entries along the first dim: pages, or states of requests (`CacheGroup`).
    `bytes_per_token(facts)` is of one entry. `copy`: lazy, `(cache, sources, targets)`, puts what
    blocks `sources` hold into blocks `targets`, [n] int64 each, none of which is named twice.
    `export`: lazy, `(cache, blocks) -> [n, bytes of a block] uint8`; `restore`: lazy, `(cache,
    blocks, exported)`. By default a block is what lies along the first dim, and a layout that keeps
    more elsewhere brings its own.
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
        return f"{self.name}.v{self.version}"
