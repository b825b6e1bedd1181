"""The xpu plugin: hooks only. Decides without torch; packages load when they are bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ds_runtime.api import Change, Facts, Kernel, Platform, Refusal, hookimpl


def probe() -> Refusal | None:
    """Why this plugin cannot serve here, found without torch or vendor packages."""
    from ds_runtime_xpu.platform import probe as look

    return look()


def diagnose() -> list[tuple[str, str]]:
    """What `ds-runtime doctor` says of the optional packages, where there is a GPU for them."""
    from ds_runtime_xpu import software

    return [] if probe() is not None else list(software.report())


PROBE: Callable[[], Refusal | None] = probe
DIAGNOSE: Callable[[], list[tuple[str, str]]] = diagnose
BACKENDS = {"attention_backend": {"intel_xpu": "sgl_xpu"}}


@hookimpl
def ds_platform() -> Platform | Refusal:
    from ds_runtime_xpu.platform import XpuPlatform

    return probe() or XpuPlatform()


@hookimpl
def ds_attention(facts: Facts) -> Sequence[Kernel]:
    from ds_runtime_xpu.kernels import ATTENTION

    return ATTENTION


@hookimpl
def ds_moe(facts: Facts) -> Sequence[Kernel]:
    from ds_runtime_xpu.kernels import MOE

    return MOE


@hookimpl
def ds_quant_loaders(facts: Facts) -> Sequence[Kernel]:
    from ds_runtime_xpu.kernels import LINEAR

    return LINEAR


@hookimpl
def ds_defaults(facts: Facts) -> Sequence[Change]:
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
