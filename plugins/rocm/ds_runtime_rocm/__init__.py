"""The rocm plugin: hooks only. Decides without torch; libraries load when they are bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ds_runtime.api import Change, Facts, Kernel, Platform, Refusal, hookimpl


def probe() -> Refusal | None:
    """Why this plugin cannot serve here, found without torch or vendor packages."""
    from ds_runtime_rocm.platform import probe as look

    return look()


def diagnose() -> list[tuple[str, str]]:
    """What `ds-runtime doctor` says of the optional libraries, where there is a GPU for them."""
    from ds_runtime_rocm import software

    return [] if probe() is not None else list(software.report())


PROBE: Callable[[], Refusal | None] = probe
DIAGNOSE: Callable[[], list[tuple[str, str]]] = diagnose


@hookimpl
def ds_platform() -> Platform | Refusal:
    from ds_runtime_rocm.platform import RocmPlatform

    return probe() or RocmPlatform()


@hookimpl
def ds_attention(facts: Facts) -> Sequence[Kernel]:
    from ds_runtime_rocm.kernels import ATTENTION

    return ATTENTION


@hookimpl
def ds_moe(facts: Facts) -> Sequence[Kernel]:
    from ds_runtime_rocm.kernels import MOE

    return MOE


@hookimpl
def ds_topk(facts: Facts) -> Sequence[Kernel]:
    from ds_runtime_rocm.kernels import TOPK

    return TOPK


@hookimpl
def ds_quant_loaders(facts: Facts) -> Sequence[Kernel]:
    from ds_runtime_rocm.kernels import LINEAR

    return LINEAR


@hookimpl
def ds_defaults(facts: Facts) -> Sequence[Change]:
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
