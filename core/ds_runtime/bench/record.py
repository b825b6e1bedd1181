"""What every figure needs to be worth keeping: machine, versions, commit. Torch-free."""

from __future__ import annotations

import json
import platform
import resource
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ds_runtime import __version__


def environment() -> dict[str, Any]:
    """When, where and with which software; `commit` is null outside a git checkout."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {
            "processor": _processor(),
            "cores": _cores(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {"python": platform.python_version(), "ds-runtime": __version__, **_packages()},
        "commit": commit(),
    }


def _packages() -> dict[str, str]:
    found = {}
    for name in ("torch", "transformers", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        return platform.processor()
    return platform.processor()


def _cores() -> int:
    import os

    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def commit() -> str | None:
    """The checkout's commit, with `-dirty` if tracked files differ; None without one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(
            [*command, "--abbrev=12", "--exclude=*"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def peak_bytes() -> int:
    """The largest resident size of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def append(path: Path, row: dict[str, Any]) -> None:
    """Add one JSON line to a results file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as out:
        out.write(json.dumps(row) + "\n")
