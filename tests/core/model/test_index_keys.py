"""The projection of index keys joined with attention's first ones: where, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ds_runtime.api import Weight, WeightPart
from ds_runtime.assembly.assemble import assemble
from ds_runtime.config import EngineConfig
from ds_runtime.description.hf import load_config
from ds_runtime.description.joins import INDEX_KEYS, QKV_A
from ds_runtime.description.sites import model_sites
from ds_runtime.errors import ConfigError
from ds_runtime.ops.reference.matrices import fp8_blocks

V32 = Path(__file__).parent / "fixtures/deepseek-v3.2.json"
KEYS, JOINED = "self_attn.indexer.wk", "self_attn.qkv_a_proj"


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(V32.read_text())
    return load_config(tmp_path)


def linears(config, **given):
    """The shapes of layer 3's first projections, by module."""
    sites = model_sites(config, given.pop("format_of", lambda module: "fp8_block"), **given)
    wanted = (KEYS, JOINED, "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")
    some = [s for s in sites if s.op == "linear" and s.layer == 3 and s.module in wanted]
    return {site.module: site.shape for site in some}


def test_it_has_a_place_of_its_own_only_where_it_is_not_joined(config):
    assert linears(config) == {JOINED: (1536 + 128 + 576, 7168)}
    apart = {JOINED: (1536 + 576, 7168), KEYS: (128, 7168)}
    assert linears(config, apart={INDEX_KEYS}) == apart
    assert (
        linears(config, format_of=lambda m: "dense" if m.endswith("wk") else "fp8_block") == apart
    )
    assert len(linears(config, apart={QKV_A})) == 3


def test_blocks_of_scales_stay_whole_at_published_widths():
    """Kernels that take whole blocks would else convert the weight."""

    def part(rows):
        values = torch.zeros(rows, 7168, dtype=torch.uint8).view(torch.float8_e4m3fn)
        scale = torch.ones(-(-rows // 128), 56)
        tensors = {"weight": values, "scale": scale}
        return WeightPart(str(rows), "fp8_block", (rows, 7168), tensors, block=(128, 128))

    assert fp8_blocks.join(Weight((part(1536), part(128), part(576)))) is not None
    assert fp8_blocks.join(Weight((part(1536), part(576), part(128)))) is None


def test_a_fused_kernel_in_front_of_attention_leaves_it_apart():
    given = {"model": "demo-v32", "platform": "cpu"}
    fused = assemble(EngineConfig(**given, pin=("mla_inputs=reference",)))
    assert any(site.module == KEYS for site, _ in fused.binding.choices)
    plain = assemble(EngineConfig(**given))
    assert not any(site.module == KEYS for site, _ in plain.binding.choices)
    with pytest.raises(ConfigError, match="matches no site"):
        assemble(EngineConfig(**given, pin=("linear@*indexer.wk=reference",)))
