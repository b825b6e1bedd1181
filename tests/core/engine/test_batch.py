"""Index tensors against a construction token by token."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_runtime.engine.step.inputs import StepInputs, read_last_tokens
from ds_runtime.engine.step.plan import StepPlan, Work
from ds_runtime.engine.step.transfer import Upload
from examples import examples

ROWS = 16
LAST = torch.arange(1000, 1000 + ROWS)


@st.composite
def plans(draw):
    page_size = draw(st.sampled_from([1, 2, 5, 16]))
    decodes, prefills = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    rows = draw(st.permutations(range(ROWS)))
    free = list(draw(st.permutations(range(600))))
    works = []
    for i in range(decodes + prefills or 1):
        is_decode = i < decodes
        start = draw(st.integers(int(is_decode), 40))
        length = 1 if is_decode else draw(st.integers(1, 20))
        count = -(-(start + length) // page_size) + draw(st.integers(0, 2))
        pages, free = free[:count], free[count:]
        ids = (
            None
            if is_decode
            else draw(st.lists(st.integers(0, 99), min_size=length, max_size=length))
        )
        works.append(
            Work(
                rid=str(i),
                row=rows[i],
                start=start,
                length=length,
                pages=pages,
                tokens=ids,
                sample=is_decode or draw(st.booleans()),
                prompt_logprobs=None if is_decode else draw(st.sampled_from([None, 0, 3])),
            )
        )
    return StepPlan(step=0, works=works), page_size, draw(st.sampled_from([1, 7, 64]))


@settings(max_examples=examples(120), deadline=None)
@given(plans(), st.booleans())
def test_batch_equals_the_naive_construction(case, packed):
    plan, page_size, prefix_chunk = case
    sent = Upload(torch.device("cpu"), packed)
    added = StepInputs(page_size, 61, 61 * page_size, LAST, prefix_chunk).add(plan.works, sent)
    sent.send()
    batch = added.batch(sent, {})
    read_last_tokens(batch, LAST, batch.num_decode)
    ids, positions, slots, logit_rows = [], [], [], []
    for work in plan.works:
        wanted = work.logit_rows
        for j in range(work.length):
            p = work.start + j
            ids.append(1000 + work.row if work.tokens is None else work.tokens[j])
            positions.append(p)
            slots.append(work.pages[p // page_size] * page_size + p % page_size)
            if j >= work.length - wanted:
                logit_rows.append(len(ids) - 1)
    assert batch.input_ids.tolist() == ids
    assert batch.positions.tolist() == positions
    assert batch.slots.tolist() == slots
    assert batch.logit_rows.tolist() == logit_rows
    for tensor in (batch.input_ids, batch.positions, batch.slots, batch.logit_rows):
        assert tensor.dtype == torch.int64 and tensor.is_contiguous()
    decodes = [w for w in plan.works if w.tokens is None]
    prefills = plan.works[len(decodes) :]
    check_decode(batch.decode, decodes, page_size)
    check_prefill(batch.prefill, prefills, page_size, prefix_chunk)


def check_table(table, works, page_size):
    assert table.dtype == torch.int32 and table.shape[0] == len(works) and table.is_contiguous()
    for row, work in zip(table.tolist(), works, strict=True):
        needed = -(-(work.start + work.length) // page_size)
        assert row[:needed] == work.pages[:needed]
        assert set(row) <= set(work.pages)


def check_decode(part, works, page_size):
    if not works:
        assert part is None
        return
    check_table(part.page_table, works, page_size)
    assert part.host_kv_lens == tuple(w.start + 1 for w in works)
    assert part.kv_lens.tolist() == list(part.host_kv_lens)
    assert part.kv_lens.dtype == torch.int32


def check_segments(segs, lens):
    assert segs.lens == tuple(lens) and segs.cu.dtype == torch.int32
    assert segs.cu.tolist() == [sum(lens[:i]) for i in range(len(lens) + 1)]


def check_prefill(part, works, page_size, prefix_chunk):
    if not works:
        assert part is None
        return
    check_table(part.page_table, works, page_size)
    check_segments(part.q_segs, [w.length for w in works])
    seen = [[] for _ in works]
    for chunk in part.prefix:
        assert chunk.starts.dtype == torch.int64
        check_segments(chunk.segs, list(chunk.segs.lens))
        assert 0 < chunk.segs.total <= prefix_chunk
        own = slice(chunk.sequence, chunk.sequence + len(chunk.segs.lens))
        assert chunk.segs.lens[0] and chunk.segs.lens[-1]
        assert chunk.row == sum(w.length for w in works[: chunk.sequence])
        check_segments(chunk.q_segs, [w.length for w in works[own]])
        assert torch.equal(chunk.page_table, part.page_table[own])
        whose = zip(seen[own], chunk.starts.tolist(), chunk.segs.lens, strict=True)
        for tokens, start, length in whose:
            tokens += range(start, start + length)
    assert seen == [list(range(w.start)) for w in works]
    total = sum(w.start for w in works)
    assert len(part.prefix) == -(-total // prefix_chunk)
