"""A package outside the tree, installed as a user would: found, selected, conforming, winning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import distributions
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

FIXTURES = Path(__file__).parents[1] / "fixtures"

PROBE = """
import json, sys
from ds_runtime.ops.binding.bind import Binder
from ds_runtime.ops.contract import Site
from ds_runtime.platform.contract import DeviceInfo
from ds_runtime.plugins.manager import load_plugins
from ds_runtime_kit.checks.conformance import check_kernel, facts_for

facts = facts_for(DeviceInfo("cpu", "any", "any"), "bfloat16")
plugins = load_plugins()
offers = plugins.offers(facts)
kernel, decision = Binder(offers, facts).decide(Site("rms_norm", 0, "input_layernorm"), "")
report = plugins.reports.get("toy")
toys = [k for k in offers.kernels if k.provider == "toy"]
print(json.dumps({
    "winner": kernel.name,
    "lost": [name for name, _ in decision.lost],
    "report": report and [report.distribution, report.version, report.third_party],
    "failures": [r.failure for k in toys for r in check_kernel(k, facts) if not r.ok],
    "checked": sum(len(check_kernel(k, facts)) for k in toys),
    "refused": {n: str(r.refusal) for n, r in plugins.reports.items() if r.refusal},
    "providers": sorted({k.provider for k in offers.kernels}),
}))
"""


def toy_module() -> Any:
    spec = spec_from_file_location("toy", FIXTURES / "toy.py")
    assert spec is not None and spec.loader is not None
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def probe(folder: Path, **environment: str) -> dict[str, Any]:
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = toy_module().place_toy(
        tmp_path_factory.mktemp("site"), {"toy_broken": "ds_runtime_toy_broken"}
    )
    return folder


def test_pip_installs_it_and_it_wins_its_op(tmp_path: Path) -> None:
    folder = toy_module().pip_install_toy(tmp_path / "site", tmp_path)
    seen = probe(folder)
    assert seen["report"] == ["ds-runtime-toy", "1.2.3", True]
    assert seen["winner"] == "toy.rms_norm"
    assert "reference.rms_norm" in seen["lost"]
    assert seen["failures"] == []
    assert seen["checked"] > 5
    assert seen["refused"] == {}


def test_the_placed_copy_says_the_same_as_the_installed_one(placed: Path) -> None:
    found = {d.name: d for d in distributions(path=[str(placed)])}["ds-runtime-toy"]
    assert found.version == "1.2.3"
    assert {e.name: e.value for e in found.entry_points}["toy"] == "ds_runtime_toy"


def test_a_plugin_that_raises_in_one_hook_offers_nothing_and_others_serve(placed: Path) -> None:
    seen = probe(placed)
    assert seen["winner"] == "toy.rms_norm"
    assert list(seen["refused"]) == ["toy_broken"]
    assert "the toy's driver is upside down" in seen["refused"]["toy_broken"]
    assert "toy_broken" not in seen["providers"]


def test_the_environment_restricts_which_plugins_load(placed: Path) -> None:
    seen = probe(placed, DS_PLUGINS="toy_broken")
    assert seen["report"] is None
    assert seen["winner"] == "reference.rms_norm"
