"""Torch references of sampling and log-probabilities.

Each sampled row is computed as a tensor of its own, so its result cannot depend on what else is
in the batch: vectorised maths over a whole batch rounds by position. Nothing sorts a vocabulary:
a row of DeepSeek's 129,280 tokens would take longer than some models' whole step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ds_runtime.ops.contract import Facts
from ds_runtime.ops.dtypes import wide
from ds_runtime.ops.reference.cases import Case, Maker, case

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
    for rows, vocab in ((0, 50), (1, 1), (64, 7), (64, 50), (48, 1000), (12, 6000)):
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


def mask_logits_samples(facts: Facts) -> Iterator[Case]:
    """No rows, no masks, shared masks, a part of a word; everything forbidden; NaN kept."""
    f32 = torch.float32
    shapes = ((0, 40, 1), (3, 40, 0), (1, 1, 1), (4, 31, 2), (5, 32, 3), (6, 33, 1), (7, 6001, 4))
    for rows, vocab, count in shapes:
        make = Maker(facts, label := f"{rows}x{vocab}, {count} masks")
        logits = make.inside(make.normal(rows, vocab, scale=3, dtype=f32))
        masks = make.integers(-(1 << 31), 1 << 31, count, -(-vocab // 32)).to(torch.int32)
        which = make.integers(-1, count, rows).to(torch.int32)
        yield case(label, facts, logits, masks, which)
    logits = torch.tensor([[1.0, float("nan"), float("-inf"), float("inf"), -0.0]]).repeat(3, 1)
    masks = torch.tensor([[0], [-1], [0b01010]], dtype=torch.int32)
    yield case("special", facts, logits, masks, torch.tensor([2, 0, 1], dtype=torch.int32))


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
