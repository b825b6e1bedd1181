"""A plugin of the first contracts, frozen, serves: the same text as the platform of the tree."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ds_runtime import LLM, SamplingParams

FOLDER = Path(__file__).parents[1] / "golden" / "contracts_1"
PROMPTS = ["one", "another prompt", "a third one that is longer"]


def test_a_frozen_plugin_serves(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "ds_golden_1-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ds-golden-1\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ds_runtime]\ngolden_1 = ds_golden_1\n")
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.syspath_prepend(str(tmp_path))
    said = {}
    for platform in ("cpu", "golden_1"):
        with LLM(model=str(tiny), platform=platform, dtype="float32") as llm:
            rows = {r.op: r.kernel for r in llm._assembly.plan.rows}
            outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0))
            said[platform] = [c.token_ids for o in outputs for c in o.outputs]
    assert rows["mla_decode"] == "golden_1.mla_decode" and rows["linear"] == "golden_1.linear"
    assert said["golden_1"] == said["cpu"]
    for name in [n for n in sys.modules if n.split(".")[0] == "ds_golden_1"]:
        monkeypatch.delitem(sys.modules, name)
