"""What the declarations of ops say of each other."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ds_runtime.description.hf import load_config
from ds_runtime.description.sites import model_sites
from ds_runtime.ops.table import OPS
from ds_runtime_bench.shapes import SHAPES, config_of

LAYOUTS = {op.layout for op in OPS.values() if op.layout}


def test_who_chooses_a_layout_uses_it():
    assert {op.layout for op in OPS.values() if op.chooses} == LAYOUTS == {"kv", "index"}


CASES = [(shape, False) for shape in SHAPES]
CASES += [(shape, True) for shape, config in SHAPES.items() if "index_topk" not in config]


@pytest.mark.parametrize(("shape", "expanded"), CASES)
def test_every_model_has_a_place_that_chooses_each_layout(shape, expanded, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of(shape, "bfloat16")))
    model = replace(load_config(tmp_path), expanded=expanded)
    sites = model_sites(model, lambda module: "dense")
    for layout in {OPS[site.op].layout for site in sites} - {""}:
        assert [s.op for s in sites if OPS[s.op].layout == layout and OPS[s.op].chooses], layout
