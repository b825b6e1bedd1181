"""Which drafts were right: the model's own draw decides, token by token.

The draw at a position depends on the model's logits there and on (seed, choice, position) alone,
with drafts or without, so a draft is right exactly if it is that draw. Of a tree, the draw at a
node says which of its children is right. For a greedy request this compares with the argmax; for a
sampled one it is rejection sampling: a draft d is kept with the model's probability of d, and
otherwise replaced by a draw from what is left of the distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_runtime.engine.speculate.tree import Trees
from ds_runtime.engine.step.plan import StepPlan, Work
from ds_runtime.engine.step.result import Wanted
from ds_runtime.engine.step.sampler import Nodes, uniforms
from ds_runtime.engine.step.transfer import Upload
from ds_runtime.model.deepseek import Moves


@dataclass(frozen=True, slots=True)
class Claims:
    """What a step's draws claim, as numbers of arrays in its upload. n works draw.

    firsts: [n] each one's first draw. counts: [n] its drafts. places: [n] where the token behind
    what it keeps belongs in last_tokens. pairs: [n, most] a draw per draft, which claims to be the
    token in front of the draw `behind` it; real: [n, most] 1 for a draft, 0 behind the last of a
    work. inputs: [draws] where that token lies in last_tokens. ahead: [draws] how many drafts are
    in front.
    luck: [n, most], instead of comparing: 1 for each that is taken for right; a negative number:
    none.
    """

    firsts: int
    counts: int
    places: int
    pairs: int
    behind: int
    real: int
    inputs: int
    ahead: int
    most: int
    luck: int = -1


def claim(
    plan: StepPlan, wanted: Wanted, width: int, upload: Upload, simulated: float | None = None
) -> Claims:
    """Add what a verification needs to a step's upload. width: tokens per row of last_tokens.
    simulated: the probability with which each draft is to be taken for right.
    """
    works = [plan.works[i] for i, _ in wanted.samplers]
    counts = tuple(count for _, count in wanted.samplers)
    found = _claimed(counts, tuple(w.row for w in works), width)
    most, luck = found["pairs"].shape[1], -1
    if simulated is not None:
        luck = upload.add(lucky(works, most, simulated) * found["real"])
    return Claims(**{k: upload.add(array) for k, array in found.items()}, most=most, luck=luck)


def lucky(works: Sequence[Work], most: int, simulated: float) -> npt.NDArray[np.bool_]:
    """Which of `most` drafts of each work are taken for right, each with the probability
    `simulated`, whether it stands there or not: [works, most].
    """
    at = np.array([w.start for w in works], np.int64)[:, None] + np.arange(most)
    return uniforms([w.row + 1 for w in works], at) < simulated


@lru_cache(maxsize=16)  # requests that run on claim alike, step by step
def _claimed(
    draws: tuple[int, ...], rows: tuple[int, ...], width: int
) -> dict[str, npt.NDArray[np.int64]]:
    """The arrays of Claims. draws: of each work; rows: of last_tokens, likewise."""
    counts, works = np.array(draws, np.int64), np.arange(len(draws))
    firsts, total = np.cumsum(counts) - counts, sum(draws)
    most = max(draws, default=1) - 1
    pairs = np.minimum(firsts[:, None] + np.arange(most), max(0, total - 2))
    owners = np.repeat(works, counts)
    ahead, places = np.arange(total) - firsts[owners], np.array(rows, np.int64) * width
    return {
        "firsts": firsts,
        "counts": counts - 1,
        "places": places,
        "pairs": pairs,
        "behind": np.minimum(pairs + 1, max(0, total - 1)),
        "real": (np.arange(most) < counts[:, None] - 1).astype(np.int64),
        "inputs": places[owners] + ahead,
        "ahead": ahead,
    }


def judge(claims: Claims, tokens: Tensor, inputs: Tensor, sent: Upload) -> Tensor:
    """How many drafts of each work are right: [n] int64. tokens: [draws] as the model drew them;
    inputs: [draws] the token in front of each.
    """
    if claims.luck >= 0:
        right = sent[claims.luck]
    else:
        same = tokens[sent[claims.pairs]] == inputs[sent[claims.behind]]
        right = torch.where(same, sent[claims.real], 0)
    return right.sum(1) if claims.most == 1 else right.cumprod(1).sum(1)


@dataclass(frozen=True, slots=True)
class Fronts:
    """What lies in front of a step's draws: tokens [draws]; in trees the parents [draws] of these
    nodes, too.
    """

    tokens: Tensor
    parents: Tensor | None = None
    nodes: Nodes | None = None


def fronts(claims: Claims, last_tokens: Tensor, trees: Trees | None, sent: Upload) -> Fronts | None:
    """None where nothing is drawn behind drafts."""
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
    draws along the branch, the last again behind its end. order: [draws], of trees: the draw that
    comes to lie in the place of each, so that a branch lies in the places of a chain.
    """

    accepted: Tensor
    draws: Tensor
    order: Tensor | None = None


def verify(
    claims: Claims, width: int, tokens: Tensor, front: Fronts | None, sent: Upload
) -> Branch:
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
    claims: Claims, width: int, tokens: Tensor, inputs: Tensor, parents: Tensor, sent: Upload
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
    lucky = sent[claims.luck] > 0 if claims.luck >= 0 else None
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
