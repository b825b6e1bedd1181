"""The pictures of the pages: small enough to load, and a terminal's lines as they were printed."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pictures

SVG = "{http://www.w3.org/2000/svg}"
PRINTED = st.characters(codec="utf-8", exclude_categories=("C", "Z"))
LINES = st.lists(st.text(PRINTED, max_size=2 * pictures.COLUMNS), max_size=40)


@pytest.mark.parametrize("name", ["dashboard.png", "plan.svg"])
def test_a_picture_is_shown_and_small(name: str) -> None:
    readme = (pictures.DOCS.parent / "README.md").read_text()
    assert f"](docs/{name})" in readme
    assert 0 < (pictures.DOCS / name).stat().st_size <= pictures.LARGEST


@given(st.text(PRINTED, min_size=1, max_size=60), LINES)
def test_a_terminal_has_each_line_in_its_order(command: str, lines: list[str]) -> None:
    """Whatever the lines hold, the picture is XML; a line that is too long is cut with a mark."""
    root = ElementTree.fromstring(pictures.terminal(command, lines))
    prompt, *shown = root.findall(f"{SVG}text")
    assert prompt.text == f"$ {command}"
    heights = [float(t.get("y", "0")) for t in (prompt, *shown)]
    assert heights == sorted({*heights}) and heights[-1] < float(root.get("viewBox", "").split()[3])
    for line, text in zip(lines, shown, strict=True):
        said = text.text or ""
        assert len(said) <= pictures.COLUMNS
        assert said == line or (line.startswith(said[:-1]) and said[-1] == "…")


def test_a_picture_that_is_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    with pytest.raises(SystemExit, match=r"a\.png: 200001 bytes, the limit is 200000: show less"):
        pictures.written(path, bytes(pictures.LARGEST + 1))
    assert not path.exists()
    pictures.written(path, b"x")
    assert path.read_bytes() == b"x"
