"""What pyproject.toml leaves out of wheels, asked of its patterns: a build takes minutes."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

from pathspec import GitIgnoreSpec

ROOT = Path(__file__).parents[2]
BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]


def left_out(patterns: list[str]) -> list[str]:
    """Tracked files of the packages that these patterns match."""
    packages = BUILD["wheel"]["packages"]
    listed = subprocess.run(
        ["git", "ls-files", *packages], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert len(listed.stdout.splitlines()) > 200
    return list(GitIgnoreSpec.from_lines(patterns).match_files(listed.stdout.splitlines()))


def test_no_file_of_a_package_is_left_out() -> None:
    assert left_out(BUILD["sdist"]["exclude"]) == []
    assert left_out((ROOT / ".gitignore").read_text().splitlines()) == []


def test_a_pattern_that_is_not_anchored_would_take_the_templates_tests() -> None:
    assert [Path(p).name for p in left_out(["tests"])] == [
        *("test_acme.py.tmpl", "test_acme.py.tmpl"),
        "conftest.py.tmpl",
    ]
