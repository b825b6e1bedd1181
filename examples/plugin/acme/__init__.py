# acme/__init__.py: decides, and imports no torch
from __future__ import annotations

from ds_runtime.api import OPS, RANK_SPECIALISED, Facts, Kernel, hookimpl


def refuse(facts: Facts) -> str | None:
    return None if facts.device.type == "cpu" else f"runs on a cpu, not on {facts.device.type}"


@hookimpl
def ds_ops(facts: Facts) -> list[Kernel]:
    return [Kernel(OPS["silu_mul"], "acme.kernels:silu_mul", "acme", RANK_SPECIALISED, refuse)]
