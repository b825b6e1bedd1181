"""V3.2 through the Triton kernels of sparse attention, in the interpreter, against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from interpreter import faithful, needs_triton

from ds_runtime.ops.contract import RANK_PORTABLE
from ds_runtime_kit.models.oracle import Oracle, compare
from ds_runtime_kit.models.tiny import write_tiny
from ds_runtime_triton.kernels import ALL

pytestmark = [needs_triton, pytest.mark.slow]
OPS = ("index_prologue", "index_scores", "index_topk", "sparse_prefill", "sparse_decode")
KERNELS = {k.op.name: k for k in reversed(ALL) if k.op.name in OPS and k.rank == RANK_PORTABLE}


@pytest.mark.parametrize("shape", ["v32", "glm"])
def test_chunks_and_decode_steps(tmp_path, shape, monkeypatch):
    """Half-split and interleaved indexers; prompts around the 24 tokens that are chosen."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "core" / "model"))
    from model_harness import Harness, decide, run_schedule

    oracle = Oracle(write_tiny(tmp_path, shape, seed=5, index_topk=24))
    assembly = decide(tmp_path, page_size=8)
    choices = tuple((s, KERNELS.get(s.op, k)) for s, k in assembly.binding.choices)
    assert {k.provider for s, k in choices if s.op in OPS} == {"triton"}
    assembly = replace(assembly, binding=replace(assembly.binding, choices=choices))
    prompts = [oracle.draw_prompt(n, n) for n in (45, 24, 1)]
    with faithful():
        compare(oracle, prompts, run_schedule(Harness(assembly, pages=64), prompts, 3, 17), 1e-4)
