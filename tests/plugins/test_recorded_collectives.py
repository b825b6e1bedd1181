"""Sums and gathers between ranks in captured steps of the CPU: each is an op of the recording."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from test_cpu_graphs import check_replay

from ds_runtime.parallel import through
from ds_runtime.parallel.sums import in_order
from ds_runtime.platform.contract import Communicator
from ds_runtime_cpu.collectives import HostCommunicator

APART = {  # collectives of the contract that no recorded step uses
    "broadcast": "nobody calls it in a step",
    "send": "a step has no stages",
    "receive": "a step has no stages",
    "barrier": "moves nothing, and waits",
    "gather_objects": "of Python's objects, at the start and for adapters",
    "ordered_sum": "asked at the start, and the CPU has none",
    "fast_sums": "asked at the start, and the CPU has none",
    "normed_sum": "asked at the start, and the CPU has none",
    "gather_logits": "asked at the start, and the CPU has none",
    "all_reduce_async": "of steps that are divided, which are not recorded",
    "split": "at the start",
    "close": "at the end",
}


def collectives():
    """Those of the contract that a step may use."""
    named = [n for n, f in vars(Communicator).items() if callable(f) and not n.startswith("_")]
    assert APART.keys() < {*named}
    return [name for name in named if name not in APART]


@pytest.fixture
def group(tmp_path):
    made = HostCommunicator("gloo", 0, 1, f"file://{tmp_path}/meet")
    yield made
    made.close()


def test_the_host_has_no_sum_that_would_be_recorded(group):
    assert group.ordered_sum(1 << 18) is None and not group.fast_sums(1 << 20)
    assert group.normed_sum(1 << 20) is None


@pytest.mark.parametrize("name", collectives())
def test_every_collective_of_a_step_is_one_recorded_op(group, monkeypatch, name):
    """Torch's own runs behind the op that began it, and a replay would find what it left once."""
    seen, recorded = [], HostCommunicator._recorded

    def noted(self, name, x):
        seen.append(name)
        return recorded(self, name, x)

    monkeypatch.setattr(HostCommunicator, "_recorded", noted)
    x, out = torch.randn(2, 8), torch.empty(2, 8)
    check_replay(lambda: out.copy_(getattr(group, name)(x)), out, x)
    assert seen == [name]


def test_steps_use_no_other_collective():
    """Whoever has a step use another one has it recorded, and leaves it out of `APART`."""
    root = Path(in_order.__file__).parents[2]
    of_groups = r"(?:comm|_?group|_tp|_across|_inside)"
    found = {
        name
        for folder in ("model", "parallel", "engine", "ops", "lora")
        for path in (root / folder).rglob("*.py")
        if path != Path(through.__file__)  # which hands all of them on
        for name in re.findall(rf"\b{of_groups}\.(\w+)\(", path.read_text(encoding="utf-8"))
    }
    assert {"all_reduce", "all_gather", "gather_rows", "reduce_scatter"} <= found
    assert not found & {"broadcast", "send", "receive"}
