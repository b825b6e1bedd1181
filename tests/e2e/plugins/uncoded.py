"""A plugin with the FP8 arithmetic of the reference, whose experts take no codes."""

from __future__ import annotations

from ds_runtime.api import Facts, Kernel, hookimpl
from ds_runtime.ops.reference import EXPERTS_FP8_W8A8
from ds_runtime.ops.reference.matrices.coded_experts import Fp8W8A8Experts


class Uncoded:
    def __init__(self, facts):
        self._own = Fp8W8A8Experts(facts)
        self.pack, self.apply = self._own.pack, self._own.apply


@hookimpl
def ds_ops(facts: Facts) -> list[Kernel]:
    from dataclasses import replace

    given = {"fn": "uncoded:Uncoded", "provider": "uncoded"}
    promises = replace(EXPERTS_FP8_W8A8.promises, takes_codes=False)
    return [replace(EXPERTS_FP8_W8A8, promises=promises, **given)]
