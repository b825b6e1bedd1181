"""Plans are the frozen ones: what is moved or renamed changes no choice on any described device."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path

import pytest

_FILE = Path(__file__).parents[2] / "tools" / "freeze_plans.py"
_SPEC = importlib.util.spec_from_file_location("freeze_plans", _FILE)
assert _SPEC is not None and _SPEC.loader is not None
plans = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(plans)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("device", plans.devices())
def test_plans_are_the_frozen_ones(device):
    found = list(plans.differences(device))
    assert not found, "\n".join([*found[:80], "meant so? python tools/freeze_plans.py"])


def test_no_device_is_frozen_that_nobody_describes():
    assert plans.gone() == []


def test_a_plan_that_differs_is_told(tmp_path, monkeypatch):
    device = plans.devices()[0]
    before = plans.frozen(device)
    case = next(name for name, plan in before.items() if isinstance(plan, dict))
    was = before[case]["rows"][0]["kernel"]
    before[case]["rows"][0]["kernel"] = "another.kernel"
    monkeypatch.setattr(plans, "FOLDER", tmp_path)
    monkeypatch.setattr(plans, "cases", lambda: [tuple(case.split())])
    packed = gzip.compress(json.dumps({case: before[case]}).encode())
    plans.path_of(device).write_bytes(packed)
    (tmp_path / "nobody.json.gz").write_bytes(packed)
    found = list(plans.differences(device))
    assert any(line.startswith("-") and "another.kernel" in line for line in found)
    assert any(line.startswith("+") and was in line for line in found)
    assert [path.name for path in plans.gone()] == ["nobody.json.gz"]
    plans.freeze(device)
    assert not list(plans.differences(device))
