"""Which drafts were right: the model's own draw decides, token by token.

The draw at a position depends on the model's logits there and on (seed, choice, position) alone,
with drafts or without. So a draft is right exactly if it is that draw. Where several drafts follow
one token, the draw after that token says which of them is right. For a greedy request this compares
with the argmax. For a sampled one it is rejection sampling. A draft d is kept with the model's
probability of d, and otherwise replaced by a draw from what is left of the distribution.
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


class Sent(Protocol):
    """Arrays of the host as tensors, by their numbers: an Upload, or places that never move."""

    def __getitem__(self, number: int, /) -> Tensor: ...


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
class Branch:
    """What is kept of each work's drafts. accepted: [n] that were right. draws: [n, 1 + most] the
    draws along the branch, the last again after its end. order: [draws], where drafts branch: the
    draw that comes to lie in the place of each, so that a branch lies in the places of a chain.
    """

    accepted: Tensor
    draws: Tensor
    order: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Fronts:
    """What lies in front of a step's draws: tokens [draws]; where drafts branch, the nodes, too."""

    tokens: Tensor
    nodes: Nodes | None = None

    def keep(self, claims: Claims, width: int, tokens: Tensor, sent: Sent) -> Branch:
        """What the draws `tokens` [draws] keep. width: most tokens of a branch."""
        accepted = judge(claims, tokens, self.tokens, sent)
        along = torch.arange(claims.most + 1, device=tokens.device)
        kept = sent[claims.firsts].unsqueeze(1) + torch.minimum(along, accepted.unsqueeze(1))
        return Branch(accepted, kept)


class Branched(Protocol):
    """Drafts of which several may follow one token, on the device."""

    def hang(self, places: Tensor, starts: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """See `step.inputs.Hanging`."""

    def fronts(self, claims: Claims, places: Tensor, tokens: Tensor, sent: Sent) -> Fronts:
        """places, tokens: [draws] where the token in front of each lies, and the token."""


def fronts(
    claims: Claims, last_tokens: Tensor, branched: Branched | None, sent: Sent
) -> Fronts | None:
    """None where nothing is drawn after drafts. branched: if these are no chains."""
    if not claims.most:
        return None
    places = sent[claims.inputs]
    tokens = last_tokens[places]
    return Fronts(tokens) if branched is None else branched.fronts(claims, places, tokens, sent)


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
    if front is None:
        first = sent[claims.firsts]
        return Branch(torch.zeros_like(first), first.unsqueeze(1))
    return front.keep(claims, width, tokens, sent)
