"""The radix select against a stable sort: ties, signs, infinities, chunks, and long rows."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import needs_triton, patched_once

from examples import examples

pytestmark = needs_triton
PAGE = 16


def chosen(scores, lens, k):
    """Per row, the positions that a stable sort puts first: numpy sorts −0 and 0 as equals."""
    rows = scores.numpy()
    orders = [np.argsort(-row[:n], kind="stable")[:k] for row, n in zip(rows, lens, strict=True)]
    return [set(order.tolist()) for order in orders]


@contextmanager
def whole_rows_up_to(alone):
    """Rows of more scores are taken in chunks."""
    from ds_runtime_triton import config, index

    def tuned(arch, op):
        sizes = config.tuned(arch, op)
        return replace(sizes, configs=tuple({**c, "ALONE": alone} for c in sizes.configs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "tuned", tuned)
        yield


def select(scores, lens, k):
    """The positions that the kernels choose; every row is a sequence on pages in reverse order."""
    from ds_runtime_triton.index import index_topk

    rows, width = scores.shape
    pages = -(-width // PAGE)
    table = torch.arange(pages * rows - 1, -1, -1, dtype=torch.int32).view(rows, pages)
    owners = torch.arange(rows, dtype=torch.int32)
    with patched_once():
        slots = index_topk(scores, torch.tensor(lens, dtype=torch.int32), owners, table, PAGE, k)
    found = []
    for row, n in enumerate(lens):
        some = slots[row][: min(n, k)]
        assert (some >= 0).all() and (slots[row][min(n, k) :] == -1).all()
        token = (pages * (rows - row) - 1 - some // PAGE) * PAGE + some % PAGE
        assert len(set(token.tolist())) == len(token)
        found.append(set(token.tolist()))
    return found


@settings(max_examples=examples(8), deadline=None, database=None)
@given(st.data())
def test_it_chooses_what_a_stable_sort_puts_first(data):
    width, k = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 80))
    lens = data.draw(st.lists(st.integers(1, width), min_size=1, max_size=2))
    pool = [0.0, -0.0, 1.0, -1.0, 1.0000001, 3e38, -3e38, 1e-45, -1e-45, float("-inf"), 2.5]
    scores = data.draw(
        st.lists(st.sampled_from(pool), min_size=width * len(lens), max_size=width * len(lens))
    )
    made = torch.tensor(scores).view(len(lens), width)
    for alone in (1, 128, 512):
        with whole_rows_up_to(alone):
            assert select(made, lens, k) == chosen(made, lens, k)


def test_rows_of_many_chunks():
    scores = torch.randn(4, 70001, generator=torch.Generator().manual_seed(4))
    scores[1] = (scores[1] * 4).round().clamp(max=1)  # more equal the largest than are chosen
    lens = [70001, 66000, 4000, 2000]  # the last two in one program each
    assert select(scores, lens, 2048) == chosen(scores, lens, 2048)


def test_a_row_may_be_a_slice_and_have_nan_behind_its_end():
    scores = torch.full((3, 90), float("nan"))
    scores[:, 10:50] = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    lens = [40, 39, 7]
    made = scores[:, 10:80]
    assert select(made, lens, 8) == chosen(made, lens, 8)
