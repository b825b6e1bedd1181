"""The triton plugin: a provider of portable kernels for every op. It brings no platform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

from ds_runtime.api import Facts, Kernel, Refusal, hookimpl

PACKAGES = ("triton", "pytorch-triton-rocm", "pytorch-triton-xpu", "triton-ascend")


def probe(packages: tuple[str, ...] = PACKAGES) -> Refusal | None:
    """Whether a Triton compiler is installed; what it makes code for is the platform's to say."""
    for name in packages:
        try:
            version(name)
        except PackageNotFoundError:
            continue
        return None
    return Refusal(
        "not installed", "no Triton compiler is installed; it comes with torch for a GPU platform"
    )


PROBE: Callable[[], Refusal | None] = probe


@hookimpl
def ds_attention(facts: Facts) -> Sequence[Kernel]:
    from ds_runtime_triton.kernels import ATTENTION

    return ATTENTION


@hookimpl
def ds_moe(facts: Facts) -> Sequence[Kernel]:
    from ds_runtime_triton.kernels import MOE

    return MOE


@hookimpl
def ds_quant_loaders(facts: Facts) -> Sequence[Kernel]:
    from ds_runtime_triton.kernels import LINEAR

    return LINEAR


@hookimpl
def ds_topk(facts: Facts) -> Sequence[Kernel]:
    from ds_runtime_triton.kernels import TOPK

    return TOPK


@hookimpl
def ds_ops(facts: Facts) -> Sequence[Kernel]:
    from ds_runtime_triton.kernels import SMALL

    return SMALL
