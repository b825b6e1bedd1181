"""The triton plugin: a provider of portable kernels. It brings no platform and offers none yet."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from ds_runtime.api import Refusal

PACKAGES = ("triton", "pytorch-triton-rocm", "pytorch-triton-xpu", "triton-ascend")


def probe(packages: tuple[str, ...] = PACKAGES) -> Refusal | None:
    """Whether a Triton compiler is installed, and that this release has no kernels for it."""
    for name in packages:
        try:
            found = f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
        return Refusal("unsupported", f"{found} is installed, but this release brings no kernels")
    return Refusal(
        "not installed", "no Triton compiler is installed; it comes with torch for a GPU platform"
    )


PROBE: Callable[[], Refusal | None] = probe
