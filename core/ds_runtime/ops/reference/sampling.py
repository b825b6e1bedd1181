"""Torch references of sampling and log-probabilities.

Each sampled row is computed as a tensor of its own and in float64, so its result cannot depend
on what else is in the batch: vectorised maths over a whole batch rounds by position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime.ops.reference.formats import wide


def _sample_row(
    row: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    """One row [vocab] with a temperature above 0, all else 0-dim: the token, 0-dim int64."""
    values = row.to(torch.float64)
    shifted = (values - values.max()) / temperature.to(torch.float64)
    shifted = shifted.nan_to_num(nan=0.0, neginf=float("-inf"))
    ordered, ids = torch.sort(shifted, descending=True, stable=True)
    mass = torch.exp(ordered)  # falling, 1 at the front
    rank = torch.arange(mass.shape[0], device=mass.device)
    mass = torch.where((top_k <= 0) | (rank < top_k), mass, 0.0)
    cumulative = torch.cumsum(mass, 0)
    reached = cumulative - mass >= top_p * cumulative[-1]  # the larger ones suffice already
    mass = torch.where((rank > 0) & reached, 0.0, mass)
    mass = torch.where(mass >= min_p * mass[0], mass, 0.0)
    cumulative = torch.cumsum(mass, 0)
    place = torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)
    return ids[torch.minimum(place, (mass > 0).sum() - 1)]


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    """Reference of Sample."""
    tokens = logits.argmax(-1)
    for r in (temperature > 0).nonzero().flatten().tolist():
        row = (t[r].contiguous() for t in (logits, temperature, top_k, top_p, min_p, uniform))
        tokens[r] = _sample_row(*row)
    return tokens


def logprobs(logits: Tensor, ids: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of Logprobs."""
    values = torch.log_softmax(logits.to(wide(logits.dtype)), dim=-1)
    chosen = values.gather(1, ids.unsqueeze(1)).squeeze(1)
    if top_n == 0:
        empty = values.new_zeros(values.shape[0], 0)
        return chosen, empty, empty.to(torch.int64)
    # Sorting raw logits: distinct logits may round to one log-probability.
    top_ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :top_n]
    return chosen, values.gather(1, top_ids), top_ids
