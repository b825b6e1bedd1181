"""How trees of drafts grow (EAGLE-2).

Node 0 is the last token itself, a node comes after its parent, and `width` nodes are one forward's
share of a sequence. Source: EAGLE-2, arXiv 2406.16858. A node's score is the draft layer's
probability of its whole path. Of each level the `topk` best get `topk` children each. Of all nodes
the best are verified. They form a tree, because no child is better than its parent.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ds_runtime.common.speculation import Speculation
from ds_runtime.engine.trees.nodes import Drafted, seen_by
from ds_runtime.parallel.row_order import Pick


@dataclass(slots=True)
class Growth:
    """A tree of n sequences while it is drafted.

    scores: [n, topk] of the frontier, the nodes that the draft layer runs for next; lines: which
    of the draft layer's rows so far each of them sees; chosen: each one's parent in the frontier
    before, [n, topk].
    """

    shape: Speculation
    scores: Tensor
    frontier: Tensor  # [n, topk] numbers among all candidates
    tokens: list[Tensor] = field(default_factory=list)  # of candidates, per level [n, k or k · k]
    all_scores: list[Tensor] = field(default_factory=list)
    parents: list[Tensor] = field(default_factory=list)  # candidates; −1: the root
    lines: Tensor | None = None
    chosen: Tensor | None = None
    count: int = 0

    @staticmethod
    def begin(shape: Speculation, scores: Tensor, tokens: Tensor) -> Growth:
        """With the root's continuations: log-probabilities and ids, [n, topk]."""
        found = Growth(shape, scores, torch.zeros_like(tokens))
        found._add(scores, tokens, torch.full_like(tokens, -1))
        found.frontier = torch.arange(shape.topk, device=tokens.device).expand_as(tokens)
        return found

    def copy(self) -> Growth:
        """One that grows on by itself."""
        return replace(
            self,
            tokens=self.tokens.copy(),
            all_scores=self.all_scores.copy(),
            parents=self.parents.copy(),
        )

    def _add(self, scores: Tensor, tokens: Tensor, parents: Tensor) -> None:
        self.all_scores.append(scores.nan_to_num(nan=-1e30, neginf=-1e30))
        self.tokens.append(tokens)
        self.parents.append(parents)
        self.count += tokens.shape[1]

    def next_lines(self, level: int) -> Tensor:
        """What the frontier sees of the draft layer's rows, [n, topk], `level` ≥ 1 levels of
        them.
        """
        topk = self.shape.topk
        own = torch.ones(topk, dtype=torch.int64, device=self.scores.device)
        own = own << torch.arange((level - 1) * topk, level * topk, device=own.device)
        if self.chosen is None or self.lines is None:
            self.lines = own.expand_as(self.frontier)
        else:
            self.lines = self.lines.gather(1, self.chosen) | own
        return self.lines

    def seen(self, level: int) -> Tensor:
        """DecodePart.tree of the draft layer's rows of a level, [n · topk]."""
        lines = self.next_lines(level)
        return seen_by(lines, torch.full_like(lines, level * self.shape.topk)).flatten()

    def grow(self, scores: Tensor, tokens: Tensor, hidden: Tensor, own: Pick) -> Tensor:
        """Add the frontier's continuations, [n · topk, topk], and move on to the best of them.
        hidden: [own sequences · topk, width] of the frontier; that of each new one's parent is
        returned.
        """
        topk, first = self.shape.topk, self.count
        total = (self.scores.unsqueeze(2) + scores.reshape(-1, topk, topk)).flatten(1)
        parents = self.frontier.repeat_interleave(topk, dim=1)
        self._add(total, tokens.reshape(-1, topk * topk), parents)
        self.scores, best = self.all_scores[-1].topk(topk, dim=1)
        self.frontier, self.chosen = best + first, best // topk
        begins = torch.arange(0, hidden.shape[0], topk, device=hidden.device)
        return hidden[(begins.unsqueeze(1) + own(self.chosen)).flatten()]

    def frontier_tokens(self) -> Tensor:
        """[n, topk] ids."""
        return torch.cat(self.tokens, 1).gather(1, self.frontier)

    def best(self) -> Drafted:
        """The nodes to verify."""
        shape, device = self.shape, self.scores.device
        scores, parents = torch.cat(self.all_scores, 1), torch.cat(self.parents, 1)
        levels = torch.cat(
            [
                torch.full((tokens.shape[1],), level, dtype=torch.int64, device=device)
                for level, tokens in enumerate(self.tokens, 1)
            ]
        )
        # At equal scores the earlier, so that no child is taken without its parent.
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, : shape.drafts]
        taken = order.sort(dim=1).values  # [n, drafts] candidates, parents first
        numbers = torch.zeros_like(parents).scatter_(
            1, taken, torch.arange(1, shape.tokens, device=device).expand_as(taken)
        )
        above = parents.gather(1, taken)
        above = torch.where(above < 0, 0, numbers.gather(1, above.clamp(min=0)))
        own = torch.ones_like(taken[0]) << torch.arange(1, shape.tokens, device=device)
        lines = own | 1
        root = torch.ones_like(taken[:, :1])
        lines = lines.expand_as(taken)
        for _ in range(shape.steps - 1):  # a node's line is its parent's and itself
            lines = torch.cat((root, lines), 1).gather(1, above) | own
        tokens = torch.cat(self.tokens, 1).gather(1, taken)
        return Drafted(tokens, above, levels[taken], lines)
