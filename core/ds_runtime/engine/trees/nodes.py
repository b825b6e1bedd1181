"""The trees that all rows have on the device: what nodes see, and which branch is kept."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_runtime.engine.speculate.acceptance import Branch, Claims, Fronts, Sent
from ds_runtime.engine.step.sampler import Nodes
from ds_runtime.model.base import Moves
from ds_runtime.ops.batch import TAIL
from ds_runtime.parallel.row_order import Pick


class Trees:
    """Of every row, by node: parent, depth, and `line`, whose bit a says that node a is the node
    itself or above it. [rows · width] int64 each.
    """

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.width = width
        # Before anything is drafted: a chain.
        nodes = torch.arange(width, device=device)
        self.depths = nodes.repeat(rows)
        self.parents = (nodes - 1).clamp_(min=0).repeat(rows)
        self.lines = (torch.full_like(nodes, 2) << nodes).sub_(1).repeat(rows)

    def hang(self, places: Tensor, starts: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Positions of nodes, and what they see: [rows] each. places: theirs in here; starts: the
        root's positions; nodes: how many their sequences have, 0 for dummies, which see all.
        """
        real = nodes > 0
        depths = torch.where(real, self.depths[places], 0)
        return starts + depths, torch.where(real, seen_by(self.lines[places], nodes), -1)

    def put(self, rows: Tensor, drafted: Drafted) -> None:
        """Trees after the last tokens of these rows: the nodes but the root."""
        for to, values in (
            (self.depths, drafted.depths),
            (self.parents, drafted.parents),
            (self.lines, drafted.lines),
        ):
            to.view(-1, self.width)[:, 1:].index_copy_(0, rows, values)

    def fronts(self, claims: Claims, places: Tensor, tokens: Tensor, sent: Sent) -> Fronts:
        """places, tokens: [draws] where the token in front of each lies, and the token."""
        own = torch.arange(places.shape[0], device=places.device)
        peers = own - sent[claims.ahead] + self.depths[places]
        return _Fronts(tokens, Nodes(peers, self.lines[places]), parents=self.parents[places])


@dataclass(frozen=True, slots=True)
class _Fronts(Fronts):
    """parents: [draws] of the nodes."""

    parents: Tensor = field(kw_only=True)

    def keep(self, claims: Claims, width: int, tokens: Tensor, sent: Sent) -> Branch:
        return _descend(claims, width, tokens, self.tokens, self.parents, sent)


@dataclass(frozen=True, slots=True)
class Drafted:
    """The drafted nodes of n sequences, [n, width − 1] int64 each."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    lines: Tensor


def seen_by(lines: Tensor, counts: Tensor) -> Tensor:
    """DecodePart.tree of nodes whose sequences end with `counts` of them: [rows] int64."""
    free = TAIL - counts
    return (lines << free) | ((torch.ones_like(free) << free) - 1)


def _descend(
    claims: Claims, width: int, tokens: Tensor, inputs: Tensor, parents: Tensor, sent: Sent
) -> Branch:
    """Go down every work's tree, from the root to the child that is what the model drew, while
    there is one. inputs, parents: [draws] of each draw's node.
    """
    first, counts = sent[claims.firsts], sent[claims.counts].unsqueeze(1)
    nodes = torch.arange(claims.most + 1, device=tokens.device)
    draws = (first.unsqueeze(1) + nodes).clamp_(max=tokens.shape[0] - 1)  # [n, 1 + most]
    held, above = inputs[draws], parents[draws]
    real = (nodes > 0) & (nodes <= counts)
    at = torch.zeros_like(first)
    accepted, alive, path = at, torch.ones_like(at, dtype=torch.bool), [at]
    lucky = sent[claims.luck] if claims.simulated else None
    for step in range(min(width - 1, claims.most)):
        hit = real & (above == at.unsqueeze(1))
        if lucky is None:
            hit = hit & (held == tokens[first + at].unsqueeze(1))
        else:  # the first child, which is the likeliest
            hit = hit & lucky[:, step].unsqueeze(1)
        found, best = (hit * (nodes.shape[0] - nodes)).max(1)
        alive = alive & (found > 0)
        at = torch.where(alive, best, at)
        accepted = accepted + alive
        path.append(at)
    kept = first.unsqueeze(1) + torch.stack(path, 1)
    along = nodes[: kept.shape[1]]
    # Behind a work's last node the root is written to its own place, as it is at the beginning.
    places = first.unsqueeze(1) + torch.where(along <= counts, along, 0)
    values = torch.where(along <= counts, kept, first.unsqueeze(1))
    order = torch.arange(tokens.shape[0], device=tokens.device)
    return Branch(accepted, kept, order.index_copy(0, places.flatten(), values.flatten()))


def moves(branch: Branch, slots: Tensor, rows: Tensor | None = None) -> Moves:
    """What brings each branch into the places of a chain. slots: [draws] of a step, whose decode
    rows are its first draws; or else rows: [draws] the row of each.
    """
    along = torch.arange(1, branch.draws.shape[1], device=slots.device)
    last = slots.shape[0] - 1
    old = branch.draws[:, 1:]
    new = branch.draws[:, :1] + along
    moved = (along <= branch.accepted.unsqueeze(1)) & (old != new)
    old, new = old.clamp(max=last), new.clamp(max=last)
    return Moves(torch.where(moved, slots[old], -1), slots[new], old if rows is None else rows[old])


def came_from(branch: Branch, rows: Tensor, total: int, drawn: Pick) -> Tensor:
    """[total] the row of a step whose token comes to lie in each row's place. rows: [draws] that of
    each draw; drawn: of the draws.
    """
    came = torch.arange(total, device=rows.device)
    if branch.order is None:
        return came
    return came.index_copy_(0, drawn(rows), rows[drawn(branch.order)])
