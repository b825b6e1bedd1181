"""Plugins use `ds_runtime.api` and nothing else of the core; what it has once held, it holds."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_runtime import api

ROOT = Path(__file__).parents[2]
FROZEN = ROOT / "tests" / "golden" / "api-1.txt"
PLUGINS = sorted((ROOT / "plugins").glob("*/ds_runtime_*"))
LAZY = re.compile(r"ds_runtime(\.\w+)+(:\w+)?")


def core_names(source: str) -> Iterator[str]:
    """Modules of the core that a source names: in imports anywhere, and in lazy strings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "ds_runtime")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ds_runtime":
            yield str(node.module)
        elif isinstance(node, ast.Constant) and LAZY.fullmatch(str(node.value)):
            yield str(node.value)


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda p: p.name)
def test_a_plugin_of_the_tree_uses_the_surface_only(plugin: Path) -> None:
    files = list(plugin.rglob("*.py"))
    assert files
    named = {f"{f.relative_to(ROOT)}: {n}" for f in files for n in core_names(f.read_text())}
    assert {n for n in named if not n.endswith(": ds_runtime.api")} == set()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from ds_runtime.api import Kernel", ["ds_runtime.api"]),
        ("def f():\n    from ds_runtime.ops.contract import Facts", ["ds_runtime.ops.contract"]),
        ("import ds_runtime.plugins.manager as p", ["ds_runtime.plugins.manager"]),
        ("from ds_runtime import LLM", ["ds_runtime"]),
        (
            "x = 'ds_runtime.ops.reference.norm:rms_norm'",
            ["ds_runtime.ops.reference.norm:rms_norm"],
        ),
        ("import ds_runtime_acme\n'''ds_runtime.api is the surface'''", []),
    ],
)
def test_a_name_of_the_core_is_seen(source: str, found: list[str]) -> None:
    assert list(core_names(source)) == found


def test_every_name_of_the_surface_is_there() -> None:
    assert len(set(api.__all__)) == len(api.__all__) == len(dir(api))
    for name in api.__all__:
        assert getattr(api, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Wieght'"):
        api.Wieght  # noqa: B018


def test_no_name_of_the_surface_has_left() -> None:
    """The names of plugin interface 1: more may come, none may go before interface 3."""
    frozen = set(FROZEN.read_text().split())
    assert len(frozen) > 40
    assert frozen <= set(api.__all__)


def test_importing_the_surface_imports_no_torch() -> None:
    code = "import sys, ds_runtime.api; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
