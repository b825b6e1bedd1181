"""Batch invariance: a row gives the same bits alone, at another place, and among others.

Cases are taken apart into calls of some of their rows (of some sequences, for attention), which
run next to the whole one; nothing is compared with an oracle here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_runtime.ops.batch import Batch, DecodePart, Segments
from ds_runtime.ops.contract import Kernel, Offers
from ds_runtime.ops.declare import Op
from ds_runtime.ops.reference.cases import Call, Case, segments
from ds_runtime_kit.checks.conformance import run_case
from ds_runtime_kit.checks.effects import same_bits


def can_be_taken_apart(op: Op) -> bool:
    """Whether its contract says which arguments have rows, or sequences."""
    return bool(op.rows) or op.by_sequence


class _Part(NamedTuple):
    """A call of some rows: which rows of the results of which whole call it must give."""

    call: Call
    whole: int
    rows: Tensor


def is_invariant(kernel: Kernel, case: Case, offers: Offers | None = None) -> str | None:
    """ "" if every row gives its bits alone too, else a sentence; None if the case has one row."""
    apart: list[_Part | Call] = list(_apart(kernel.op, case))
    parts = [p for p in apart if isinstance(p, _Part)]
    if not parts:
        return None
    calls = tuple(p.call if isinstance(p, _Part) else p for p in apart)
    whole = run_case(kernel, case, offers)
    ran = run_case(kernel, replace(case, calls=calls), offers)
    for part, alone in zip(apart, ran, strict=True):
        if not isinstance(part, _Part) or alone.left_out or whole[part.whole].left_out:
            continue
        for i, (got, all_rows) in enumerate(
            zip(alone.results, whole[part.whole].results, strict=True)
        ):
            if (defined := kernel.op.defined) is not None:
                got = defined(part.call.args, got.cpu())
                all_rows = defined(case.calls[part.whole].args, all_rows.cpu())
            if not same_bits(got, all_rows[part.rows.to(all_rows.device)]):
                rows = part.rows.tolist()
                return f"result {i}: rows {rows} alone differ from the same rows among others"
    return ""


def _apart(op: Op, case: Case) -> Iterator[_Part | Call]:
    batch: Batch | None = None
    state: Any = None
    for index, call in enumerate(case.calls):
        if call.method == "prepare":
            state, batch = call.args
        elif call.save:
            yield call
        elif call.raises is not None:
            continue
        elif call.method == "run" and batch is not None and batch.decode is not None:
            yield from _sequences_alone(call, index, state, batch, batch.decode)
        elif op.by_sequence and not call.method:
            yield from _segments_alone(call, index)
        else:
            if op.among < 0 or call.args[op.among] is None:
                yield from _rows_alone(op.rows.get(call.method, ()), call, index)


def _rows_alone(places: tuple[int, ...], call: Call, index: int) -> Iterator[_Part]:
    if not places:
        return
    count = call.args[places[0]].shape[0]
    for rows in _selections(count):
        args = tuple(
            a[rows] if i in places and a is not None else a for i, a in enumerate(call.args)
        )
        yield _Part(replace(call, args=args), index, rows)


def _selections(count: int) -> Iterator[Tensor]:
    if count > 1:
        every = torch.arange(count)
        yield every[:1]
        yield every[-1:]
        yield every.flip(0)[: count - 1]


def _segments_alone(call: Call, index: int) -> Iterator[_Part]:
    q, q_rope, k, k_rope, v, q_segs, *rest = call.args
    alike = not isinstance(rest[0], Segments)  # keys are those of the queries' tokens
    k_segs = q_segs if alike else rest.pop(0)
    if len(q_segs.lens) < 2:
        return
    for i, (queries, keys) in enumerate(zip(_spans(q_segs), _spans(k_segs), strict=True)):
        own = [segments(segs.lens[i]) for segs in ((q_segs,) if alike else (q_segs, k_segs))]
        parts = (q[queries], q_rope[queries], k[keys], k_rope[keys], v[keys])
        args = (*parts, *own, *rest)
        yield _Part(replace(call, args=args), index, queries)


def _spans(segs: Segments) -> list[Tensor]:
    ends = list(accumulate(segs.lens))
    return [torch.arange(end - n, end) for n, end in zip(segs.lens, ends, strict=True)]


def _sequences_alone(
    call: Call, index: int, state: Any, batch: Batch, part: DecodePart
) -> Iterator[_Part | Call]:
    if part.size < 2:
        return
    counts = part.q_lens or (1,) * part.size
    for i, rows in enumerate(_spans(Segments(counts, part.kv_lens))):
        one = slice(i, i + 1)
        decode = DecodePart(
            part.page_table[one],
            part.kv_lens[one],
            part.host_kv_lens[one],
            part.q_lens[one],
            None if part.tree is None else part.tree[rows],
        )
        step = replace(
            batch,
            input_ids=batch.input_ids[rows],
            positions=batch.positions[rows],
            slots=batch.slots[rows],
            logit_rows=torch.arange(len(rows)),
            decode=decode,
        )
        yield Call((state, step), "prepare", save="none")
        args = tuple(a[rows] if isinstance(a, Tensor) else a for a in call.args)  # queries
        yield _Part(replace(call, args=args), index, rows)
