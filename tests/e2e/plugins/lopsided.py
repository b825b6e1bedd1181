"""A plugin whose kernel only child processes accept, so that ranks decide differently."""

from __future__ import annotations

import multiprocessing

from ds_runtime.api import OPS, Facts, Kernel, hookimpl


def _refuse(facts: Facts) -> str | None:
    return "not in the first process" if multiprocessing.parent_process() is None else None


@hookimpl
def ds_ops(facts: Facts) -> list[Kernel]:
    silu = "ds_runtime.ops.reference.activation:silu_mul"
    return [Kernel(OPS["silu_mul"], silu, "lopsided", rank=99, refuse=_refuse)]
