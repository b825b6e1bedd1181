"""Which steps are rehearsed: one for every variant that any of a scheduler's steps has."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime.config import EngineConfig
from ds_runtime.engine.device.first_steps import StepLimits, covering_steps, representatives
from ds_runtime.ops.contract import DeviceInfo, Kernel
from ds_runtime.ops.kernel import Compiles
from ds_runtime.ops.table import OPS
from ds_runtime.testing.conformance import facts_for

FACTS = facts_for(DeviceInfo("cpu", "host", "any"), "bfloat16")
TABLES = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), max_size=4)


@given(TABLES)
def test_each_function_has_all_its_values_at_them(tables):
    variants = [(table.__getitem__, range(len(table))) for table in tables]
    found = representatives(variants)
    assert list(found) == sorted(set(found))
    for variant, rows in variants:
        assert {variant(n) for n in found if n in rows} == {variant(n) for n in rows}
    assert len(found) <= sum(len(set(table)) for table in tables)


@pytest.fixture(scope="module")
def bound():
    """Of kernels that compile anew for every fifth number of rows, from 1 and from 3 on."""
    module = types.ModuleType("compiled_by_fives")
    module.rows = lambda facts, rows: rows // 5
    module.others = lambda facts, rows: (rows + 2) // 5
    sys.modules[module.__name__] = module
    at = {"any": "rows", "prefill": "others", "decode": "others"}
    held = [
        (
            Kernel(
                OPS["linear"], "m:k", "me", compiles=Compiles(variant=f"compiled_by_fives:{fn}")
            ),
            phase,
        )
        for phase, fn in at.items()
    ]
    facts = {phase: replace(FACTS, phase=phase) for phase in at}
    yield SimpleNamespace(
        served=lambda most: ((k, facts[phase], [range(1, most + 1)]) for k, phase in held)
    )
    del sys.modules[module.__name__]


@given(
    steps=st.integers(1, 64),
    chunk=st.integers(1, 64),
    running=st.integers(1, 16),
    context=st.integers(2, 300),
    width=st.integers(1, 5),
    ranks=st.sampled_from((1, 2, 4)),
    sparse=st.sampled_from((0, 8)),
)
def test_steps_are_those_of_a_scheduler_and_have_every_variant(
    bound, steps, chunk, running, context, width, ranks, sparse
):
    steps, chunk = max(steps, chunk, running * width), min(chunk, steps)
    config = EngineConfig(
        model="m",
        max_step_tokens=steps,
        chunked_prefill_size=chunk,
        max_running_requests=running,
        page_size=4,
        **({"tp": ranks, "enable_dp_attention": True} if ranks > 1 else {}),
    )
    limits = StepLimits(context, width, sparse, vocab=40, adapts=True)
    own = min(ranks, running)
    seen = {"prompts": set(), "cached": set(), "decodes": set()}
    for plan in covering_steps(bound, config, limits):
        assert 0 < sum(w.length for w in plan.works) <= steps
        assert 0 < len(plan.works) <= running == max(running, len({w.row for w in plan.works}))
        assert sorted(i.row for i in plan.init) == [w.row for w in plan.works]
        for work in plan.works:
            assert work.start + work.length <= context and 0 <= work.group < own
            assert len(work.pages) * 4 >= work.start + work.length
            if work.tokens is None:
                assert work.length <= width
            else:
                assert len(work.tokens) == work.length <= chunk
        mine = [w for w in plan.works if w.group == 0]
        kind = "decodes" if mine[0].tokens is None else "cached" if mine[0].start else "prompts"
        seen[kind].add(sum(w.length for w in mine))
    most = steps // own
    if chunk * (running // own) >= most and context > most:
        assert {n // 5 for n in seen["prompts"]} == {n // 5 for n in range(1, most + 1)}
    decoded = min(most, running // own * min(width, context - 1))
    assert {(n + 2) // 5 for n in seen["decodes"]} == {(n + 2) // 5 for n in range(1, decoded + 1)}
