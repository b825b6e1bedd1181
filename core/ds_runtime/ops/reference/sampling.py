"""Torch references of sampling and log-probabilities.

Each sampled row is computed as a tensor of its own, so its result cannot depend on what else is in
the batch. Vectorised maths over a whole batch rounds by position. Nothing sorts a vocabulary: a row
of DeepSeek's 129,280 tokens would take longer than some models' whole step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime.ops.dtypes import wide

_BINS, _PER_UNIT = 1024, 16  # of a row's falling log-masses; the last bin is open


def best(row: Tensor, count: int) -> Tensor:
    """Ids [count] of the largest of row [vocab], falling, lower id first at ties; no NaN."""
    floor = torch.topk(row, count, sorted=False).values.min()
    above = (row > floor).nonzero().flatten()  # fewer than count
    ties = (row == floor).nonzero().flatten()[: count - above.shape[0]]
    order = torch.sort(row[above], descending=True, stable=True).indices
    return torch.cat((above[order], ties))


def _comparable(logits: Tensor) -> Tensor:
    """Logits whose NaN count as largest, so that every comparison has an answer."""
    return logits.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))


def _nucleus(row: Tensor, falling: Tensor, mass: Tensor, top_p: float) -> Tensor:
    """`mass` [vocab], zero outside the nucleus. `falling`: log-masses below the largest, ≥ 0.

    Sums of bins say in which bin the nucleus ends; only that bin is sorted.
    """
    bins = (falling * _PER_UNIT).clamp_(max=_BINS - 1).to(torch.int64)
    sums = mass.new_zeros(_BINS).scatter_add_(0, bins, mass).cumsum(0)
    goal = top_p * sums[-1]
    cut = torch.searchsorted(sums, goal).clamp_(max=_BINS - 1)  # the first bin that reaches it
    inside = (bins == cut).nonzero().flatten()
    inside = inside[torch.sort(row[inside], descending=True, stable=True).indices]
    before = torch.where(cut > 0, sums[cut - 1], 0.0)
    keep = torch.searchsorted(before + mass[inside].cumsum(0), goal) + 1
    mass = torch.where(bins <= cut, mass, 0.0)
    mass[inside[keep:]] = 0.0
    return mass


def _sample_row(
    row: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> Tensor:
    """One row [vocab] with a temperature above 0: the token, 0-dim int64. Sums are in float64."""
    shifted = (row - row.max()) / temperature
    shifted = shifted.nan_to_num_(nan=0.0, neginf=float("-inf"))
    mass = torch.exp(shifted).to(torch.float64)  # 1 at the largest
    ids = None
    if 0 < top_k < row.shape[0]:
        ids = best(_comparable(row), top_k)
        if top_p < 1:
            sums = mass[ids].cumsum(0)
            ids = ids[: int(torch.searchsorted(sums, top_p * sums[-1])) + 1]
        ids = ids.sort().values
        mass = mass[ids]
    elif top_p < 1:
        mass = _nucleus(_comparable(row), -shifted, mass, top_p)
    if min_p > 0:
        mass = torch.where(mass >= min_p, mass, 0.0)
    sums = torch.cumsum(mass, 0)
    # Rounded up to the total, a draw would walk past the last token.
    below = torch.nextafter(sums[-1], torch.zeros_like(sums[-1]))
    place = torch.searchsorted(sums, torch.minimum(uniform * sums[-1], below), right=True)
    return place if ids is None else ids[place]


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
    settings = zip(*(t.tolist() for t in (temperature, top_k, top_p, min_p, uniform)), strict=True)
    for r, setting in enumerate(settings):
        if setting[0] > 0:
            tokens[r] = _sample_row(logits[r].contiguous(), *setting)
    return tokens


def logprobs(logits: Tensor, ids: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of Logprobs."""
    values = torch.log_softmax(logits.to(wide(logits.dtype)), dim=-1)
    chosen = values.gather(1, ids.unsqueeze(1)).squeeze(1)
    if top_n == 0:
        empty = values.new_zeros(values.shape[0], 0)
        return chosen, empty, empty.to(torch.int64)
    # By raw logits: distinct ones may round to one log-probability.
    top_ids = torch.empty(ids.shape[0], top_n, dtype=torch.int64, device=logits.device)
    for r, row in enumerate(_comparable(logits)):
        top_ids[r] = best(row, top_n)
    return chosen, values.gather(1, top_ids), top_ids


def mask_logits(logits: Tensor, masks: Tensor, which: Tensor) -> Tensor:
    """Reference of MaskLogits."""
    if not masks.shape[0]:
        return logits.clone(memory_format=torch.contiguous_format)
    # On bits, and a byte of mask at a time: shifts and `where` take milliseconds per row on a CPU.
    ints = torch.int32 if logits.dtype == torch.float32 else torch.int64
    byte = torch.arange(256, dtype=ints, device=masks.device).unsqueeze(1)
    spread = -(byte >> torch.arange(8, device=masks.device) & 1).to(ints)  # [256, 8] of 0 and −1
    octets = masks.contiguous().view(torch.uint8).flatten().to(torch.int32)
    keep = spread.index_select(0, octets).view(masks.shape[0], -1)[:, : logits.shape[1]]
    keep = keep.index_select(0, which.clamp(min=0)) | -(which < 0).to(ints).unsqueeze(1)
    forbidden = torch.full((1,), float("-inf"), dtype=logits.dtype, device=masks.device).view(ints)
    return (logits.view(ints) & keep).bitwise_or_(~keep & forbidden).view(logits.dtype)
