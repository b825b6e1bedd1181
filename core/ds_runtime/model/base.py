"""What every model has, whatever its layers: embedding, final norm, head, and what steps ask."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ds_runtime.description import tree
from ds_runtime.description.config import ModelConfig
from ds_runtime.model.layers import LinearLayer, RmsNormLayer
from ds_runtime.ops.batch import Batch, DecodePart
from ds_runtime.ops.contracts.caches import Caches

if TYPE_CHECKING:
    from ds_runtime.weights.loader import Loader


class Moves(NamedTuple):
    """Cached tokens that change places: sources and targets as in CacheMove, and the row of the
    step that computed each. [sequences, n] int64.
    """

    sources: Tensor
    targets: Tensor
    rows: Tensor


class LanguageModel(ABC):
    """One rank's part of the model; `load` reads and packs its weights block by block.

    Those of layers have been made: layers, this many, and tables, the bytes of what they share.
    """

    def __init__(self, config: ModelConfig, load: Loader, layers: int, tables: int) -> None:
        self.config = config
        self.world, self.comm, self.exchange = load.world, load.comm, load.exchange
        base, self.dtype = load.bound.base, load.dtype
        self.scores_all = base.graph_capture or base.batch_invariant  # what a row sees decides else
        self.page_size = load.bound.base.page_size
        node = load.tree
        assert isinstance(node, tree.ModelTree) and node.embedding and node.norm and node.head
        self.embed = load.embedding(node.embedding)
        self.running: Sequence[int] = range(layers)
        self.norm = RmsNormLayer(load.ops(-1, "norm"), load.vector(node.norm), config.eps)
        self.lm_head = load.head(node.head)
        self.draft_head = load.draft_head(node.head) or self.lm_head
        self.lora, self.counts = load.lora, load.counts
        self.packed_bytes = load.held_bytes + tables  # all weights, as they are held
        if load.lora is not None:
            self.packed_bytes += load.lora.nbytes

    @abstractmethod
    def forward(self, batch: Batch, caches: Caches, every: bool = False) -> Tensor:
        """Final hidden states of the step's logit rows: [rows, hidden], the same on every rank.

        They are what `logits` takes. The batch's tokens are written to the caches. every: of all
        tokens of this rank, whose logits are wanted or not.
        """

    @abstractmethod
    def move(self, caches: Caches, batch: Batch, moves: Moves) -> None:
        """Bring the kept nodes of trees to other places in every cache. batch: the step that
        computed them, with all its rows.
        """

    @abstractmethod
    def state_keys(self, part: DecodePart) -> frozenset[str]:
        """Keys of the step states that attention of such rows reads."""

    @contextmanager
    def only(self, layers: Sequence[int]) -> Iterator[None]:
        """Steps run these layers alone, in rising order: what is to compile, and not to answer."""
        before, self.running = self.running, layers
        try:
            yield
        finally:
            self.running = before

    def embedded(self, ids: Tensor, batch: Batch) -> Tensor:
        """Of one token per row of this rank: [T] → [T, hidden]."""
        every = self.exchange.enter(ids, batch.order)
        return self.exchange.leave(self.embed(every), batch.order, ids.shape[0])

    @torch.inference_mode()
    def logits(
        self, hidden: Tensor, out: Tensor | None = None, adapters: Tensor | None = None
    ) -> Tensor:
        """The head: [rows, hidden] → [rows, vocab] float32, the same on every rank.

        Collective: every rank calls it for the same rows. A row's logits take 4 bytes per
        vocabulary entry, this many rows go through in slices. out: [rows, vocab] float32 to write
        to. adapters: those of the rows, as in Batch.
        """
        return self._logits(self.lm_head, hidden, out, adapters)

    @torch.inference_mode()
    def draft_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """`logits` for drafts, which may come of a copy of the head in fewer bits."""
        return self._logits(self.draft_head, hidden, out, None)

    def _logits(
        self, head: LinearLayer, hidden: Tensor, out: Tensor | None, adapters: Tensor | None
    ) -> Tensor:
        if self.comm.size == 1 and head.packed.shape[0] == self.config.vocab_size:
            return head.float32(hidden, adapters, out)
        return self.world.logits(head(hidden, adapters), self.config.vocab_size, out)
