"""Threads of a rank's kernels: each rank runs those that are planned with."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_runtime import LLM, SamplingParams
from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.estimate import decode_bytes
from ds_runtime.assembly.room import reserve
from ds_runtime.config import EngineConfig
from ds_runtime_cpu import machine
from examples import examples

PLUGINS = Path(__file__).parent / "plugins"
CONFIG = Path(__file__).parents[1] / "core" / "model" / "fixtures" / "deepseek-v2-lite.json"
SETTINGS = {"platform": "cpu", "dtype": "float32", "kv_memory": 2_000_000, "dist_timeout": 60}
ABOVE = machine.cores() + 3


def planned(model, device=None, **flags):
    return assemble(EngineConfig(model=str(model), **flags), tuple(flags), device=device)


@pytest.fixture(scope="module")
def lite(tmp_path_factory):
    at = tmp_path_factory.mktemp("v2-lite")
    shutil.copy(CONFIG, at / "config.json")
    return at


@pytest.fixture
def counting(tmp_path, monkeypatch):
    """A plugin by which each rank tells its threads, and the folder that it tells them in."""
    monkeypatch.syspath_prepend(str(PLUGINS))
    monkeypatch.setenv("DS_TEST_THREADS", str(tmp_path))
    import counting

    yield counting, tmp_path
    del sys.modules["counting"]


@pytest.mark.parametrize("threads", [None, 1, ABOVE], ids=["share", "1", "above the cores"])
@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_run_the_threads_that_are_planned_with(tiny, counting, tp, threads):
    plugin, notes = counting
    flags = {**SETTINGS, "tp": tp} | ({} if threads is None else {"threads": threads})
    with LLM(str(tiny), **flags, extra_plugins=[plugin]) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3))
    found = sorted(notes.iterdir())
    wanted = threads or max(1, machine.cores() // tp)
    assert {note.read_text() for note in found} == {f"{wanted} {wanted}"}
    assert len({note.name.partition("-")[0] for note in found}) == tp, "each rank's"
    assert planned(tiny, **flags).facts.threads == wanted


@settings(max_examples=examples(40), deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4, 8]), dp=st.integers(1, 4), threads=st.none() | st.integers(1, 64)
)
def test_what_is_reserved_follows_the_threads(lite, tp, dp, threads):
    """Of the described processor's 128 cores, each rank's share."""
    flags = {"tp": tp, "dp": dp} | ({} if threads is None else {"threads": threads})
    made = planned(lite, device="xeon-6980p", **flags)
    used = made.facts.threads
    assert used == (threads or max(1, 128 // (tp * dp)))
    more = replace(made, facts=replace(made.facts, threads=used + 1))
    each = decode_bytes(more) - decode_bytes(made)
    assert each > 0 and decode_bytes(made) > used * each
    assert reserve(more).activations - reserve(made).activations == each


def test_a_device_that_computes_divides_no_cores(lite):
    assert planned(lite, device="h100", threads=7).facts.threads == 1
