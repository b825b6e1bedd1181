"""What start-up costs: the plugin layer, and a plan for a described device, in fresh processes.

    python benchmarks/start_up.py            # a line of JSON per figure

The layer: find every installed plugin, try it in a copy of the process, load it, ask for platforms
and offers; without the interpreter's start and the import of the core. The plan: the whole command,
interpreter included. Seconds of wall and of processor time, the least, median and most of the runs.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time

from ds_runtime_bench.record import environment

RUNS = 15
LAYER = """
import sys, time
from ds_runtime.ops.contract import Dims, Facts
from ds_runtime.plugins.isolate import look
from ds_runtime.plugins.manager import installed_plugins, load_plugins
begin = time.perf_counter()
installed = installed_plugins()
failed = look(installed)
plugins = load_plugins(failed=failed, installed=installed)
works = [p for p, _ in plugins.platforms().values() if p is not None]
plugins.offers(Facts(works[0].info(), Dims({"kv_lora": 512, "qk_rope": 64, "heads": 4})))
assert not failed and "torch" not in sys.modules
print(time.perf_counter() - begin, len(plugins.reports))
"""


def spread(values: list[float]) -> dict[str, float]:
    found = (min(values), statistics.median(values), max(values))
    return {k: round(v, 4) for k, v in zip(("least", "median", "most"), found, strict=True)}


def processor_time() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def ran(*args: str) -> tuple[float, float, str]:
    """(wall seconds, processor seconds, output) of a fresh interpreter."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    spent, begin = processor_time(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, *args], env=env, check=True, capture_output=True, text=True
    )
    return time.perf_counter() - begin, processor_time() - spent, done.stdout


def main() -> None:
    """Print the figures."""
    plan = ("-m", "ds_runtime", "plan", "--device", "h200", "--model", "demo", "--json")
    ran("-c", LAYER), ran(*plan)  # their bytecode is written
    layer = [ran("-c", LAYER)[2].split() for _ in range(RUNS)]
    plans = [ran(*plan) for _ in range(RUNS)]
    about = {"runs": RUNS, "plugins": int(layer[0][1]), "environment": environment()}
    figures = {
        "plugin layer": {"wall_s": spread([float(wall) for wall, _ in layer])},
        "plan --device h200": {
            "wall_s": spread([wall for wall, _, _ in plans]),
            "processor_s": spread([used for _, used, _ in plans]),
        },
    }
    for what, figure in figures.items():
        print(json.dumps({"what": what, **figure, **about}))


if __name__ == "__main__":
    main()
