"""Which drafts were right: the model's own draw decides, token by token.

The draw at a position depends on the model's logits there and on (seed, choice, position) alone,
with drafts or without, so a draft is right exactly if it is that draw. For a greedy request this
compares with the argmax; for a sampled one it is rejection sampling: a draft d is kept with the
model's probability of d, and otherwise replaced by a draw from what is left of the distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ds_runtime.engine.handle import Wanted
from ds_runtime.engine.sampler import uniform
from ds_runtime.engine.step import StepPlan
from ds_runtime.engine.transfer import Upload


@dataclass(frozen=True, slots=True)
class Claims:
    """What a step's draws claim, as numbers of arrays in its upload. n works draw.

    firsts: [n] each one's first draw. counts: [n] its drafts. pairs: [n, most] a draw per draft,
    which claims to be the token in front of the draw after it. inputs: [draws] where that token
    lies in last_tokens. owners, ahead: [draws] the work and how many drafts are in front.
    luck: [n, most], instead of comparing: whether each is taken for right; a negative number: none.
    """

    firsts: int
    counts: int
    pairs: int
    inputs: int
    owners: int
    ahead: int
    most: int
    luck: int = -1


def claim(
    plan: StepPlan, wanted: Wanted, width: int, upload: Upload, simulated: float | None = None
) -> Claims:
    """Add what a verification needs to a step's upload. width: tokens per row of last_tokens.
    simulated: the probability with which each draft is to be taken for right.
    """
    counts = np.array([count for _, count in wanted.samplers], np.int64)
    firsts = np.cumsum(counts) - counts
    most = int(counts.max(initial=1)) - 1
    last = max(0, len(wanted.draws) - 2)
    pairs = np.minimum(firsts[:, None] + np.arange(most), last)
    works = [plan.works[i] for i, _ in wanted.samplers]
    inputs = [w.row * width + j for w in works for j in range(w.draws)]
    luck = -1
    if simulated is not None:
        keys = [[uniform(w.row + 1, w.start + j) for j in range(most)] for w in works]
        luck = upload.add((np.array(keys) < simulated).astype(np.int64).reshape(pairs.shape))
    return Claims(
        firsts=upload.add(firsts),
        counts=upload.add(counts - 1),
        pairs=upload.add(pairs),
        inputs=upload.add(np.array(inputs, np.int64)),
        owners=upload.add(np.repeat(np.arange(len(counts)), counts)),
        ahead=upload.add(np.array([d.ahead for d in wanted.draws], np.int64)),
        most=most,
        luck=luck,
    )


def judge(claims: Claims, tokens: Tensor, inputs: Tensor, sent: Upload) -> Tensor:
    """How many drafts of each work are right: [n] int64. tokens: [draws] as the model drew them;
    inputs: [draws] the token in front of each.
    """
    pairs = sent[claims.pairs]
    if claims.luck >= 0:
        right = sent[claims.luck] > 0
    else:
        right = tokens[pairs] == inputs[(pairs + 1).clamp_(max=inputs.shape[0] - 1)]
    behind = torch.arange(claims.most, device=tokens.device)
    right = right & (behind < sent[claims.counts].unsqueeze(1))
    return right.to(torch.int64).cumprod(1).sum(1)
