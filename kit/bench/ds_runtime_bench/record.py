"""What every figure needs to be worth keeping: machine, versions, commit. Torch-free."""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_runtime._version import __version__
from ds_runtime.platform.cores import cores

if TYPE_CHECKING:
    pass


def load_format(folder: Path) -> str:
    """`dummy` for a folder that has no weights, so that they are made on the device."""
    return "auto" if any(folder.glob("*.safetensors")) else "dummy"


def environment() -> dict[str, Any]:
    """When, where and with which software; `commit` is null outside a git checkout."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {
            "processor": _processor(),
            "cores": cores(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {"python": platform.python_version(), "ds-runtime": __version__, **_packages()},
        "commit": commit(),
        **({"weights": "DUMMY"} if _dummies() else {}),
    }


def _dummies() -> bool:
    """Whether this process has decided for a model of random weights."""
    assemble = sys.modules.get("ds_runtime.assembly.assemble")
    return assemble is not None and bool(assemble.dummies)


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


class Neighbours:
    """How busy other processes keep the machine's processors while something is measured."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._start = self._now()

    def share(self, running: float = 0.0) -> float | None:
        """Share of all processor time since construction that went to others; None if unknown.

        Counts as own: this process, those that it started and waited for, and `running` seconds
        of such that still run.
        """
        then, now = self._start, self._now()
        if then is None or now is None or now[0] <= then[0]:
            return None
        total, busy, own = (b - a for a, b in zip(then, now, strict=True))
        return min(1.0, max(0.0, (busy - own - running) / total))

    def _now(self) -> tuple[float, float, float] | None:
        """(all, busy, own) processor seconds."""
        try:
            fields = self._stat.read_text().split("\n", 1)[0].split()
            user, nice, system, idle, wait, irq, soft, steal = map(int, fields[1:9])
        except (OSError, ValueError):
            return None
        busy = user + nice + system + irq + soft + steal
        tick, own = os.sysconf("SC_CLK_TCK"), os.times()
        mine = own.user + own.system + own.children_user + own.children_system
        return (busy + idle + wait) / tick, busy / tick, mine


def peak_bytes() -> int:
    """The largest resident size of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def append(path: Path, row: dict[str, Any]) -> None:
    """Add one JSON line to a results file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as out:
        out.write(json.dumps(row) + "\n")
