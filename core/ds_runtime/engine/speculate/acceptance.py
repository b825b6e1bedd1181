"""Which drafts were right: the model's own draw decides, token by token.

The draw at a position depends on the model's logits there and on (seed, choice, position) alone,
with drafts or without. So a draft is right exactly if it is that draw. Of a tree, the draw at a
node says which of its children is right. For a greedy request this compares with the argmax. For a
sampled one it is rejection sampling. A draft d is kept with the model's probability of d, and is
otherwise replaced by a draw from what is left of the distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_runtime.engine.step.plan import StepPlan, Work
from ds_runtime.engine.step.result import Wanted
from ds_runtime.engine.step.sampler import Nodes
from ds_runtime.engine.step.streams import uniforms
from ds_runtime.engine.step.transfer import Array, Upload
from ds_runtime.model.base import Moves
from ds_runtime.ops.batch import TAIL
from ds_runtime.parallel.exchange import Pick


class Sent(Protocol):
    """Arrays of the host as tensors, by their numbers: an Upload, or places that never move."""

    def __getitem__(self, number: int, /) -> Tensor: ...


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


@dataclass(frozen=True, slots=True)
class Claims:
    """What a step's draws claim, as numbers of arrays in its upload. n works draw.

    firsts: [n] each one's first draw. counts: [n] its drafts. places: [n] where the token after
    what it keeps belongs in last_tokens. pairs: [n, most] a draw per draft, which claims to be the
    token in front of the draw `behind` it; real: [n, most] bool, whether there is a draft; luck:
    likewise, what is right where there is none. inputs: [draws] where that token lies in
    last_tokens. ahead: [draws] how many drafts are in front. simulated: no draft is compared.
    """

    firsts: int
    counts: int
    places: int
    pairs: int
    behind: int
    real: int
    luck: int
    inputs: int
    ahead: int
    most: int
    simulated: bool = False

    @staticmethod
    def numbered(arrays: dict[str, Array], upload: Upload, simulated: bool) -> Claims:
        """Of arrays by these names, once they are added to an upload."""
        numbers = {name: upload.add(array) for name, array in arrays.items()}
        return Claims(**numbers, most=arrays["pairs"].shape[1], simulated=simulated)


def claim(
    plan: StepPlan, wanted: Wanted, width: int, upload: Upload, simulated: float | None = None
) -> Claims:
    """Add what a verification needs to a step's upload. width: tokens per row of last_tokens.
    simulated: the probability with which each draft is to be taken for right.
    """
    works = [plan.works[i] for i, _ in wanted.samplers]
    counts = tuple(count for _, count in wanted.samplers)
    arrays = claimed(works, counts, counts, width, simulated)
    return Claims.numbered(arrays, upload, simulated is not None)


def claimed(
    works: Sequence[Work],
    draws: tuple[int, ...],
    real: tuple[int, ...],
    width: int,
    simulated: float | None,
) -> dict[str, Array]:
    """The arrays of Claims. draws: of each work; real: of these, those that are wanted. Where no
    draft is simulated they are the very same for the same works, and nobody writes to them.
    """
    found = _claimed(draws, real, tuple(w.row for w in works), width)
    if simulated is None:
        return found
    luck = lucky(works, found["pairs"].shape[1], simulated) & found["real"]
    return {**found, "luck": luck, "real": found["luck"]}


def lucky(works: Sequence[Work], most: int, simulated: float) -> npt.NDArray[np.bool_]:
    """Which of `most` drafts of each work are taken for right, each with the probability
    `simulated`, whether it is there or not: [works, most].
    """
    at = np.array([w.start for w in works], np.int64)[:, None] + np.arange(most)
    return uniforms([w.row + 1 for w in works], at) < simulated


@lru_cache(maxsize=256)  # requests that run on claim alike, step by step
def _claimed(
    draws: tuple[int, ...], real: tuple[int, ...], rows: tuple[int, ...], width: int
) -> dict[str, Array]:
    """rows: of last_tokens, of each work."""
    counts, works = np.array(draws, np.int64), np.arange(len(draws))
    firsts, total = np.cumsum(counts) - counts, sum(draws)
    most = max(draws, default=1) - 1
    pairs = np.minimum(firsts[:, None] + np.arange(most), max(0, total - 2))
    owners = np.repeat(works, counts)
    ahead, places = np.arange(total) - firsts[owners], np.array(rows, np.int64) * width
    claims = np.arange(most) < np.array(real, np.int64)[:, None] - 1
    return {
        "firsts": firsts,
        "counts": np.array(real, np.int64) - 1,
        "places": places,
        "pairs": pairs,
        "behind": np.minimum(pairs + 1, max(0, total - 1)),
        "real": claims,
        "luck": np.zeros_like(claims),
        "inputs": places[owners] + ahead,
        "ahead": ahead,
    }


def judge(claims: Claims, tokens: Tensor, inputs: Tensor, sent: Sent) -> Tensor:
    """How many drafts of each work are right: [n] int64. tokens: [draws] as the model drew them;
    inputs: [draws] the token in front of each.
    """
    same = tokens[sent[claims.pairs]] == inputs[sent[claims.behind]]
    right = torch.where(sent[claims.real], same, sent[claims.luck])
    return right.sum(1) if claims.most == 1 else right.cumprod(1).sum(1)


@dataclass(frozen=True, slots=True)
class Fronts:
    """What lies in front of a step's draws: tokens [draws]; in trees the parents [draws] of these
    nodes, too.
    """

    tokens: Tensor
    parents: Tensor | None = None
    nodes: Nodes | None = None


def fronts(claims: Claims, last_tokens: Tensor, trees: Trees | None, sent: Sent) -> Fronts | None:
    """None where nothing is drawn after drafts."""
    if not claims.most:
        return None
    places = sent[claims.inputs]
    tokens = last_tokens[places]
    if trees is None:
        return Fronts(tokens)
    own = torch.arange(places.shape[0], device=places.device)
    peers = own - sent[claims.ahead] + trees.depths[places]
    return Fronts(tokens, trees.parents[places], Nodes(peers, trees.lines[places]))


@dataclass(frozen=True, slots=True)
class Branch:
    """What is kept of each work's drafts. accepted: [n] that were right. draws: [n, 1 + most] the
    draws along the branch, the last again after its end. order: [draws], of trees: the draw that
    comes to lie in the place of each, so that a branch lies in the places of a chain.
    """

    accepted: Tensor
    draws: Tensor
    order: Tensor | None = None


def settle(
    claims: Claims,
    width: int,
    tokens: Tensor,
    front: Fronts | None,
    last_tokens: Tensor,
    sent: Sent,
) -> Branch:
    """As `verify`; the token after what each work keeps is its last one from now on."""
    branch = verify(claims, width, tokens, front, sent)
    last_tokens.index_copy_(0, sent[claims.places], tokens[branch.draws[:, -1]])
    return branch


def verify(claims: Claims, width: int, tokens: Tensor, front: Fronts | None, sent: Sent) -> Branch:
    """What the draws `tokens` [draws] keep. width: most tokens of a branch."""
    first = sent[claims.firsts]
    if front is None:
        return Branch(torch.zeros_like(first), first.unsqueeze(1))
    if front.parents is not None:
        return _follow(claims, width, tokens, front.tokens, front.parents, sent)
    accepted = judge(claims, tokens, front.tokens, sent)
    along = torch.arange(claims.most + 1, device=tokens.device)
    return Branch(accepted, first.unsqueeze(1) + torch.minimum(along, accepted.unsqueeze(1)))


def _follow(
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
