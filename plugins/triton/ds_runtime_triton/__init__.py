"""The triton plugin: a provider of portable kernels for every op. It brings no platform."""

from __future__ import annotations

from ds_runtime.api import Refusal, installed, plugin

PACKAGES = ("triton", "pytorch-triton-rocm", "pytorch-triton-xpu", "triton-ascend")


def probe(packages: tuple[str, ...] = PACKAGES) -> Refusal | None:
    """Whether a Triton compiler is installed; what it makes code for is the platform's to say."""
    if any(installed(name) for name in packages):
        return None
    return Refusal(
        "not installed", "no Triton compiler is installed; it comes with torch for a GPU platform"
    )


hooks = plugin(probe="ds_runtime_triton:probe", offers="ds_runtime_triton.kernels:offers")
