"""The table of the code's size and shape, and its limits."""

from __future__ import annotations

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
