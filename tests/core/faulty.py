"""Helpers of the plugin tests: modules made on the spot, and installed distributions."""

from __future__ import annotations

import json
import sys
import textwrap
import types
from pathlib import Path

import pytest

TINY = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}

PRELUDE = """
from ds_runtime.api import API_VERSION, OPS, RANK_PLATFORM, RANK_PORTABLE, RANK_SPECIALISED
from ds_runtime.api import Change, Compiles, DeviceInfo, Facts, Footprint, Kernel, Layout
from ds_runtime.api import MemoryInfo, Op, Platform
from ds_runtime.api import QuantLoader, Refusal, hookimpl

"""


def tiny_config(folder: Path, **changes: object) -> Path:
    """A folder with the config.json of a three-layer model; no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY, **changes}))
    return folder


def module(name: str, code: str) -> types.ModuleType:
    """A module `name` from source, as a plugin author would write it."""
    made = types.ModuleType(name)
    exec(compile(PRELUDE + textwrap.dedent(code), f"<{name}>", "exec"), made.__dict__)
    return made


def install(
    site: Path, monkeypatch: pytest.MonkeyPatch | None, code: str, name: str, dist: str
) -> None:
    """Write a distribution with one entry point into `site`, as an installer would."""
    imported = f"{dist}_module".replace("-", "_")
    site.mkdir(parents=True, exist_ok=True)
    (site / f"{imported}.py").write_text(PRELUDE + textwrap.dedent(code))
    info = site / f"{dist.replace('-', '_')}-2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 2.5\n")
    (info / "entry_points.txt").write_text(f"[ds_runtime]\n{name} = {imported}\n")
    if monkeypatch is not None:
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, imported, raising=False)
