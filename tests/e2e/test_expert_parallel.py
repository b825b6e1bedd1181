"""Routed experts divided by number among real ranks over Gloo: the answers of one rank."""

from __future__ import annotations

import pytest
from test_dp_attention import SETTINGS, ask, same

from ds_runtime import LLM

LAYOUTS = {
    "ep 2": {"tp": 2, "ep": 2},
    "ep 2 of 4": {"tp": 4, "ep": 2},
    "ep 2, groups": {"tp": 2, "ep": 2, "enable_dp_attention": True},
    "ep 4": {"tp": 4, "ep": 4},
    "ep 4, groups": {"tp": 4, "ep": 4, "enable_dp_attention": True},
    "ep 4, groups of two": {"tp": 4, "dp": 2, "ep": 4, "enable_dp_attention": True},
    "ep 2, four groups": {"tp": 4, "ep": 2, "enable_dp_attention": True},
}
SHORT = ("ep 2", "ep 2, groups", "ep 4, groups of two")


@pytest.fixture(scope="module")
def alone(tiny):
    with LLM(tiny, **SETTINGS) as llm:
        return ask(llm)


@pytest.mark.parametrize(
    "name", [n if n in SHORT else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS]
)
def test_mixed_batches_give_what_one_rank_gives(tiny, alone, name):
    layout = LAYOUTS[name]
    with LLM(tiny, **SETTINGS, **layout) as llm:
        same(ask(llm), alone)
        sites = {s.op: s for s, _ in llm._assembly.binding.choices}
        assert sites["experts"].shape == (8 // layout["ep"], 32 * layout["ep"] // layout["tp"], 64)
