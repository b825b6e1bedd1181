"""The lightning indexer: which cached tokens the rows of a step attend.

Decode rows always attend chosen slots. Prefill rows attend densely while no sequence of the step
sees more than top_k tokens, which is the same and faster. Index keys are cached in either case.
Every rank has the whole indexer: equal inputs give equal choices, and no exchange is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ds_runtime.description import tree
from ds_runtime.description.config import ModelConfig
from ds_runtime.description.sites import INDEXER_TREE
from ds_runtime.description.tree import INDEXER
from ds_runtime.ops.batch import TAIL, Batch, DecodePart, PrefillPart
from ds_runtime.ops.contracts.attention.index import scored_rows

if TYPE_CHECKING:
    from ds_runtime.weights.loader import Loader

NORM_EPS = 1e-6  # of the key's LayerNorm


@dataclass(frozen=True, slots=True)
class Window:
    """Of rows that are nodes of trees, the w last tokens of their sequences, of which each row sees
    some. As if those alone were there, in their order, a row counts what it sees: these counts are
    called places.

    lens: [rows] int32, tokens of the sequence. order: [rows, w], of the window's tokens first those
    that are seen. begins: [rows, 1], the place of the first of them.
    """

    lens: Tensor
    order: Tensor
    begins: Tensor

    @staticmethod
    def of(tree: Tensor, lens: Tensor, columns: int) -> tuple[Window, Tensor]:
        """With the tokens that each row sees, [rows] int32. tree: as in DecodePart; columns: most
        tokens of a sequence.
        """
        width = min(TAIL, columns)
        bits = torch.arange(TAIL - width, TAIL, device=tree.device)
        hidden = 1 - ((tree.unsqueeze(1) >> bits) & 1)  # [rows, w]
        order = hidden.sort(dim=1, stable=True).indices
        begins = lens.to(torch.int64).unsqueeze(1) - width
        return Window(lens, order, begins), lens - hidden.sum(1).to(torch.int32)

    def place(self, scores: Tensor) -> None:
        """Bring the scores of tokens, [rows, columns], to their places."""
        columns = scores.shape[1]
        own = torch.arange(self.order.shape[1], device=scores.device)
        # What lies before a short sequence goes to columns behind it, which nobody reads.
        moved = scores.gather(1, (self.begins + self.order) % columns)
        scores.scatter_(1, (self.begins + own) % columns, moved)

    def tokens(self, places: Tensor) -> Tensor:
        """The tokens at places [rows, n], which may be negative where there is none."""
        inside = places - self.begins
        last = self.order.shape[1] - 1
        found = self.begins + self.order.gather(1, inside.clamp(0, last))
        return torch.where(inside >= 0, found, places).clamp(min=0)

    def __getitem__(self, rows: slice) -> Window:
        return Window(self.lens[rows], self.order[rows], self.begins[rows])


@dataclass(slots=True)
class Part:
    """Rows [first, first + count) of a step, which attend chosen slots.

    owners, lens: [count] int32, each row's sequence in page_table and how many tokens it sees.
    scored: whether any sees more than top_k. window: of trees. slots: [count, n] int32, chosen by
    the last layer that has an indexer.
    """

    first: int
    page_table: Tensor
    owners: Tensor
    lens: Tensor
    scored: bool
    window: Window | None = None
    slots: Tensor | None = None

    def of(self, x: Tensor) -> Tensor:
        """The part's rows of x, which has a row for every one of the step."""
        count = self.owners.shape[0]
        return x if count == x.shape[0] else x[self.first : self.first + count]

    @property
    def chosen(self) -> Tensor:
        """`slots`, which a layer before has set."""
        assert self.slots is not None, "a layer shares a choice that nobody made"
        return self.slots


@dataclass(slots=True)
class Selection:
    """The parts of one step that attend chosen slots, handed from layer to layer."""

    decode: Part | None = None
    prefill: Part | None = None

    @staticmethod
    def of(batch: Batch, top_k: int, always: bool, page_size: int) -> Selection:
        """always: score decode rows of any length, as captured and batch-invariant steps must."""
        made, n = Selection(), batch.num_decode
        seen = (batch.positions + 1).to(torch.int32)
        if (part := batch.decode) is not None:
            scored = always or max(part.host_kv_lens, default=0) > top_k
            owners, window, lens = decode_owners(part), None, seen[:n]
            if part.tree is not None:
                columns = part.page_table.shape[1] * page_size
                window, lens = Window.of(part.tree, part.kv_lens[owners], columns)
            made.decode = Part(0, part.page_table, owners, lens, scored, window)
        if (prefill := batch.prefill) is not None and longest(prefill) > top_k:
            owners = prefill_owners(prefill)
            made.prefill = Part(n, prefill.page_table, owners, seen[n:], True)
        return made


class LayerStep(NamedTuple):
    """What one layer sees of a step. cache: in the bound KV layout; index_cache: in the index
    layout, where the layer has an indexer. selection: where attention is sparse."""

    batch: Batch
    cache: Tensor
    cos_sin: Tensor
    index_cache: Tensor | None = None
    selection: Selection | None = None


def decode_owners(part: DecodePart) -> Tensor:
    device, counts = part.page_table.device, part.q_lens
    if len(set(counts)) <= 1:  # computed on the device, so that it can be captured
        every = counts[0] if counts else 1
        rows = torch.arange(part.rows, dtype=torch.int32, device=device)
        return rows if every == 1 else rows // every
    owners = [i for i, count in enumerate(counts) for _ in range(count)]
    return torch.tensor(owners, dtype=torch.int32, device=device)


def prefill_owners(part: PrefillPart) -> Tensor:
    ends = part.q_segs.cu[1:]
    rows = torch.arange(part.q_segs.total, dtype=ends.dtype, device=ends.device)
    return torch.searchsorted(ends, rows, right=True, out_int32=True)


def longest(part: PrefillPart) -> int:
    """Most tokens that a row of these sequences sees."""
    lens = list(part.q_segs.lens)
    for chunk in part.prefix:
        for sequence, more in enumerate(chunk.segs.lens, chunk.sequence):
            lens[sequence] += more
    return max(lens, default=0)


class Indexer:
    """One layer's indexer. keys_come: index keys are always handed over with the step's rows."""

    def __init__(
        self,
        config: ModelConfig,
        load: Loader,
        layer: int,
        node: tree.IndexerNode,
        keys_come: bool = False,
    ) -> None:
        assert config.indexing is not None
        self.ops = load.ops(layer, INDEXER)
        self.query = load.linear(node.query)
        self.keys = None if keys_come else load.linear(node.keys)
        self.norm, self.norm_bias = load.wide(node.norm), load.wide(node.bias)
        self.heads, self.dim = config.indexing.heads, config.indexing.dim
        self.top_k, self.interleaved = config.indexing.top_k, config.indexing.interleaved
        weights = load.wide(node.weights)  # [heads, hidden]
        self.weights = weights * (self.heads * self.dim) ** -0.5
        base = load.bound.base
        self.page_size, self.coded = base.page_size, base.index_dtype != base.dtype
        has_trees = load.bound.has("index_scores", layer, INDEXER_TREE)
        self.trees = load.ops(layer, INDEXER_TREE) if has_trees else None

    def __call__(self, x: Tensor, query: Tensor, keys: Tensor | None, step: LayerStep) -> None:
        """Cache the keys of x [T, hidden] and choose slots for the parts of the step's selection.

        query: the normed query latent, [T, q_lora]. keys: those of x [T, dim], if it is there.
        """
        batch, cache, selection = step.batch, step.index_cache, step.selection
        assert selection is not None and cache is not None
        parts = [p for p in (selection.decode, selection.prefill) if p is not None]
        wanted = any(p.scored for p in parts)
        heads = self.heads if wanted else 0
        q = self.query(query, batch.adapters) if wanted else x.new_empty(x.shape[0], 0)
        if keys is None:
            assert self.keys is not None, "keys were to be handed over"
            keys = self.keys(x, batch.adapters)
        if selection.decode is not None and selection.decode.window is not None:
            batch.index_keys.append(keys.contiguous())  # not a part of what else was projected
        q, scale = self.ops.index_prologue(
            q.view(x.shape[0], heads, self.dim),
            keys,
            self.norm,
            self.norm_bias,
            NORM_EPS,
            batch.positions,
            step.cos_sin,
            self.interleaved,
            cache,
            batch.slots,
        )
        weights = scale
        if wanted:
            weights = self.ops.router_logits(x, self.weights)
            weights = weights * scale if self.coded else weights  # else it is 1
        for part in parts:
            if part.scored:
                part.slots = self._best(part.of(q), part.of(weights), cache, part)
            else:
                part.slots = self._all(part)

    def cache_keys(
        self, keys: Tensor, positions: Tensor, slots: Tensor, cache: Tensor, cos_sin: Tensor
    ) -> None:
        """Cache keys of projections [n, dim] that a step has made, at slots [n]."""
        none = keys.new_empty(keys.shape[0], 0, self.dim)
        self.ops.index_prologue(
            none,
            keys,
            self.norm,
            self.norm_bias,
            NORM_EPS,
            positions,
            cos_sin,
            self.interleaved,
            cache,
            slots,
        )

    def _best(self, q: Tensor, weights: Tensor, cache: Tensor, part: Part) -> Tensor:
        """Score and choose: [count, top_k] int32."""
        if part.window is not None:
            return self._best_of_trees(q, weights, cache, part, part.window)
        return self.ops.index_select(
            q, weights, cache, part.page_table, part.owners, part.lens, self.top_k
        )

    def _best_of_trees(
        self, q: Tensor, weights: Tensor, cache: Tensor, part: Part, window: Window
    ) -> Tensor:
        """The same for rows that do not see all that lies before them: the choice is one of places
        between scores and slots, which no fused kernel makes."""
        assert self.trees is not None, "steps with trees were not planned"
        table, chosen = part.page_table, []
        pages = torch.arange(table.shape[1], dtype=torch.int32, device=table.device)
        numbers, step = (
            pages.repeat(table.shape[0], 1),
            scored_rows(table.shape[1] * self.page_size),
        )
        for first in range(0, q.shape[0], step):
            some = slice(first, first + step)
            owners, scored = part.owners[some], window.lens[some]
            scores = self.trees.index_scores(q[some], weights[some], cache, table, owners, scored)
            window[some].place(scores)
            chosen.append(
                self.trees.index_topk(
                    scores, part.lens[some], owners, numbers, self.page_size, self.top_k
                )
            )
        return self._slots(part, chosen[0] if len(chosen) == 1 else torch.cat(chosen))

    def _all(self, part: Part) -> Tensor:
        """Every token that a row sees: [count, n] int32, n ≤ top_k."""
        table, size = part.page_table, self.page_size
        count = min(self.top_k, table.shape[1] * size)
        tokens = torch.arange(count, dtype=torch.int32, device=table.device)
        unseen = tokens >= part.lens.unsqueeze(1)
        if part.window is not None:
            return self._slots(part, tokens.expand_as(unseen).masked_fill(unseen, -1))
        slots = table[part.owners][:, tokens // size] * size + tokens % size
        return slots.masked_fill(unseen, -1)

    def _slots(self, part: Part, places: Tensor) -> Tensor:
        """Slots of the tokens at the places that rows of trees see, [count, n] int32; −1: none."""
        assert part.window is not None
        size, tokens = self.page_size, part.window.tokens(places.to(torch.int64))
        pages = part.page_table[part.owners.to(torch.int64).unsqueeze(1), tokens // size]
        slots = pages * size + (tokens % size).to(torch.int32)
        return torch.where(places < 0, -1, slots)
