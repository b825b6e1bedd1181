"""Every named fault turns its tests red, and without a fault they are green."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def _load() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "mutate.py"
    spec = importlib.util.spec_from_file_location("ds_mutate", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ds_mutate"] = module
    spec.loader.exec_module(module)
    return module


mutate = _load()


@pytest.fixture(scope="module")
def copy() -> Iterator[object]:
    with mutate.copied() as made:
        mutate.check_green(made, mutate.FAULTS)
        yield made


@pytest.mark.parametrize("fault", mutate.FAULTS, ids=lambda f: f.name)
def test_the_fault_is_caught(copy: object, fault: object) -> None:
    found = mutate.check_fault(copy, fault)
    assert not found.green, found.output


def test_there_are_enough_faults() -> None:
    assert len({f.name for f in mutate.FAULTS}) == len(mutate.FAULTS) >= 12
