"""Plugin packages as pip leaves them, and commands that see them."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path


def place(package: Path, site: Path) -> None:
    """What pip leaves of an editable install: the metadata, and the folder on the path."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    points = project["entry-points"]["ds_runtime"].items()
    text = "\n".join(["[ds_runtime]", *(f"{k} = {v}" for k, v in points), ""])
    (info / "entry_points.txt").write_text(text)


def scored(package: Path) -> None:
    """Give the package's platform a score, as for devices of its own: it is the default then."""
    (path,) = package.glob("ds_runtime_*/platform.py")
    text = path.read_text()
    assert text.count("    score = -1  ") == 1
    path.write_text(text.replace("    score = -1  ", "    score = 50  "))


def environment(package: Path) -> dict[str, str]:
    path = [str(package), str(package / "metadata"), *filter(None, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def command(package: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *args],
        cwd=package.parent,
        env=environment(package),
        capture_output=True,
        text=True,
        timeout=200,
    )
