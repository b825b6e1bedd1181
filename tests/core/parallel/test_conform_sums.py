"""What `ds-runtime conform --ranks` takes for a sum: every order of adding, and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime_kit.ranks.checks import FLOATS, sum_wrong, whole_numbers

WIDTH = 6
RANKS = st.integers(2, 8)


@st.composite
def parts(draw):
    """Of some ranks, with sizes far apart, zeros and sums that cancel."""
    value = st.floats(-1e3, 1e3, width=16) | st.sampled_from([0.0, 1.0, -1.0, 256.0, 2.0**-9])
    one = st.lists(value, min_size=WIDTH, max_size=WIDTH)
    dtype = getattr(torch, draw(st.sampled_from(FLOATS)))
    ranks = draw(RANKS)
    return [
        torch.tensor(one).to(dtype) for one in draw(st.lists(one, min_size=ranks, max_size=ranks))
    ]


def added(draw, xs, dtype):
    """Two of what is left at a time, in any order, each addition rounded to `dtype`."""
    left = [x.to(dtype) for x in xs]
    while len(left) > 1:
        a = left.pop(draw(st.integers(0, len(left) - 1)))
        b = left.pop(draw(st.integers(0, len(left) - 1)))
        left.append(a + b)
    return left[0].to(xs[0].dtype)


@given(parts(), st.booleans(), st.data())
def test_sums_in_any_order_conform(xs, wide, data):
    found = added(data.draw, xs, torch.float32 if wide else xs[0].dtype)
    assert sum_wrong(found, xs) == ""


@given(RANKS, st.sampled_from(FLOATS), st.data())
def test_sums_of_whole_numbers_are_exact_in_any_order(ranks, dtype, data):
    xs = whole_numbers(dtype, (3, 16), ranks)
    assert sum_wrong(added(data.draw, xs, xs[0].dtype), xs, exact=True) == ""


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_one_value_that_is_off_by_more_than_its_roundings_is_found(dtype, ranks):
    """Beside others that are a thousand times as large, whose roundings would hide it."""
    xs = [torch.full((2, 4), 1.0).to(getattr(torch, dtype)) for _ in range(ranks)]
    xs[0][1, 1] = 1000.0
    found = torch.stack(xs).double().sum(0)
    # n - 1 additions and the result, at half a unit in the last place of n each.
    unit = ranks * torch.finfo(xs[0].dtype).eps
    assert sum_wrong(found, xs) == ""
    found[0, 2] += unit * ranks / 2 * 1.01
    assert "1 of 8 sums are off: at (0, 2) by" in sum_wrong(found, xs)
    found[0, 2] = float("nan")
    assert "1 of 8 sums are off: at (0, 2) by nan" in sum_wrong(found, xs)


def test_zeros_and_no_rows_are_exact():
    none = [torch.zeros(2, 3)] * 4
    assert sum_wrong(none[0], none) == ""
    assert "6 of 6 sums are off" in sum_wrong(none[0] + 1e-30, none)
    assert sum_wrong(torch.zeros(0, 8), [torch.zeros(0, 8)] * 2) == ""
