"""The rocm plugin: what it brings. Decides without torch; libraries load when they are bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ds_runtime.api import Change, Facts, Spelling, nothing, plugin

_STEPS = "a step is a captured graph of kernels"
FLAGS: Mapping[str, str | Spelling] = {
    **dict.fromkeys(
        (
            "--enable-aiter-allreduce-fusion",
            "--disable-aiter-allreduce-fusion-in-prefill",
            "--disable-aiter-allreduce-fusion-in-decode",
        ),
        nothing("what ds-runtime tune comm has measured decides how ranks add up"),
    ),
    "--enable-amd-monokernel": nothing(_STEPS),
    "--monokernel": nothing(_STEPS),
    "--monokernel-backend": nothing(_STEPS, "one"),
}


def defaults(facts: Facts) -> Sequence[Change]:
    """Wishes for settings on AMD's GPUs."""
    if not facts.device.arch.startswith("gfx"):  # others' GPUs have torch's type "cuda", too
        return []
    older = facts.device.arch == "gfx942"
    keys = Change("index_cache_dtype", facts.dtype, "gfx942 multiplies e4m3fnuz, not e4m3fn")
    return [
        *([keys] if older else []),
        Change("page_size", 64, "larger pages are fewer entries in every page table"),
        Change("max_step_tokens", 8192, "a GPU is idle below thousands of tokens"),
        Change("chunked_prefill_size", 8192, "a GPU is idle below thousands of tokens"),
    ]


hooks = plugin(
    platform="ds_runtime_rocm.platform:RocmPlatform",
    probe="ds_runtime_rocm.platform:probe",
    offers="ds_runtime_rocm.kernels:OFFERS",
    diagnose="ds_runtime_rocm.software:report",
    flags=FLAGS,
    defaults=defaults,
)
