"""Bytes of rows on their way between ranks: what is reserved for them is what they take."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.crossing import Crossing
from ds_runtime.assembly.room import reserve
from ds_runtime.common.balance import most_beside, most_of
from ds_runtime.config import EngineConfig
from ds_runtime.config.graph_sizes import graph_sizes, prefill_graph_sizes, verifying_sizes
from ds_runtime.engine.step.transfer import Upload
from ds_runtime.parallel.exchange import GatherScatter, Sum
from ds_runtime.parallel.group import SoloCommunicator
from ds_runtime.parallel.mesh import Mesh
from ds_runtime.parallel.sums.in_order import InOrder
from ds_runtime.parallel.sums.sizes import MANY
from peak import peak

HIDDEN, VOCAB = 512, 4096


class Echo(SoloCommunicator):
    """This rank's part of `size` alike; takes as much memory as a real one."""

    def __init__(self, size):
        self.size = size

    def all_gather(self, x):
        return torch.cat([torch.empty_like(x).copy_(x) for _ in range(self.size)], -1)

    def gather_rows(self, x):
        return x.new_empty(self.size * x.shape[0], *x.shape[1:]).copy_(
            x.repeat(1, 1).expand(self.size, *x.shape).reshape(-1, *x.shape[1:])
            if x.dtype == torch.int64
            else 0
        )

    def all_to_all(self, x):
        return torch.empty_like(x).copy_(x)

    def reduce_scatter(self, x):
        return x.new_empty(x.shape[0] // self.size, *x.shape[1:]).copy_(x[: len(x) // self.size])


def works(*lengths):
    """A work for each group, of so many tokens."""
    made = enumerate(lengths)
    return [SimpleNamespace(group=g, length=n, logit_rows=1, adapter=-1) for g, n in made if n]


def summing(size, in_order):
    return InOrder(Echo(size)) if in_order and size > 1 else Echo(size)


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("groups", [2, 4, 8])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("spread", ["one has all", "even"])
def test_what_an_exchange_holds_is_what_is_reserved(groups, heads, spread, in_order):
    mesh, rows = Mesh(groups * heads, groups), 512
    lengths = [rows, *[0] * (groups - 1)] if spread == "one has all" else [rows // groups] * groups
    exchange = GatherScatter(summing(groups, in_order), summing(heads, in_order))
    sent = Upload(torch.device("cpu"))
    exchange.group = 0
    order = exchange.order(works(*lengths), sent)
    sent.send()
    order, x = order(), torch.zeros(lengths[0], HIDDEN)

    def run():
        every = exchange.enter(x, order)
        y = every + 1
        del every
        exchange.leave(y, order, len(x))

    width = HIDDEN * 4
    crossing = Crossing(mesh, width, VOCAB * 4, in_order=in_order)
    most = crossing.held(max(lengths)) + rows * width  # and what the layer makes
    assert peak(run) <= most * 1.01 + (1 << 16)
    if spread == "one has all":
        assert peak(run) >= 0.7 * most


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 300, 512, 2000, 2001])
@pytest.mark.parametrize("ranks", [3, 4])
def test_one_group_holds_what_comes_out(in_order, dtype, rows, ranks):
    item, sums = dtype.itemsize, Sum(summing(ranks, in_order))
    held = Crossing(Mesh(ranks), HIDDEN * item, 0, item, in_order).held(rows)
    few = min(rows, MANY // HIDDEN - 1)  # may take more, in order, than a larger step
    every = [torch.zeros(n, HIDDEN, dtype=dtype) for n in (rows, few)]
    took = max(peak(lambda x=x: sums.leave(x.clone(), None, len(x))) for x in every)
    assert took <= held + (1 << 13)
    assert not in_order or took >= 0.9 * held
    assert Crossing(Mesh(), HIDDEN * 4, 0).held(512) == 0


@pytest.mark.parametrize("ranks", [2, 8])
def test_logits_of_all_ranks_are_held_twice_while_they_meet(ranks):
    rows, whole = 64, VOCAB * 4
    local = torch.zeros(rows, VOCAB // ranks)
    found = peak(lambda: Echo(ranks).all_gather(local))
    said = Crossing(Mesh(ranks), 0, whole).gathered(rows)
    assert 0.99 * said <= found <= said + (1 << 16)


@pytest.fixture(scope="module")
def v3(tmp_path_factory):
    from test_room import FIXTURES

    folder = tmp_path_factory.mktemp("v3")
    (folder / "config.json").write_text((FIXTURES / "deepseek-v3.json").read_text())
    return str(folder)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("dp", [2, 4, 8])
def test_the_reserve_covers_what_captured_steps_of_all_groups_hold(v3, dp, drafts):
    flags = {"tp": 8, "dp": dp, "enable_dp_attention": True}
    if drafts:
        flags["speculative_algorithm"] = "NEXTN"
    found = assemble(EngineConfig(model=v3, **flags), tuple(flags), device="b300")
    kept, config = reserve(found), found.config
    queries = 4 if drafts else 1
    size = verifying_sizes(config, queries if drafts else None)[-1]
    rows, vocab = size * queries * dp, found.model.vocab_size
    results = rows * vocab * 4 + 2 * rows * vocab * 2  # float32, and the head's while they meet
    prompts = prefill_graph_sizes(config)[-1] * dp
    mlp = max(rows, prompts) * found.model.hidden * 2
    assert kept.captured >= results + 2 * mlp
    assert prompts <= config.max_prefill_graph_size and (
        not drafts or rows <= config.max_step_tokens
    )
    alone = replace(found, config=replace(config, tp=8, enable_dp_attention=False, dp=None))
    assert reserve(alone).communication < kept.communication


@pytest.mark.parametrize("groups", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("requests", [1, 7, 64, 512])
def test_sizes_of_a_group_hold_all_that_the_ledger_gives_it(requests, groups):
    """Requests that come one by one to the group that knows them, as long as it may take them."""
    running = [0] * groups
    for _ in range(requests):
        fewest = min(running)
        running[0 if running[0] <= most_beside(fewest) else running.index(fewest)] += 1
    assert max(running) <= most_of(requests, groups) + 1
    if groups > 1 and requests >= groups:
        config = EngineConfig(
            tp=groups, dp=groups, enable_dp_attention=True, max_running_requests=requests
        )
        assert graph_sizes(config)[-1] == most_of(requests, groups) <= requests
        assert sum(running) == requests


def test_communicators_are_as_many_as_there_are_divisions():
    assert [len(Mesh(*m).divisions) for m in ((1,), (8,), (8, 8), (8, 2), (8, 2, 2))] == [
        0,
        1,
        1,
        3,
        4,
    ]
