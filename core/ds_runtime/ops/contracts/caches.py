"""The caches of a model, by groups: of how many tokens each has entries, and in which layers.

A cache of one layer is a tensor of *blocks* with the same number of *entries* each; how an entry
lies in its block is the business of a `Layout`. Blocks of a history group are pages, those of a
state group belong to one request each. Whoever counts bytes, allocates or copies asks a group for
its entries and blocks, and never of which kind it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from ds_runtime.ops.contract import Dims, Facts
from ds_runtime.ops.kernel import Layout

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
_NONE: Mapping[int, Tensor] = {}
KV, INDEX = (
    "kv",
    "index",
)  # layouts, and groups, of latents and of the index keys of sparse attention
ROWS = "rows"  # a layout that no kernel chooses: `FLOAT_ROWS`


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Caches in one layout.

    name: of the group. layers: those with a cache of their own. reads: pairs (layer, the layer
    whose cache it reads instead). layout: what ops on them have as `Op.layout`; groups of other
    names may share it. Raises ValueError for a layer that is named twice, or that reads a cache
    that is not there.
    """

    kind: ClassVar[str]
    per_request: ClassVar[bool]  # whether a block is a request's own; else it is a page
    name: str
    layers: tuple[int, ...]
    reads: tuple[tuple[int, int], ...] = ()
    layout: str = KV

    def __post_init__(self) -> None:
        own = frozenset(self.layers)
        if len(own) != len(self.layers):
            raise ValueError(f"cache group {self.name}: a layer is named twice in {self.layers}")
        for layer, other in self.reads:
            if layer in own or other not in own:
                raise ValueError(
                    f"cache group {self.name}: layer {layer} cannot read the cache of layer {other}"
                )

    def entries(self, page_size: int, undo: int = 0) -> int:
        """Returns the entries of one block. undo: tokens that a step may take back."""
        raise NotImplementedError

    @property
    def multiple(self) -> int:
        """What a page size must be a multiple of."""
        return 1

    def blocks(self, pages: T, states: T) -> T:
        """Returns the one of the two that is about this group's blocks. pages, states: anything
        that is known of pages and of states of requests, such as their numbers.
        """
        raise NotImplementedError

    def within(self, facts: Facts, undo: int = 0) -> Facts:
        """Returns what a layout or a kernel of this group sees: `page_size` is the entries of its
        blocks.
        """
        return replace(facts, page_size=self.entries(facts.page_size, undo))


@dataclass(frozen=True, slots=True)
class HistoryGroup(CacheGroup):
    """An entry for every `ratio` tokens, kept for the whole sequence. All history groups share
    pages. The entry of the token in slot s is s // ratio; its last token writes it. Raises
    ValueError for a ratio below 1.
    """

    kind = "history"
    per_request = False
    ratio: int = 1

    def __post_init__(self) -> None:
        CacheGroup.__post_init__(self)
        if self.ratio < 1:
            raise ValueError(f"cache group {self.name}: ratio {self.ratio} must be at least 1")

    @property
    def multiple(self) -> int:
        """The ratio."""
        return self.ratio

    def entries(self, page_size: int, undo: int = 0) -> int:
        return page_size // self.ratio

    def blocks(self, pages: T, states: T) -> T:
        return pages


@dataclass(frozen=True, slots=True)
class StateGroup(CacheGroup):
    """Entries for each request that runs, of which only the latest count: the entry of the token at
    position p is p % entries. A step that verifies drafts may take `undo` tokens back, and what was
    there before them must still be. So a block has this many entries more.

    rows: entries that count. width: numbers of an entry, if the layout is the core's `rows`, else
    0. Raises ValueError for other values.
    """

    kind = "state"
    per_request = True
    rows: int = 1
    width: int = 0

    def __post_init__(self) -> None:
        CacheGroup.__post_init__(self)
        if (self.layout == ROWS) != (self.width > 0):
            raise ValueError(f"cache group {self.name}: width {self.width} in layout {self.layout}")
        if self.rows < 1:
            raise ValueError(f"cache group {self.name}: rows {self.rows} must be at least 1")

    def entries(self, page_size: int, undo: int = 0) -> int:
        return self.rows + undo

    def within(self, facts: Facts, undo: int = 0) -> Facts:
        dims = Dims({**facts.dims, "row": self.width}) if self.width else facts.dims
        return replace(CacheGroup.within(self, facts, undo), dims=dims)

    def blocks(self, pages: T, states: T) -> T:
        return states


FLOAT_ROWS = Layout(
    name="float_rows",
    version=1,
    allocate="ds_runtime.ops.reference.attention.cache:allocate_float_rows",
    bytes_per_token=lambda facts: 4 * facts.dims["row"],
)


@dataclass(frozen=True, slots=True)
class LaidGroup:
    """A group and the layout that its kernels agree on. facts: of a kernel of the group."""

    group: CacheGroup
    layout: Layout
    facts: Facts

    @property
    def entry_bytes(self) -> int:
        """Of one layer."""
        return self.layout.bytes_per_token(self.facts)

    @property
    def page_bytes(self) -> int:
        """One block of one layer."""
        return self.entry_bytes * self.facts.page_size

    @property
    def block_bytes(self) -> int:
        """One block of every layer."""
        return self.page_bytes * len(self.group.layers)


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Bytes of all groups of one rank: of a page, and of the state of one request (0 where no
    group keeps any)."""

    page: int
    state: int

    @staticmethod
    def of(groups: Iterable[LaidGroup]) -> CacheSizes:
        sizes = [(g.group, g.block_bytes) for g in groups]
        return CacheSizes(
            sum(group.blocks(1, 0) * size for group, size in sizes),
            sum(group.blocks(0, 1) * size for group, size in sizes),
        )


class Arriving(Protocol):
    """Pages that are on their way to the caches."""

    def layer(self, layer: int) -> None:
        """What is queued from now on runs once those of this layer are there."""

    def wait(self) -> None:
        """What is queued from now on runs once all are there."""


class Caches:
    """The tensors of all groups, one for each layer that has a cache. Iterating yields them group
    by group.

    * groups: pairs of a group with its layout, and its tensors by layer.
    * arriving: what a step waits for as it reads layer after layer, or None if everything is there.
    """

    def __init__(self, groups: Iterable[tuple[LaidGroup, Mapping[int, Tensor]]]) -> None:
        self.groups = tuple(groups)
        self.arriving: Arriving | None = None
        self._by_layer = {
            laid.group.name: {**made, **{n: made[other] for n, other in laid.group.reads}}
            for laid, made in self.groups
        }

    def __iter__(self) -> Iterator[Tensor]:
        return (cache for _, made in self.groups for cache in made.values())

    @property
    def states(self) -> Iterator[tuple[LaidGroup, Mapping[int, Tensor]]]:
        """The groups whose blocks are requests' own."""
        return ((laid, made) for laid, made in self.groups if laid.group.per_request)

    def of(self, group: str, layer: int) -> Tensor:
        """The cache that a layer reads. Raises KeyError where it has none of this group."""
        self.reach(layer)
        return self._by_layer[group][layer]

    def reach(self, layer: int) -> None:
        """A step continues with this layer: it waits for what comes, a cache of another one that it
        reads included."""
        if self.arriving is not None:
            for laid, _ in self.groups:
                self.arriving.layer(dict(laid.group.reads).get(layer, layer))

    def get(self, group: str, layer: int) -> Tensor | None:
        """The cache that a layer reads, None where it has none of this group."""
        return self._by_layer.get(group, _NONE).get(layer)


def page_multiple(groups: Iterable[CacheGroup]) -> int:
    """What a page size must be a multiple of."""
    return lcm(*(group.multiple for group in groups))
