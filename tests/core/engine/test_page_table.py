"""A captured step's page table goes to the device when it has changed, and only then."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime.engine.step.transfer import PageTable, Upload, padded
from ds_runtime.ops.batch import RowOwners

CPU = torch.device("cpu")
ROWS, PAGES, SPARE = 3, 5, 99

tables = st.integers(1, PAGES).flatmap(
    lambda n: st.lists(
        st.lists(st.integers(0, 3), min_size=n, max_size=n), min_size=ROWS, max_size=ROWS
    )
)


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=5))
def test_a_table_is_filled_up_with_first_pages(lists):
    """Also without sequences, as a group of ranks may have none, and others may write to it."""
    most = max(map(len, lists), default=1)
    lists = [pages or [7] * bool(most) for pages in lists]
    table = padded(lists)
    wanted = [pages + pages[:1] * (most - len(pages)) for pages in lists]
    assert table.tolist() == wanted and table.shape == (len(lists), most)
    assert table.dtype == np.int32 and table.flags.writeable


@given(st.lists(tables, min_size=1, max_size=8))
def test_it_holds_the_last_table(steps):
    table, before = PageTable(ROWS, PAGES, SPARE, CPU), None
    for step in steps:
        wanted, sent = np.array(step, np.int32), Upload(CPU)
        number = table.add(wanted, sent)
        assert (number is None) == (before is not None and np.array_equal(before, wanted))
        sent.send()
        table.take(sent, number)
        assert table.tensor[:, : wanted.shape[1]].tolist() == step
        before = wanted


def test_what_was_never_sent_is_not_held():
    table, wanted = PageTable(ROWS, PAGES, SPARE, CPU), np.ones((ROWS, 2), np.int32)
    assert table.add(wanted, Upload(CPU)) is not None  # and the step failed
    assert table.add(wanted, Upload(CPU)) is not None
    assert (table.tensor == SPARE).all()


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=7), min_size=1, max_size=4))
def test_owners_of_rows(steps):
    owners = RowOwners(CPU)
    for counts in steps:
        owner, behind = owners.of(tuple(counts))
        pairs = [(i, n - 1 - j) for i, n in enumerate(counts) for j in range(n)]
        assert list(zip(owner.tolist(), behind.tolist(), strict=True)) == pairs
        assert owner.dtype == behind.dtype == torch.int32
        again, _ = owners.of(tuple(counts))
        assert again.data_ptr() == owner.data_ptr()
