"""The triton plugin: a provider of portable kernels for every op. It brings no platform."""

from __future__ import annotations

from collections.abc import Mapping

from ds_runtime.api import Refusal, Spelling, installed, nothing, plugin

PACKAGES = ("triton", "pytorch-triton-rocm", "pytorch-triton-xpu", "triton-ascend")

_SPLITS = "a kernel divides the work by its shape"
FLAGS: Mapping[str, str | Spelling] = {
    "--triton-attention-reduce-in-fp32": nothing("is always so here"),
    **dict.fromkeys(
        (
            "--triton-attention-num-kv-splits",
            "--triton-attention-split-tile-size",
            "--dsa-triton-union",
        ),
        nothing(_SPLITS, "one"),
    ),
}


def probe(packages: tuple[str, ...] = PACKAGES) -> Refusal | None:
    """Whether a Triton compiler is installed; what it makes code for is the platform's to say."""
    if any(installed(name) for name in packages):
        return None
    return Refusal(
        "not installed", "no Triton compiler is installed; it comes with torch for a GPU platform"
    )


hooks = plugin(
    probe="ds_runtime_triton:probe", offers="ds_runtime_triton.kernels:offers", flags=FLAGS
)
