"""Which packages for Intel GPUs are installed, and what they export. Torch-free.

None of them is imported to find out: importing loads SYCL and wants a device. A function is there
if its definition is in the text of the package's Python, an op if its schema is in the binary that
registers it. Found packages and functions become device features: "vllm_xpu_kernels.XpuFusedMoe".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ds_runtime.api import Fixable, Library, exports, install_command, installed

INDEX = "https://download.pytorch.org/whl/xpu"
# On no index: the extra cannot bring it.
INSTALL_SGL = "install a wheel of sgl-kernel-xpu from its releases (docs/install.md)"
OLDEST = {"torch": (2, 13), "vllm-xpu-kernels": (0, 1, 16)}  # the releases that were read
IPEX = "intel-extension-for-pytorch"
IPEX_STATUS = "not used: its maintenance ended in March 2026, and torch has the device itself"


def install() -> str:
    """What brings torch's build for these devices, and the extra's packages."""
    return f"pip install torch==2.14.0 --index-url {INDEX} && {install_command('xpu')}"


VLLM = Library(
    "vllm_xpu_kernels",
    ("vllm-xpu-kernels",),
    (
        exports.text("XpuFusedMoe", "fused_moe_interface.py", "class XpuFusedMoe"),
        exports.text("per_token_group_fp8_quant", "_C.*so", "per_token_group_fp8_quant("),
        exports.text("indexer_k_quant_and_cache", "_C.*so", "indexer_k_quant_and_cache("),
        exports.text("fp8_paged_mqa_logits", "_xpu_C.*so", "fp8_paged_mqa_logits("),
    ),
    install,
)
SGL = Library(
    "sgl_kernel",
    ("sglang-kernel-xpu", "sgl-kernel"),
    (
        exports.text("flash_mla_decode", "attention.py", "def flash_mla_decode("),
        exports.text("flash_mla_sparse_fwd", "attention.py", "def flash_mla_sparse_fwd("),
    ),
    INSTALL_SGL,
    ours=lambda folder: exports.holds(folder, "attention.py", '== "xpu"'),
    other=Fixable(
        "the installed sgl_kernel is the build for NVIDIA GPUs", f"uninstall it, and {INSTALL_SGL}"
    ),
)
TRITON = Library("triton", ("pytorch-triton-xpu", "triton-xpu", "triton"), install=install)
TORCH = Library(
    "torch",
    exports=(
        exports.text("scaled_mm", "nn/functional.py", "def scaled_mm("),
        exports.text("XPUGraph", "xpu/graphs.py", "class XPUGraph"),
    ),
    install=install,
)
LIBRARIES = (VLLM, SGL, TRITON)


def features() -> frozenset[str]:
    """Features of the packages that are installed here."""
    return frozenset().union(*(library.features() for library in (*LIBRARIES, TORCH)))


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
    yield from (library.report(version) for library in LIBRARIES)
    have = version(IPEX)
    yield IPEX, f"{have}, {IPEX_STATUS}" if have else f"not installed, and {IPEX_STATUS}"
