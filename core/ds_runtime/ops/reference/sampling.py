"""Torch references of sampling and log-probabilities.

Each sampled row is computed as a tensor of its own and in float64, so its result cannot depend
on what else is in the batch: vectorised maths over a whole batch rounds by position.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ds_runtime.ops.reference.cases import Case, Maker, case
from ds_runtime.ops.reference.formats import wide
from ds_runtime.ops.spec import Facts


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


def _settled(args: tuple[Tensor, ...]) -> Tensor:
    """Rows whose token does not hang on the last bits of a threshold or a sum: bool [rows]."""
    logits, temperature, top_k, top_p, min_p, uniform = args
    tokens = sample(*args)
    settled = torch.ones_like(tokens, dtype=torch.bool)
    for sign in (-1e-5, 1e-5):
        nudged = (uniform + sign).clamp(0, 1 - 1e-9)
        settled &= sample(logits, temperature, top_k, top_p, min_p, nudged) == tokens
        share = torch.where(top_p < 1, top_p + sign, top_p)
        settled &= sample(logits, temperature, top_k, share, min_p, uniform) == tokens
        floor = min_p * (1 + sign)
        settled &= sample(logits, temperature, top_k, top_p, floor, uniform) == tokens
    return settled


def _settings(make: Maker, rows: int) -> tuple[Tensor, ...]:
    def pick(*values: float) -> Tensor:
        return torch.tensor(values)[make.integers(0, len(values), rows)]

    temperature, top_k = pick(0, 0.3, 1, 1, 2), pick(0, 0, 1, 2, 5, 40).to(torch.int32)
    return temperature, top_k, pick(1, 1, 0.9, 0.5, 1e-3), pick(0, 0, 0.05, 0.5), make.uniform(rows)


def sample_samples(facts: Facts) -> Iterator[Case]:
    """Every filter alone and together, forbidden tokens, ties, both ends of the draw."""
    f32 = torch.float32
    for rows, vocab in ((0, 50), (1, 1), (64, 7), (64, 50), (48, 1000)):
        make = Maker(facts, label := f"{rows}x{vocab}")
        logits = make.normal(rows, vocab, scale=3, dtype=f32)
        logits[:, 1::3] = float("-inf")
        args = (logits, *_settings(make, rows))
        keep = _settled(args)
        yield case(label, facts, *(t[keep] for t in args))
    tied = torch.tensor([0.0, 1.0, 1.0, -2.0, 1.0, 0.0]).repeat(8, 1)
    rows_of = torch.ones(8)
    draws = torch.tensor([0, 0.1, 0.3, 0.45, 0.6, 0.75, 0.9, 0.999], dtype=torch.float64)
    for label, temperature, top_k in (
        ("ties, greedy", 0, 0),
        ("ties", 1, 0),
        ("ties, top 2", 1, 2),
    ):
        k = torch.full((8,), top_k, dtype=torch.int32)
        yield case(label, facts, tied, rows_of * temperature, k, rows_of, rows_of * 0, draws)


def logprobs_samples(facts: Facts) -> Iterator[Case]:
    """No rows, no alternatives, all of them; ties, forbidden tokens, large logits."""
    f32 = torch.float32
    for rows, vocab, top_n in ((0, 9, 2), (1, 1, 1), (5, 33, 0), (17, 1000, 20), (3, 7, 7)):
        make = Maker(facts, label := f"{rows}x{vocab}, best {top_n}")
        logits = make.normal(rows, vocab, scale=4, dtype=f32)
        yield case(label, facts, logits, make.integers(0, vocab, rows), top_n)
    tied = torch.tensor([[2.0, 5.0, 2.0, 5.0, float("-inf"), 5.0], [0.0] * 6])
    yield case("ties, forbidden", facts, tied, torch.tensor([4, 3]), 5)
    make = Maker(facts, "large")
    logits = make.normal(4, 200, scale=1e4, dtype=f32)
    yield case("large", facts, logits, make.integers(0, 200, 4), 3)
