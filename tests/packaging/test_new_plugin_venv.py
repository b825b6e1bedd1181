"""A new plugin in a fresh virtual environment: installed without network, it passes as written."""

from __future__ import annotations

import json
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from ds_runtime_kit.scaffold import write_plugin

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("kind", "passed"), [("platform", 19), ("loader", 7)])
def test_it_installs_and_passes_as_written(kind: str, passed: int, tmp_path: Path) -> None:
    package = write_plugin("septima", tmp_path, kind=kind)
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    # What this environment has, editable installs included, stands in for an index.
    folders = [*site.getsitepackages(), *(p for p in sys.path if p.endswith("site-packages"))]
    lines = [f"import site; site.addsitedir({p!r})" for p in dict.fromkeys(folders)]
    (packages / "parent.pth").write_text("\n".join(lines) + "\n")

    def run(*args: str) -> str:
        done = subprocess.run(
            [str(python), "-m", *args], cwd=package, capture_output=True, text=True, timeout=250
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    options = "--quiet --no-build-isolation --no-deps --no-index --disable-pip-version-check"
    run("pip", "install", *options.split(), "-e", ".")
    assert json.loads(run("ds_runtime", "plan", "--json"))["platform"] == "cpu"
    if kind == "platform":
        named = run("ds_runtime", "plan", "--json", "--platform", "septima")
        assert json.loads(named)["platform"] == "septima"
    assert f"{passed} passed" in run("pytest", "-q", "-p", "no:cacheprovider")
