"""The npu plugin: hooks only. Decides without torch; torch-npu loads when kernels are bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ds_runtime.api import Change, Facts, Kernel, Layout, Platform, Refusal, hookimpl


def probe() -> Refusal | None:
    """Why this plugin cannot serve here, found without torch or vendor packages."""
    from ds_runtime_npu.platform import probe as look

    return look()


PROBE: Callable[[], Refusal | None] = probe
BACKENDS = {"attention_backend": {"ascend": "npu"}, "moe_runner_backend": {"ascend": "npu"}}


@hookimpl
def ds_platform() -> Platform | Refusal:
    from ds_runtime_npu.platform import NpuPlatform

    return probe() or NpuPlatform()


@hookimpl
def ds_attention(facts: Facts) -> Sequence[Kernel | Layout]:
    from ds_runtime_npu.kernels import ATTENTION, LATENT_SPLIT

    return [LATENT_SPLIT, *ATTENTION]


@hookimpl
def ds_moe(facts: Facts) -> Sequence[Kernel]:
    from ds_runtime_npu.kernels import MOE

    return MOE


@hookimpl
def ds_topk(facts: Facts) -> Sequence[Kernel]:
    from ds_runtime_npu.kernels import TOPK

    return TOPK


@hookimpl
def ds_quant_loaders(facts: Facts) -> Sequence[Kernel]:
    from ds_runtime_npu.kernels import LINEAR

    return LINEAR


@hookimpl
def ds_ops(facts: Facts) -> Sequence[Kernel]:
    from ds_runtime_npu.kernels import SMALL

    return SMALL


@hookimpl
def ds_defaults(facts: Facts) -> Sequence[Change]:
    if facts.device.type != "npu":
        return []
    return [
        Change("page_size", 128, "attention reads pages of a multiple of 16 tokens, best of 128"),
        Change("index_cache_dtype", facts.dtype, "Ascend 910 multiplies no FP8"),
        Change("max_step_tokens", 8192, "an NPU is idle below thousands of tokens"),
        Change("chunked_prefill_size", 8192, "an NPU is idle below thousands of tokens"),
    ]
