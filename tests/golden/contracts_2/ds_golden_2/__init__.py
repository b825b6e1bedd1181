"""A vendor's kernels of the second contracts: absorption from before it took rotated queries."""

from __future__ import annotations

from ds_runtime.api import OPS, RANK_SPECIALISED, Facts, Kernel, hookimpl


def _refuse(facts: Facts) -> str | None:
    if facts.device.arch != "golden2":
        return f"made for golden2, not for {facts.device.arch}"
    return None


@hookimpl
def ds_attention() -> list[Kernel]:
    return [
        Kernel(
            OPS["mla_absorb"],
            "ds_golden_2.kernels:Absorb",
            "golden_2",
            RANK_SPECIALISED,
            _refuse,
            formats=frozenset({"dense", "fp8_block"}),
            note="frozen",
        )
    ]
