"""The CUDA plugin: what it brings. Decides without torch; libraries load when they are bound."""

from __future__ import annotations

from collections.abc import Sequence

from ds_runtime.api import Change, Facts, plugin
from ds_runtime_cuda import spellings

_AMPLE = 64 << 30  # bytes of a device beside whose weights activations do not count


def _step_tokens(facts: Facts) -> Change:
    """Grouped matmuls take 128 rows of an expert at a time: long steps fill them."""
    if facts.device.memory < _AMPLE:
        return Change("max_step_tokens", 8192, "a GPU is idle below thousands of tokens")
    return Change("max_step_tokens", 16384, "experts fill their tiles with this number of tokens")


def _captured_prompts(facts: Facts) -> list[Change]:
    """A host launches a layer op by op in the time of some 1,000 tokens of V3, and of more where a
    token's products are smaller. Several ranks capture before they serve: they would start much
    later for it."""
    tokens = min(8192, int(1024 * (7168 / facts.dims.get("hidden", 7168)) ** 2) // 128 * 128)
    if facts.device.memory < _AMPLE or facts.ranks.get("tp", 1) > 1 or tokens <= 1024:
        return []
    why = "the device computes this number of tokens in the time of their launches op by op"
    return [Change("max_prefill_graph_size", tokens, why)]


def _beside(facts: Facts) -> list[Change]:
    """By `branch`, which gained on an H200 (benchmarks/results/device_decode.md), but for weights
    that are not quantised: experts in 12 bits are faster with slots for few requests. Whether they
    are held so is not known yet, and where nothing is captured they are apart, too: a plan does not
    hang on that."""
    if facts.device.arch != "sm90" or not facts.quantized:
        return []
    why = "shared experts run during the choice of routed ones, which leaves the memory idle"
    return [Change("fusion", ("shared_experts=off",), why)]


def defaults(facts: Facts) -> Sequence[Change]:
    """Wishes for settings on NVIDIA's GPUs."""
    if not facts.device.arch.startswith("sm"):  # others' GPUs have torch's type "cuda", too
        return []
    from ds_runtime_cuda import blackwell

    keys, fp8 = list[Change](), "float8_e4m3fn"
    asked = "index_topk" in facts.dims and facts.index_dtype == fp8
    if asked and fp8 not in facts.device.fast_dtypes:
        keys.append(Change("index_cache_dtype", facts.dtype, f"{facts.device.arch} has no {fp8}"))
    return [
        *blackwell.defaults(facts),
        *_beside(facts),
        *_captured_prompts(facts),
        *keys,
        Change("page_size", 64, "decode kernels read whole pages of 64 tokens"),
        _step_tokens(facts),
        Change("chunked_prefill_size", 8192, "a GPU is idle below thousands of tokens"),
    ]


hooks = plugin(
    platform="ds_runtime_cuda.platform:CudaPlatform",
    probe="ds_runtime_cuda.platform:probe",
    offers="ds_runtime_cuda.kernels:OFFERS",
    diagnose="ds_runtime_cuda.software:report",
    defaults=defaults,
    flags=spellings.FLAGS,
    backends=spellings.BACKENDS,
    environment=spellings.ENVIRONMENT,
)
