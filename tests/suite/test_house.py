"""The table of the code's size and shape, and its limits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import house


def test_circles_are_found_whole_and_once():
    imports = {"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": [], "e": ["f"], "f": ["e"], "g": ["a"]}
    assert house.circles(imports) == [["a", "b", "c"], ["e", "f"]]
    assert house.circles({"a": ["b"], "b": []}) == []


def test_imports_for_types_and_inside_functions_count(tmp_path, monkeypatch):
    package = tmp_path / "ringed"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text("def f():\n    from ringed import two\n    return two\n")
    lines = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ringed import one\n"
    (package / "two.py").write_text(lines)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(house, "ROOT", tmp_path)
    assert house.circles(house.imports(["ringed"])) == [["ringed.one", "ringed.two"]]


def test_this_tree_is_within_its_limits():
    found = house.figures()
    assert found["core-lines"][0] > 1000 and found["plugins-lines"][0] > 1000
    for name, limit in house.limits().items():
        assert found[name][0] <= limit, name


def test_a_limit_that_is_exceeded_fails(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["house", "--check"])
    monkeypatch.setattr(house, "figures", lambda: {"core-lines": (10, ""), "circles": (2, "")})
    monkeypatch.setattr(house, "limits", lambda: {"core-lines": 9})
    assert house.main() == 1
    assert "core-lines is 10" in capsys.readouterr().err
    monkeypatch.setattr(house, "limits", lambda: {"core-lines": 10})
    assert house.main() == 0
    monkeypatch.setattr(house, "limits", lambda: {"core-line": 10})
    with pytest.raises(SystemExit, match="core-line: there are"):
        house.main()


def test_a_long_file_says_why_or_is_listed(tmp_path, monkeypatch):
    for room in ("core", "kit", "plugins"):
        (tmp_path / room).mkdir()
    long = "x = 1\n" * (house.LONG + 1)
    (tmp_path / "core" / "long.py").write_text(long)
    (tmp_path / "core" / "short.py").write_text(long[6:])
    (tmp_path / "kit" / "whole.py").write_text(f"# {house.REASON}: one table.\n{long}")
    (tmp_path / "plugins" / "late.py").write_text(f"{long}# {house.REASON}\n")
    found = house.long_files(tmp_path)
    assert found == {"core/long.py", "plugins/late.py"}


def test_the_list_of_files_to_split_can_only_shrink():
    """A file that is listed without need fails as well as one that is not listed."""
    found = house.figures()
    assert found["long-files"] == found["split-but-listed"] == (0, "")
    assert {"long-files", "split-but-listed"} <= house.limits().keys()
    assert not [path for path in house.to_split() if not (house.ROOT / path).exists()]


def test_no_two_test_files_have_one_name():
    """pytest imports them by their names alone."""
    tests = Path(__file__).parents[1]
    names = Counter(p.name for p in tests.rglob("test_*.py") if "golden" not in p.parts)
    assert not [name for name, count in names.items() if count > 1]
