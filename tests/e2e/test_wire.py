"""What `plan` says of groups and of bytes between ranks, against what a running engine sends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from ds_runtime import LLM, SamplingParams
from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.crossing import Crossing
from ds_runtime.cli import main
from ds_runtime.common.progress import amount
from ds_runtime.config import EngineConfig
from ds_runtime.parallel.sums.in_order import InOrder

CONFIG = Path(__file__).parent.parent / "launch_lines" / "configs" / "deepseek-v3-0324.json"
HIDDEN, LAYERS, VOCAB = 7168, 61, 129280
ROW, LOGITS = HIDDEN * 2, VOCAB * 2


@pytest.fixture(scope="module")
def v3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("v3")
    shutil.copy(CONFIG, folder / "config.json")
    return str(folder)


@pytest.mark.parametrize(
    ("settings", "collectives", "row"),
    [
        ({"tp": 8}, 124, 123 * 2 * 7 / 8 * ROW + 7 / 8 * LOGITS),
        (
            {"tp": 8, "dp": 8, "enable_dp_attention": True},
            126,
            124 * 7 / 8 * ROW + 7 / 8 * LOGITS,
        ),
        (
            {"tp": 8, "dp": 2, "enable_dp_attention": True},
            249,
            124 / 2 * ROW + 123 * 2 * 3 / 4 / 2 * ROW + 7 / 8 * LOGITS,
        ),
    ],
)
def test_the_traffic_of_a_layout(v3, settings, collectives, row):
    assembly = assemble(EngineConfig(model=v3, **settings), settings, device="b300")
    found = Crossing.of(assembly).wire(assembly.model.layers)
    assert found.collectives == collectives and found.row == pytest.approx(row)
    facts = assembly.facts
    assert (facts.ranks["tp"], facts.hosts, facts.interconnect, facts.multicast) == (
        8,
        1,
        "nvlink",
        False,
    )
    assert facts.ranks["attn_dp"] * facts.ranks["attn_tp"] == 8


def test_sums_in_order_bring_more_of_few_rows(v3, capsys):
    """All of each other rank's, in one exchange; of many rows shares, and then their sums."""
    settings = {"tp": 8, "batch_invariant": True}
    assembly = assemble(EngineConfig(model=v3, **settings), settings, device="h200")
    crossing, layers = Crossing.of(assembly), assembly.model.layers
    few, many = crossing.wire(layers, 36), crossing.wire(layers, 37)  # of 7,168 values
    assert few.collectives == 124  # in float32, by one kernel
    assert few.row == pytest.approx(123 * 7 * 2 * ROW + 7 / 8 * LOGITS)
    assert many.collectives == 1 + 2 * 123
    assert many.row == pytest.approx(123 * 2 * 7 / 8 * ROW + 7 / 8 * LOGITS)
    assert main(["plan", "--model", v3, "--device", "h200", "--tp", "8", "--batch-invariant"]) == 0
    out = capsys.readouterr().out
    assert f"{amount(few.row)} for 1 requests" in out and f"{amount(64 * many.row)} for 64" in out


def test_plan_names_groups_memory_and_bytes(v3, capsys):
    words = ["plan", "--model", v3, "--device", "h200", "--tp", "8", "--dp", "8"]
    assert main([*words, "--enable-dp-attention", "--json"]) == 0
    memory, *said = json.loads(capsys.readouterr().out)["memory"]
    said = said[-4:]
    assert (
        memory.startswith("memory 150.0 GB of each rank: weights ") and "in all 8 groups" in memory
    )
    assert said[:3] == [
        "ranks 8 on one machine, linked by nvlink at 450 GB/s",
        "group tp: 0-7",
        "group attn_dp: 0-7",
    ]
    assert said[3].startswith("wire 1.8 MB a token that each rank receives, in 126 collectives")
    assert "64 for" not in said[3] and "for 8 requests, " in said[3] and "µs of the link" in said[3]
    nodes = ["--nnodes", "2", "--dist-init-addr", "h:1", "--dp", "2", "--enable-dp-attention"]
    assert main(["plan", "--model", v3, "--device", "b300", "--tp", "8", *nodes]) == 0
    out = capsys.readouterr().out
    assert "ranks 8 on 2 machines of 4, linked by nvlink" in out
    assert "group attn_dp: 0 4; 1 5; 2 6; 3 7, across machines" in out
    assert "group attn_tp: 0-3; 4-7\n" in out and "µs of the link" not in out
    assert main(["plan", "--model", "demo", "--device", "b300"]) == 0
    out = capsys.readouterr().out
    assert "group" not in out and "wire" not in out and "of each rank" not in out


class Counting:
    """A communicator that notes its calls and the bytes that this rank receives."""

    def __init__(self, inner):
        self.inner, self.calls, self.bytes = inner, 0, 0.0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def _note(self, nbytes):
        self.calls += 1
        self.bytes += nbytes * (self.inner.size - 1) / self.inner.size

    def all_reduce(self, x):
        self._note(2 * x.nbytes)
        return self.inner.all_reduce(x)

    def all_gather(self, x):
        self._note(x.nbytes * self.inner.size)
        return self.inner.all_gather(x)

    def gather_rows(self, x):
        if x.is_floating_point() or x.dtype == torch.int32:  # rows, and choices of experts
            self._note(x.nbytes * self.inner.size)
        else:
            self.calls += 1  # ids are next to nothing
        return self.inner.gather_rows(x)

    def all_to_all(self, x):
        self._note(x.nbytes)
        return self.inner.all_to_all(x)

    def reduce_scatter(self, x):
        self._note(x.nbytes)
        return self.inner.reduce_scatter(x)


@pytest.mark.parametrize(
    "divided",
    [
        {"tp": 2},
        {"tp": 2, "batch_invariant": True},
        {"tp": 2, "dp": 2, "enable_dp_attention": True, "batch_invariant": True},
        {"tp": 2, "dp": 2, "enable_dp_attention": True},
        {"tp": 2, "ep": 2},
        {"tp": 2, "ep": 2, "dp": 2, "enable_dp_attention": True},
        pytest.param({"tp": 4, "dp": 2, "enable_dp_attention": True}, marks=pytest.mark.slow),
        pytest.param(
            {"tp": 4, "ep": 4, "dp": 2, "enable_dp_attention": True}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_step_sends_what_is_said(tiny, monkeypatch, divided):
    made = []

    def counted_of(inner):
        if inner.size == 1:
            return inner
        mine = next((c for c in made if c.inner is inner), None)
        if mine is None:
            made.append(mine := Counting(inner))
        return mine

    def counting(group):
        def call(self, axis):
            found = group(self, axis)
            in_order = isinstance(found, InOrder)
            mine = counted_of(found._group if in_order else found)
            return InOrder(mine) if in_order else mine

        return call

    from ds_runtime.parallel.sums.logits import Logits
    from ds_runtime.parallel.world import World

    begin = Logits.__init__
    monkeypatch.setattr(
        Logits, "__init__", lambda self, group, most=0: begin(self, counted_of(group), most)
    )
    monkeypatch.setattr(World, "group", counting(World.group))
    settings = {"platform": "cpu", "dtype": "float32", "kv_memory": "2MB", "threads": 1}
    with LLM(tiny, **settings, **divided, disable_graph=True) as llm:
        totals, counted = [], []
        for count in (4, 5):
            before = sum(c.calls for c in made), sum(c.bytes for c in made)
            told = llm.stats().wire_bytes
            params = SamplingParams(max_tokens=count, ignore_eos=True)
            llm.generate([[5, 6, 7]], params)
            after = sum(c.calls for c in made), sum(c.bytes for c in made)
            totals.append((after[0] - before[0], after[1] - before[1]))
            counted.append(llm.stats().wire_bytes - told)
        (few, less), (many, more) = totals
        assert counted[1] - counted[0] == pytest.approx(more - less, rel=0.02)
        said = Crossing.of(llm._assembly).wire(llm._assembly.model.layers)
        groups = llm._assembly.config.attn_dp
        assert many - few == said.collectives
        # one request: every group has a row, filled up or not; logits are gathered for it alone
        logits = (llm._assembly.config.tp - 1) / llm._assembly.config.tp
        logits *= 4 * llm._assembly.model.vocab_size
        assert more - less == pytest.approx(groups * (said.row - logits) + logits, rel=0.02)
