"""Rows that ranks exchange, in threads, against what one rank computes of all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_runtime.engine.step.plan import Work
from ds_runtime.engine.step.transfer import Upload
from ds_runtime.ops.batch import Batch
from ds_runtime.parallel.exchange import exchange_of
from ds_runtime.parallel.mesh import Mesh
from ds_runtime.parallel.world import World
from examples import examples
from thread_members import in_threads

CPU = torch.device("cpu")
SHAPES = [(1, 1), (3, 1), (2, 2), (4, 2), (4, 4), (6, 3)]


def everywhere(tp, dp, function):
    """function(exchange, group, rank) on every rank of a mesh, in threads."""
    mesh = Mesh(tp=tp, attn_dp=dp)

    def run(member):
        exchange = exchange_of(World(mesh, member))
        return function(exchange, mesh.at(member.rank, "attn_dp"), member.rank)

    return in_threads(tp, run)


@st.composite
def steps(draw):
    tp, dp = draw(st.sampled_from(SHAPES))
    works = []
    for row in range(draw(st.integers(0, 6))):
        length = draw(st.integers(1, 5))
        decodes = draw(st.booleans())
        works.append(
            Work(
                rid="",
                row=row,
                group=draw(st.integers(0, dp - 1)),
                start=0,
                length=length,
                pages=[],
                tokens=None if decodes else [0] * length,
                sample=draw(st.booleans()),
                prompt_logprobs=None if decodes else draw(st.sampled_from([None, 1])),
                adapter=draw(st.integers(-1, 1)),
            )
        )
    return tp, dp, works


def values_of(works):
    """A number of its own for every row: [rows] per work."""
    return [100.0 * i + torch.arange(w.length, dtype=torch.float64) for i, w in enumerate(works)]


def joined(some):
    return torch.cat([*some, torch.zeros(0, dtype=torch.float64)]).unsqueeze(1)


def logit_rows(works):
    """Per work its last rows."""
    return [slice(w.length - w.logit_rows, w.length) for w in works]


def batch_of(own, order):
    ids = torch.zeros(sum(w.length for w in own), dtype=torch.int64)
    rows, total = [], 0
    for work, some in zip(own, logit_rows(own), strict=True):
        rows += range(total + some.start, total + some.stop)
        total += work.length
    adapters = [w.adapter for w in own for _ in range(w.length)]
    found = torch.tensor(adapters, dtype=torch.int32) if max(adapters, default=-1) >= 0 else None
    batch = Batch(ids, ids, ids, torch.tensor(rows, dtype=torch.int64), adapters=found)
    batch.order = order
    return batch


@given(steps(), st.integers(1, 9))
@settings(max_examples=examples(60), deadline=None)
def test_a_steps_rows_enter_leave_and_are_collected(step, wide):
    """Each rank multiplies by a weight of its own; the sum is that of all weights together."""
    tp, dp, works = step
    rows = values_of(works)
    by_group = [
        joined(v for v, w in zip(rows, works, strict=True) if w.group == g) for g in range(dp)
    ]
    wanted = joined(v[some] for v, some in zip(rows, logit_rows(works), strict=True))
    adapters = [w.adapter for w in works for _ in range(w.logit_rows)]

    def run(exchange, group, rank):
        upload = Upload(CPU)
        pending = exchange.order(works, upload)
        upload.send()
        own, x = exchange.own(works), by_group[group]
        batch = batch_of(own, pending())
        assert (exchange.group, exchange.groups) == (group, dp)
        assert [works[i] for i in exchange.numbers(works)] == list(own)
        assert list(own) == [w for w in works if w.group == group]
        assert exchange.most(len(x), batch.order) == max(map(len, by_group))
        every = exchange.enter(x, batch.order)
        assert torch.equal(every, torch.cat(by_group))
        shares = (
            x.to(torch.bfloat16).repeat(1, wide),
            x.to(torch.float32).repeat(1, 3) / 7,
            x.to(torch.int32).repeat(1, 2) - 1,
            x.to(torch.int32).to(torch.uint8).repeat(1, wide),
        )
        entered = exchange.enter_together(shares, batch.order)
        assert exchange.entered(len(x), batch.order) == len(every)
        all_ = torch.cat(by_group)
        wants = all_, all_ / 7, all_ - 1, all_.to(torch.int32)
        for got, want, share in zip(entered, wants, shares, strict=True):
            assert got.dtype == share.dtype and got.stride(1) == 1
            assert torch.equal(got, want.to(got.dtype).repeat(1, share.shape[1]))
        assert entered[0].stride(0) * entered[0].itemsize % 16 == 0 or dp == 1
        inside = sum(r + 1 for r in range(tp) if r // (tp // dp) == rank // (tp // dp))
        both = exchange.leave(every * (rank + 1), batch.order, len(x), x * (rank + 1))
        assert torch.equal(both, x * (sum(range(tp + 1)) + inside))
        out = exchange.leave(every * (rank + 1), batch.order, len(x))
        assert torch.equal(out, x * sum(range(tp + 1)))
        found = exchange.adapters(batch)
        if any(w.adapter >= 0 for w in works):
            entered = [
                w.adapter for g in range(dp) for w in works if w.group == g for _ in range(w.length)
            ]
            assert found.tolist() == entered
            assert exchange.logit_adapters(batch).tolist() == adapters
            assert exchange.adapters(exchange.plain(batch)) is None
        else:
            assert found is None and exchange.logit_adapters(batch) is None
        hidden = exchange.collect(out[batch.logit_rows], batch.order)
        assert torch.equal(hidden, wanted * sum(range(tp + 1)))
        tail = exchange.logits_alone(batch.order)
        if not exchange.most(len(batch.logit_rows), tail):
            assert not len(wanted)
            return
        some = x[batch.logit_rows]
        entered = exchange.enter(some, tail)
        assert sorted(entered.flatten().tolist()) == sorted(wanted.flatten().tolist())
        assert torch.equal(
            exchange.leave(entered * (rank + 1), tail, len(some)), out[batch.logit_rows]
        )
        assert torch.equal(exchange.collect(some, tail), wanted)

    everywhere(tp, dp, run)


@given(steps(), st.integers(1, 3), st.integers(0, 2))
@settings(max_examples=examples(40), deadline=None)
def test_what_is_a_groups_own_of_a_captured_step(step, queries, spare):
    tp, dp, works = step
    size = max([1, *(sum(w.group == g for w in works) for g in range(dp))]) + spare
    rows = torch.arange(dp * size * queries)

    def run(exchange, group, _):
        upload = Upload(CPU)
        places = exchange.sequences(works, size)
        pending = exchange.captured(works, size, queries, True, upload)
        one = exchange.each(works, 1, upload)
        numbers = exchange.numbers(works)
        pick = exchange.pick(numbers, upload)
        draws, own = exchange.picks(works, [w.length for w in works], upload)
        upload.send()
        assert exchange.largest(works) == max(sum(w.group == g for w in works) for g in range(dp))
        assert len(set(places)) == len(works)
        assert [places[i] // size for i in numbers] == [group if dp > 1 else 0] * len(numbers)
        section = exchange.section(size * queries)
        mine = section(rows)
        assert mine.tolist() == list(range(group * size * queries, (group + 1) * size * queries))
        assert section.local(mine).tolist() == list(range(size * queries))
        inside = section.local(rows)
        assert int(inside.min()) >= 0 and int(inside.max()) < size * queries
        every = torch.arange(len(works))
        assert pick(every).tolist() == own(every).tolist() == numbers
        owners = [i for i, w in enumerate(works) for _ in range(w.length)]
        drawn = torch.arange(len(owners))
        assert [owners[i] for i in draws(drawn)] == [i for i in owners if i in numbers]
        back = draws.back(draws(drawn) + 1, len(owners)).tolist()
        assert back == [n + 1 if works[i].group == group else 0 for n, i in enumerate(owners)]
        order = pending()
        x = torch.full((size * queries, 1), float(group))
        entered = exchange.enter(x, order)
        assert entered.flatten().tolist() == [g for g in range(dp) for _ in range(size * queries)]
        if dp > 1:
            adapters = np.full((dp * size, queries), -1)
            adapters[places] = np.array([[w.adapter] for w in works]).reshape(-1, 1)
            assert order.adapters.tolist() == adapters.flatten().tolist()
        number = torch.tensor([float(i) for i in numbers]).unsqueeze(1)
        assert exchange.collect(number, one()).flatten().tolist() == list(range(len(works)))

    everywhere(tp, dp, run)


@given(steps(), st.integers(0, 3))
@settings(max_examples=examples(40), deadline=None)
def test_a_captured_prompt_finds_the_adapters_of_all_groups(step, spare):
    tp, dp, works = step
    size = max([1, *(sum(w.length for w in works if w.group == g) for g in range(dp))]) + spare

    def run(exchange, group, _):
        upload = Upload(CPU)
        pending = exchange.order(works, upload)
        upload.send()
        room = exchange.room(torch.full((size,), -1, dtype=torch.int32))
        assert (room is None) == (dp == 1)
        if room is not None:
            room.fill_(7)
            exchange.fill(room, batch_of(exchange.own(works), pending()))
            for g, held in enumerate(room.view(dp, size).tolist()):
                own = [w.adapter for w in works if w.group == g for _ in range(w.length)]
                assert held == own + [-1] * (size - len(own))
            assert exchange.even(size, room).adapters is room
        assert exchange.sizes_of_steps((4, 8)) == ((4, 8) if dp == 1 else ())

    everywhere(tp, dp, run)


def test_ranks_of_a_group_have_the_same_bits():
    """Their rows are sampled from by each of them."""
    torch.manual_seed(0)
    partial, works = (
        torch.randn(4, 6, 5),
        [Work(rid="", row=i, group=i // 3, start=0, length=1, pages=[]) for i in range(6)],
    )

    def run(exchange, group, rank):
        upload = Upload(CPU)
        pending = exchange.order(works, upload)
        upload.send()
        return exchange.leave(partial[rank].clone(), pending(), 3)

    a, b, c, d = everywhere(4, 2, run)
    assert torch.equal(a, b) and torch.equal(c, d)
    assert torch.cat((a, c)) == pytest.approx(partial.sum(0), abs=1e-5)
