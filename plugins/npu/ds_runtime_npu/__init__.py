"""The npu plugin: what it brings. Decides without torch; torch-npu loads when kernels are bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ds_runtime.api import Change, Facts, Spelling, nothing, plugin, refused

FLAGS: Mapping[str, str | Spelling] = {
    "--fuseep-mode": nothing("rows of all ranks are gathered: no other way is built yet", "one"),
    "--c128-page-size": nothing("--page-size is for all groups of the cache", "one"),
    "--msprobe-dump-config": refused(
        "is ds-runtime bisect here, which compares every op with float64", "one"
    ),
}


def defaults(facts: Facts) -> Sequence[Change]:
    """Wishes for settings on Ascend NPUs."""
    if facts.device.type != "npu":
        return []
    return [
        Change("page_size", 128, "attention reads pages of a multiple of 16 tokens, best of 128"),
        Change("index_cache_dtype", facts.dtype, "Ascend 910 multiplies no FP8"),
        Change("max_step_tokens", 8192, "an NPU is idle below thousands of tokens"),
        Change("chunked_prefill_size", 8192, "an NPU is idle below thousands of tokens"),
    ]


hooks = plugin(
    platform="ds_runtime_npu.platform:NpuPlatform",
    probe="ds_runtime_npu.platform:probe",
    offers="ds_runtime_npu.kernels:OFFERS",
    defaults=defaults,
    flags=FLAGS,
    backends={"attention_backend": {"ascend": "npu"}, "moe_runner_backend": {"ascend": "npu"}},
)
