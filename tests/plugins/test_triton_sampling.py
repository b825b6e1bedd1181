"""Draws from blocks of a row: each row's token is the reference's, alone and in company."""

from __future__ import annotations

import pytest
import torch
from interpreter import needs_triton, patched_once

pytestmark = needs_triton
VOCAB = 150  # ten blocks of 16
ROWS = 35  # each kind of logits five times


def settings(rows, seed):
    make = torch.Generator().manual_seed(seed)
    pick = torch.randint(0, 5, (rows,), generator=make)  # 4: nothing narrows the choice
    return (
        torch.where(pick == 0, 0.0, 0.8),
        torch.where(pick == 2, 7, 0).int(),
        torch.where(pick == 3, 0.7, 1.0),
        torch.where(pick == 1, 0.05, 0.0),
        torch.rand(rows, generator=make, dtype=torch.float64),
    )


def rows_of(count, seed):
    logits = 3 * torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[:, 1::5] = float("-inf")
    logits[0::7, 20] = logits[0::7, 100] = 15.0  # ties in two blocks
    logits[3::7] = float("-inf")
    logits[4::7, 149] = float("inf")
    return logits


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(("block", "seed"), [(16, 1), (16, 2), (64, 3), (256, 4)])
def test_rows_in_blocks_give_what_a_row_alone_gives(monkeypatch, block, seed):
    from ds_runtime.ops.reference.sampling import sample as reference
    from ds_runtime_triton import sampling

    monkeypatch.setattr(sampling, "_BLOCK", block)
    logits, given = rows_of(ROWS, seed), settings(ROWS, seed)
    with patched_once():
        alone = torch.cat([sampling.sample(logits[i : i + 1], *(s[i : i + 1] for s in given))
                           for i in range(ROWS)])  # fmt: skip
        together = sampling.sample(logits, *given)
    assert torch.equal(together, alone)
    usual = torch.tensor([i % 7 not in (3, 4) for i in range(ROWS)])
    assert torch.equal(together[usual], reference(logits, *given)[usual])
    greedy = given[0] == 0
    assert torch.equal(together[greedy], logits.argmax(1)[greedy])
    lost = logits[:1].clone()
    lost[0, 77] = float("nan")  # counts as the largest
    assert sampling.sample(lost, *(s[:1] * 0 for s in given)).tolist() == [77]
