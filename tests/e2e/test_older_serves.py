"""A plugin of an older generation of contracts, frozen, serves the text that the tree's does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ds_runtime import LLM, SamplingParams

FOLDER = Path(__file__).parents[1] / "golden" / "older_generation"
PROMPTS = ["one", "another prompt", "a third one that is longer"]


def test_a_frozen_plugin_serves(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "ds_older-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ds-older\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ds_runtime]\nolder = ds_older\n")
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.syspath_prepend(str(tmp_path))
    said = {}
    for platform in ("cpu", "older"):
        with LLM(model=str(tiny), platform=platform, dtype="float32") as llm:
            rows = {r.op: r.kernel for r in llm._assembly.plan.rows}
            outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0))
            said[platform] = [c.token_ids for o in outputs for c in o.outputs]
    assert rows["mla_decode"] == "older.mla_decode" and rows["linear"] == "older.linear"
    assert said["older"] == said["cpu"]
    for name in [n for n in sys.modules if n.split(".")[0] == "ds_older"]:
        monkeypatch.delitem(sys.modules, name)
