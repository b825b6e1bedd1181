"""Where costs are looked for, and which of them are believed."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from ds_runtime.errors import ConfigError, PluginError
from ds_runtime.measured import found
from ds_runtime.measured.costs import Costs, KernelCost, Point, _packed

DEVICE = "Chip 9"


def costs(device=DEVICE, rows=1):
    kernels = {"a.b:apply": KernelCost("linear", "bfloat16", (Point(rows, 1, 1, 1),))}
    return Costs(device, "x", "2026-01-02", {}, 1e9, {"bfloat16": 1e12}, 1.0, 1.0, 1.0, kernels)


@pytest.fixture
def assembly(tmp_path, monkeypatch):
    """Of a device that a plugin describes, in a home without costs."""
    home, plugin = tmp_path / "home", tmp_path / "path" / "chips_plugin"
    monkeypatch.setenv("HOME", str(home))
    (plugin / "costs").mkdir(parents=True)
    (plugin / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "path")
    monkeypatch.delitem(sys.modules, "chips_plugin", raising=False)
    report = SimpleNamespace(refusal=None, module="chips_plugin")
    made = SimpleNamespace(reports={"chips": report})
    yield made, plugin / "costs"
    sys.modules.pop("chips_plugin", None)


def test_the_users_own_file_comes_first_then_the_plugins(assembly):
    made, shipped = assembly
    assert found.costs_of(made, DEVICE) is None
    costs(rows=1).write(shipped / "chip.json")
    assert found.costs_of(made, DEVICE) == costs(rows=1)
    costs(rows=2).write(found.own(DEVICE))
    assert found.costs_of(made, DEVICE) == costs(rows=2)


@pytest.mark.parametrize("device", ["Chip 8", "chip-9", ""])
def test_the_users_own_file_of_another_device_is_refused(assembly, device):
    made, _ = assembly
    path = found.own(DEVICE)
    costs(device).write(path)
    with pytest.raises(ConfigError) as caught:
        found.costs_of(made, DEVICE)
    assert str(caught.value) == (
        f"costs {path}: are of {device}, not of {DEVICE}; remove it, or run ds-runtime tune costs"
    )


NO_COSTS = {
    "no json": "{",
    "deep": "[" * 100_000,
    "another format": json.dumps({"format": 99, "device": DEVICE}),
    "no device": json.dumps({"format": 1}),
}


@pytest.mark.parametrize("text", NO_COSTS.values(), ids=NO_COSTS)
def test_a_file_of_no_known_device_is_told_and_left_out(assembly, capsys, text):
    made, shipped = assembly
    (shipped / "a.json").write_text(text)
    costs().write(shipped / "b.json")
    assert found.costs_of(made, DEVICE) == costs()
    assert "plugin chips: costs/a.json: left out" in capsys.readouterr().err


def test_only_the_devices_own_file_must_be_whole(assembly):
    made, shipped = assembly
    (shipped / "a.json").write_text(json.dumps(_packed(costs("Chip 8")) | {"compute": {}}))
    costs().write(shipped / "b.json")
    assert found.costs_of(made, DEVICE) == costs()
    (shipped / "b.json").write_text(json.dumps(_packed(costs()) | {"compute": {}}))
    with pytest.raises(PluginError, match=r"plugin chips: costs/b\.json: field compute"):
        found.costs_of(made, DEVICE)
