"""The xpu plugin: what it brings. Decides without torch; packages load when they are bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ds_runtime.api import Change, Facts, plugin


def defaults(facts: Facts) -> Sequence[Change]:
    """Wishes for settings on Intel's GPUs."""
    if not facts.device.arch.startswith("xe"):
        return []
    from ds_runtime_xpu.kernels import FP8_SCORES

    changes = []
    wished = replace(facts, index_dtype="float8_e4m3fn")
    if "index_topk" in facts.dims and (said := FP8_SCORES.refuse(wished)) is not None:
        why = f"nothing here scores FP8 index keys: {FP8_SCORES.name}: {said}"
        changes = [Change("index_cache_dtype", facts.dtype, why)]
    return [
        *changes,
        Change("page_size", 64, "decode and index kernels read whole pages of 64 tokens"),
        Change("max_step_tokens", 4096, "a GPU is idle below thousands of tokens"),
        Change("chunked_prefill_size", 4096, "a GPU is idle below thousands of tokens"),
    ]


hooks = plugin(
    platform="ds_runtime_xpu.platform:XpuPlatform",
    probe="ds_runtime_xpu.platform:probe",
    offers="ds_runtime_xpu.kernels:OFFERS",
    diagnose="ds_runtime_xpu.software:report",
    defaults=defaults,
    backends={"attention_backend": {"intel_xpu": "sgl_xpu"}},
)
