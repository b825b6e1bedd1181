"""Which packages for Intel GPUs are installed, and what they export. Torch-free.

None of them is imported to find out: importing loads SYCL and wants a device. A function is there
if its definition is in the text of the package's Python, an op if its schema is in the binary that
registers it. Found packages and functions become device features: "vllm_xpu_kernels.XpuFusedMoe".
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ds_runtime.api import install_command, installed, package_folder

INDEX = "https://download.pytorch.org/whl/xpu"
# On no index: the extra cannot bring it.
INSTALL_SGL = "install a wheel of sgl-kernel-xpu from its releases (docs/install.md)"
OLDEST = {"torch": (2, 13), "vllm-xpu-kernels": (0, 1, 16)}  # the releases that were read
IPEX = "intel-extension-for-pytorch"
IPEX_STATUS = "not used: its maintenance ended in March 2026, and torch has the device itself"


def remedy(module: str) -> str:
    """What brings a module of DISTRIBUTIONS, or torch."""
    return INSTALL_SGL if module == "sgl_kernel" else install()


def install() -> str:
    """What brings torch's build for these devices, and the extra's packages."""
    return f"pip install torch==2.14.0 --index-url {INDEX} && {install_command('xpu')}"


class Export(NamedTuple):
    """A function of a package: `text` stands in a file of the pattern if it is there."""

    module: str
    pattern: str
    text: str
    name: str


DISTRIBUTIONS = {
    "vllm_xpu_kernels": ("vllm-xpu-kernels",),
    "sgl_kernel": ("sglang-kernel-xpu", "sgl-kernel"),
    "triton": ("pytorch-triton-xpu", "triton-xpu", "triton"),
}
EXPORTS = (
    Export("vllm_xpu_kernels", "fused_moe_interface.py", "class XpuFusedMoe", "XpuFusedMoe"),
    Export("vllm_xpu_kernels", "_C.*so", "per_token_group_fp8_quant(", "per_token_group_fp8_quant"),
    Export("vllm_xpu_kernels", "_C.*so", "indexer_k_quant_and_cache(", "indexer_k_quant_and_cache"),
    Export("vllm_xpu_kernels", "_xpu_C.*so", "fp8_paged_mqa_logits(", "fp8_paged_mqa_logits"),
    Export("sgl_kernel", "attention.py", "def flash_mla_decode(", "flash_mla_decode"),
    Export("sgl_kernel", "attention.py", "def flash_mla_sparse_fwd(", "flash_mla_sparse_fwd"),
    Export("sgl_kernel", "attention.py", '== "xpu"', "xpu"),
    Export("torch", "nn/functional.py", "def scaled_mm(", "scaled_mm"),
    Export("torch", "xpu/graphs.py", "class XPUGraph", "XPUGraph"),
)


def holds(folder: Path, pattern: str, text: str) -> bool:
    """Whether a file of the pattern has this text."""
    for path in sorted(folder.glob(pattern)):
        with path.open("rb") as file:
            try:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                    if mapped.find(text.encode()) >= 0:
                        return True
            except ValueError:  # an empty file cannot be mapped
                continue
    return False


def find(folder: Callable[[str], Path | None] = package_folder) -> Iterator[str]:
    """Features of what is installed; the argument stands for the environment in tests."""
    places = {module: folder(module) for module in (*DISTRIBUTIONS, "torch")}
    yield from (module for module, place in places.items() if place and module != "torch")
    for module, pattern, text, name in EXPORTS:
        place = places[module]
        if place is not None and holds(place, pattern, text):
            yield f"{module}.{name}"


@cache
def features() -> frozenset[str]:
    """Features of the packages that are installed here."""
    return frozenset(find())


def too_old(package: str, version: str) -> str | None:
    """A sentence where an installed release is older than those that this plugin knows."""
    wanted = OLDEST.get(package)
    digits = version.partition("+")[0].split(".")
    have = tuple(int(d) for d in digits[: len(wanted or ())] if d.isdigit())
    if wanted is None or have >= wanted:
        return None
    return f"{package} {version} is older than {'.'.join(map(str, wanted))}"


def report(version: Callable[[str], str | None] = installed) -> Iterator[tuple[str, str]]:
    """(package, which version, or that it is not installed)."""
    for module, names in DISTRIBUTIONS.items():
        found = [f"{d} {v}" for d in names if (v := version(d)) is not None]
        yield module, ", ".join(found) or f"not installed: {remedy(module)}"
    have = version(IPEX)
    yield IPEX, f"{have}, {IPEX_STATUS}" if have else f"not installed, and {IPEX_STATUS}"
