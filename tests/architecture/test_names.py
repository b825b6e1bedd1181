"""A class name means one thing: no name twice in the core, none twice in a plugin."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core/ds_runtime"
KIT = ("bench", "testing", "convert")  # tools, which have their own words
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/ds_runtime_*/py.typed"))


def twice(files: Iterable[Path]) -> dict[str, list[Path]]:
    """Class name → the files that define it, of names with more than one definition."""
    found = defaultdict(list)
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(path)
    return {name: paths for name, paths in sorted(found.items()) if len(paths) > 1}


def test_two_classes_of_one_name_are_found(tmp_path: Path) -> None:
    first, second = tmp_path / "a.py", tmp_path / "b.py"
    first.write_text("class Place: ...\nclass Batch: ...\n")
    second.write_text("def make():\n    class Place: ...\n")
    assert twice([first, second]) == {"Place": [first, second]}


def test_no_class_name_of_the_core_means_two_things() -> None:
    files = [p for p in CORE.rglob("*.py") if p.relative_to(CORE).parts[0] not in KIT]
    assert len(files) > 100
    said = {name: [str(p.relative_to(CORE)) for p in paths] for name, paths in twice(files).items()}
    assert not said


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.name)
def test_no_class_name_of_a_plugin_means_two_things(plugin: Path) -> None:
    """Kernels of one op may be called alike: they are known by their providers' names, too, like
    `flashinfer.MlaDecode` and `flash_mla.MlaDecode`."""
    files = list(plugin.rglob("*.py"))
    source = "".join(p.read_text() for p in files)
    offers = {p.stem for p in files if f'"{p.stem}:' in source}
    said = {
        name: [str(p.relative_to(plugin)) for p in paths]
        for name, paths in twice(files).items()
        if not {p.stem for p in paths} <= offers
    }
    assert not said
