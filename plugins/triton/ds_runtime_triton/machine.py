"""What functions without facts know of the device they run on: its architecture's name."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files


@cache
def architecture() -> str:
    """The `arch` of the current device, from what Triton compiles for and configs/targets.json.

    Empty in the interpreter, and for targets that nobody tuned for.
    """
    from triton import knobs
    from triton.runtime import driver

    if knobs.runtime.interpret:
        return ""
    target = driver.active.get_current_target()
    names = json.loads((files("ds_runtime_triton") / "configs" / "targets.json").read_text())
    return str(names.get(f"{target.backend} {target.arch}", ""))


_CORES = ("multiprocessor_count", "num_vectorcore", "num_aicore")


@cache
def cores() -> int:
    """Multiprocessors of the current device, by any of the names that drivers have for them; 4 in
    the interpreter, and where a driver does not say."""
    from triton import knobs
    from triton.runtime import driver

    if knobs.runtime.interpret:
        return 4
    device = driver.active.get_current_device()
    known = driver.active.utils.get_device_properties(device)
    return int(next((known[name] for name in _CORES if name in known), 4))
