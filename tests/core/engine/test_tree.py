"""Trees of drafts: grown as EAGLE-2 says, verified without changing a distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_verify import CPU, LIMIT, ROWS, VOCAB, draw

from ds_runtime.common.speculation import Speculation
from ds_runtime.engine.speculate.acceptance import Branch, claim, fronts, verify
from ds_runtime.engine.step.plan import RowInit, StepPlan, Work
from ds_runtime.engine.step.result import sort_rows
from ds_runtime.engine.step.sampler import Sampler
from ds_runtime.engine.step.streams import stream_key
from ds_runtime.engine.step.transfer import Upload
from ds_runtime.engine.trees.growth import Growth
from ds_runtime.engine.trees.nodes import Drafted, Trees, moves, seen_by
from ds_runtime.ops.reference import sampling
from ds_runtime.ops.table import Ops
from ds_runtime.parallel.row_order import Pick
from ds_runtime.sampling_params import SamplingParams
from examples import examples


def line_of(parents, node):
    """The nodes from the root to this one. parents: of the nodes behind the root."""
    found = [node]
    while found[-1]:
        found.append(parents[found[-1] - 1])
    return found[::-1]


@settings(max_examples=examples(40), deadline=None)
@given(steps=st.integers(1, 4), topk=st.integers(1, 3), seed=st.integers(0, 999), data=st.data())
def test_a_grown_tree_has_the_likeliest_paths(steps, topk, seed, data):
    """Against EAGLE-2 in plain Python, over random continuations of every path."""
    whole = 1 + topk + (steps - 1) * topk * topk
    shape = Speculation(steps, topk, data.draw(st.integers(min(2, whole), whole)))

    def best(path):  # (log-probability, token) of its continuations
        random = np.random.default_rng([seed, *path])
        values = np.log(random.dirichlet(np.ones(7)))
        return sorted(zip(values.tolist(), range(7), strict=True), reverse=True)[:topk]

    frontier, candidates = [(0.0, ())], []
    for _ in range(steps):
        level = [(s + v, (*p, t)) for s, p in frontier for v, t in best(p)]
        candidates += level
        frontier = sorted(level, reverse=True)[:topk]
    want = {p for _, p in sorted(candidates, reverse=True)[: shape.drafts]}

    paths, growth = [()], None
    for level in range(steps):
        values = [[best(path) for path in paths]]
        scores, tokens = (torch.tensor(np.array(values)[..., i]) for i in (0, 1))
        tokens = tokens.long()
        if growth is None:
            growth = Growth.begin(shape, scores[:, 0], tokens[:, 0])
            paths = [(int(t),) for t in tokens[0, 0]]
            lines = growth.next_lines(1)
        else:
            grown = [(*p, int(t)) for p, some in zip(paths, tokens[0], strict=True) for t in some]
            numbers = torch.arange(topk).unsqueeze(1)
            chosen = growth.grow(scores[0], tokens[0], numbers, Pick()).view(1, topk)
            flat = growth.frontier - growth.count + topk * topk
            above, paths = paths, [grown[i] for i in flat[0].tolist()]
            assert [above[i] for i in chosen[0].tolist()] == [p[:-1] for p in paths]
            lines = growth.next_lines(level + 1)
        assert growth.frontier_tokens()[0].tolist() == [p[-1] for p in paths]
        assert [bin(x).count("1") for x in lines[0].tolist()] == [level + 1] * topk

    found = growth.best()
    parents = found.parents[0].tolist()
    assert all(parent <= i for i, parent in enumerate(parents))
    ids = [None, *found.tokens[0].tolist()]
    made = set()
    for node in range(1, shape.tokens):
        line = line_of(parents, node)
        made.add(tuple(ids[n] for n in line[1:]))
        assert int(found.lines[0, node - 1]) == sum(1 << n for n in line)
        assert int(found.depths[0, node - 1]) == len(line) - 1
    assert made == want


def test_what_a_node_sees_is_its_line_and_all_before_the_tree():
    count, width = torch.tensor([4, 64]), 64
    bits = seen_by(torch.tensor([0b1011, -(2**63) | 1]), count).tolist()
    for number, n, line in zip(bits, (4, 64), ({0, 1, 3}, {0, 63}), strict=True):
        seen = {b for b in range(width) if number >> b & 1}
        assert seen == set(range(width - n)) | {width - n + a for a in line}


PARENTS = [0, 0, 1, 1, 2]  # two continuations, and three behind them


def trees(tokens_of):
    """Every row's tree, of the shape above; tokens_of(node, its parent's tokens): [rows]."""
    depths, lines = [], []
    for node in range(1, len(PARENTS) + 1):
        line = line_of(PARENTS, node)
        depths.append(len(line) - 1)
        lines.append(sum(1 << n for n in line))
    tokens = [torch.zeros(ROWS, dtype=torch.int64)]
    for node, parent in enumerate(PARENTS, 1):
        tokens.append(tokens_of(node, tokens[parent]))
    made = Trees(ROWS, len(tokens), CPU)
    rows = [torch.tensor(x).expand(ROWS, -1) for x in (PARENTS, depths, lines)]
    made.put(torch.arange(ROWS), Drafted(torch.stack(tokens[1:], 1), *rows))
    return made, torch.stack(tokens, 1)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_kept_tokens_have_the_models_distribution(temperature):
    """Two tokens of a Markov chain, whichever node they come from: counts against p · p."""
    random = np.random.default_rng(5)
    model = torch.tensor(random.normal(size=(VOCAB, VOCAB)), dtype=torch.float32)
    order = (model + torch.tensor(random.normal(size=(VOCAB, VOCAB)))).argsort(1, descending=True)
    # Siblings are the drafter's first, second and third choice behind their parent.
    choice = {1: 0, 2: 2, 3: 0, 4: 1, 5: 0}
    made, stacked = trees(lambda node, front: order[front, choice[node]])
    width = stacked.shape[1]
    works = [Work(rid=str(r), row=r, start=7, length=width, pages=[r]) for r in range(ROWS)]
    plan = StepPlan(step=0, works=works, drafts=width - 1)
    wanted = sort_rows(plan, lambda row: ())
    ops = Ops.of({"sample": sampling.sample, "logprobs": sampling.logprobs}, "sampler")
    sampler = Sampler(ops, ROWS, VOCAB, CPU, width)
    for seed in range(ROWS):
        params = SamplingParams(temperature=temperature)
        sampler.start(RowInit(row=seed, params=params, seed=seed, choice=0, prompt=[0]))
    sent = Upload(CPU)
    draws = sampler.prepare(wanted.draws, sent)
    claims = claim(plan, wanted, width, sent)
    sent.send()
    front = fronts(claims, stacked.flatten(), made, sent)
    drawn = sampler.draw(model[front.tokens], draws, sent, front.tokens, front.nodes)
    branch = verify(claims, 3, drawn, front, sent)
    assert branch.draws.shape == (ROWS, 3) and len(set(branch.accepted.tolist())) == 3 - 2 * (
        temperature == 0
    )
    kept = drawn[branch.order].view(ROWS, width)

    keys = [stream_key(seed, 0) for seed in range(ROWS)]

    def plain(front, position):
        if temperature == 0:
            return model[front].argmax(1)
        return draw(model[front], [position] * ROWS, keys)

    first = plain(torch.zeros(ROWS, dtype=torch.int64), 8)
    second = plain(first, 9)
    third = plain(second, 10)
    assert torch.equal(kept[:, 0], first)
    for depth, want in ((1, second), (2, third)):
        there = branch.accepted >= depth
        assert torch.equal(kept[there, depth], want[there])
    # Nothing stops while a child is what the model drew.
    for row in range(0, ROWS, 7):
        children = [stacked[row, n] for n, p in enumerate(PARENTS, 1) if p == 0]
        assert (branch.accepted[row] > 0) == (first[row] in children)
    if temperature == 0:
        return
    p = model.double().softmax(1)
    expected = ROWS * p[0].unsqueeze(1) * p
    later = torch.where(branch.accepted > 0, kept[:, 1], second)
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    counts.index_put_((kept[:, 0], later), torch.ones(ROWS, dtype=torch.float64), accumulate=True)
    assert ((counts - expected) ** 2 / expected).sum() < LIMIT


def test_moves_bring_a_branch_to_the_front():
    slots = torch.tensor([40, 41, 42, 43, 80, 81, 5])  # of trees of 4 and 2, and of a prompt
    branch = Branch(torch.tensor([2, 1, 0]), torch.tensor([[0, 2, 3], [4, 5, 5], [6, 6, 6]]))
    sources, targets, rows = moves(branch, slots)
    assert sources.tolist() == [[42, 43], [-1, -1], [-1, -1]]
    assert targets[0].tolist() == [41, 42]
    assert rows[0].tolist() == [2, 3]
    # The same draws in a step whose sequences take five rows each.
    lies = torch.tensor([0, 1, 2, 3, 5, 6, 10])
    assert moves(branch, slots, lies).rows[0].tolist() == [2, 3]
    assert moves(branch, slots, lies).rows[1].tolist() == [6, 6]
