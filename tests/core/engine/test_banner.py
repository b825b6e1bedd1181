"""What a server prints once its engine is ready: columns that do not run together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ds_runtime.engine.banner import op_lines
from ds_runtime.ops.table import OPS


@pytest.mark.parametrize("name", sorted(OPS))
def test_an_op_and_its_kernel_are_columns(name: str) -> None:
    row = SimpleNamespace(op=name)
    decision = SimpleNamespace(op=name, kernel=f"acme.{name}")
    assembly: Any = SimpleNamespace(
        binding=SimpleNamespace(decisions=[decision]), plan=SimpleNamespace(rows=[row])
    )
    (line,) = op_lines(assembly)
    assert line.split() == ["op", name, f"acme.{name}"]
    assert line.index("acme.") == 32
