"""A vendor's kernels of the third contracts: prefill attention over whole heads."""

from __future__ import annotations

from ds_runtime.api import OPS, RANK_SPECIALISED, Facts, Kernel, hookimpl


def _refuse(facts: Facts) -> str | None:
    if facts.device.arch != "golden3":
        return f"made for golden3, not for {facts.device.arch}"
    return None


@hookimpl
def ds_attention() -> list[Kernel]:
    return [
        Kernel(
            OPS["mha_prefill"],
            "ds_golden_3.kernels:attend",
            "golden_3",
            RANK_SPECIALISED,
            _refuse,
            note="frozen",
        )
    ]
