"""The decision layer imports, and decides, where torch cannot be imported at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

import ds_runtime

CORE = Path(ds_runtime.__file__).parent
NEEDS_TORCH = {
    "adapters",
    "batch",
    "dtypes",
    "weight",
}  # under ops: what holds or calls for tensors
ALWAYS = """
    ds_runtime ds_runtime.api ds_runtime.assembly.assemble ds_runtime.config ds_runtime.errors
    ds_runtime.plugins.hookspecs ds_runtime.assembly.plan ds_runtime.plugins.manager
    ds_runtime.common.progress ds_runtime.sampling_params ds_runtime.engine.messages
    ds_runtime.engine.process.launch ds_runtime.platform.contract ds_runtime.assembly.result
    ds_runtime.engine.process.worker ds_runtime.plugins.select_platform
    ds_runtime.description.hf ds_runtime.description.sites ds_runtime.cli
    ds_runtime.ops.reference ds_runtime.testing ds_runtime_bench ds_runtime_convert
    ds_runtime_convert.cli ds_runtime_kit
"""
IN_TREE = ("cpu", "cuda", "rocm", "npu", "xpu", "triton")

BLOCKER = """
import importlib, json, sys, traceback

BLOCKED = {"torch", "transformers", "triton", "torch_npu", "safetensors", "tokenizers", "fastapi"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked in this test")
        return None

sys.meta_path.insert(0, Blocker())
"""
IMPORT_ALL = """
failed = {}
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except ImportError:
        failed[name] = traceback.format_exc()
print(json.dumps(failed))
"""
DECIDE = """
from ds_runtime.ops.binding.bind import Binder
from ds_runtime.ops.contract import DeviceInfo, Dims, Facts, Site
from ds_runtime.ops.table import OPS
from ds_runtime.plugins.manager import load_plugins

plugins = load_plugins()
dims = Dims({"kv_lora": 512, "qk_rope": 64, "qk_nope": 128, "v": 128, "heads": 4})
facts = Facts(DeviceInfo("cpu", "any", "any"), dims, dtype="bfloat16", kv_dtype="bfloat16")
binder = Binder(plugins.offers(facts), facts)
owns = ("linear", "experts", "mla_absorb")
decided = {}
for name in OPS:
    site = Site(name, 0, "m", weight_format="dense" if name in owns else "")
    tag = {"index": "index_pages.v1"}.get(OPS[name].layout, "latent_pages.v1")
    tag = "expanded_pages.v1" if name == "mha_decode" else tag
    decided[name] = binder.decide(site, tag)[1].kernel
print(json.dumps(decided))
"""


def run(code: str, *arguments: str) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKER + code, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return result


def decision_layer() -> list[str]:
    contracts = (p.stem for p in (CORE / "ops").glob("*.py"))
    names = {*ALWAYS.split(), *(f"ds_runtime.ops.{c}" for c in contracts if c not in NEEDS_TORCH)}
    names -= {"ds_runtime.ops.__init__"}
    names |= {f"ds_runtime.cli.{p.stem}" for p in (CORE / "cli").glob("[a-z]*.py")}
    for tool in ("bench", "kit"):
        cli = Path(str(find_spec(f"ds_runtime_{tool}.cli").origin)).parent
        names |= {f"ds_runtime_{tool}.cli.{p.stem}" for p in cli.glob("[a-z]*.py")}
    for plugin in IN_TREE:
        names |= {f"ds_runtime_{plugin}"}
        names |= {f"ds_runtime_{plugin}.kernels"} & _modules_of(plugin)
    return sorted(names)


def _modules_of(plugin: str) -> set[str]:
    package = f"ds_runtime_{plugin}"
    files = (file for root in sys.path for file in (Path(root) / package).glob("*.py"))
    return {f"{package}.{file.stem}" for file in files}


@pytest.mark.parametrize("plugin", IN_TREE)
def test_a_plugin_of_the_tree_has_its_hooks_module(plugin: str) -> None:
    assert f"ds_runtime_{plugin}.__init__" in _modules_of(plugin)


@cache
def failures() -> dict[str, str]:
    return run(IMPORT_ALL, json.dumps(decision_layer()))


@pytest.mark.parametrize("module", decision_layer())
def test_module_imports_with_torch_blocked(module: str) -> None:
    assert module not in failures(), failures()[module]


def test_the_blocker_blocks() -> None:
    said = run(IMPORT_ALL, json.dumps(["ds_runtime.ops.weight"]))
    assert "torch is blocked in this test" in said["ds_runtime.ops.weight"]


def test_every_op_is_decided_with_torch_blocked() -> None:
    from ds_runtime.ops.table import OPS

    decided = run(DECIDE)
    assert set(decided) == set(OPS)
    assert all(decided.values())
