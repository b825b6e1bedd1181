"""What kernels want besides torch: optional libraries, and nvcc, which some of them run.

What is there becomes a feature of the device: "flashinfer", "deep_gemm.fp8_gemm_nt", "nvcc".
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path

from ds_runtime.api import Library, exports, install_command, package_folder

EXTRA = "cuda"  # that `install_command` names
_INSTALL = partial(install_command, EXTRA)
DEEP_GEMM = Library("deep_gemm", ("sgl-deep-gemm",), (exports.names(),), _INSTALL)
FLASH_MLA = Library("flash_mla", ("sgl-flash-mla",), (exports.names(),), _INSTALL)
FLASHINFER = Library(
    "flashinfer",
    ("flashinfer-python",),
    tuple(map(exports.names, ("", "mla", "fused_moe", "gemm", "cute_dsl"))),
    _INSTALL,
)
SGL_KERNEL = Library(
    "sgl_kernel",
    ("sglang-kernel", "sgl-kernel"),
    (exports.names(), exports.names("flash_attn", beside="flash_ops*")),
    _INSTALL,
)
TRITON = Library("triton", install=_INSTALL)
BINDINGS = Library("cuda.bindings", ("cuda-bindings",), install=_INSTALL)
LIBRARIES = (DEEP_GEMM, FLASH_MLA, FLASHINFER, SGL_KERNEL, TRITON, BINDINGS)
NVCC = "nvcc"
TOOLKIT = "install a CUDA toolkit with nvcc and set CUDA_HOME to it"
JIT_CACHE = "flashinfer_jit_cache"  # kernels of FlashInfer that were compiled before
# Libraries whose kernels nvcc compiles when they are first called, and what spares it.
COMPILED = {"deep_gemm": frozenset({NVCC}), "flashinfer": frozenset({NVCC, JIT_CACHE})}


def nvcc(environ: Mapping[str, str] = os.environ, usual: str = "/usr/local/cuda") -> Path | None:
    """The compiler, where the libraries look for it: `find_cuda_home` of sgl-deep-gemm 0.2.3.post2
    and `get_cuda_path` of flashinfer-python 0.7.2.post1 take the first of these that is set or
    there."""
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    found = None if home else shutil.which(NVCC, path=environ.get("PATH", ""))
    file = Path(found) if found else Path(home or usual) / "bin" / NVCC
    return file if file.is_file() else None


def report(environ: Mapping[str, str] = os.environ) -> Iterator[tuple[str, str]]:
    """(library, which version of which package, or that it is not installed), then nvcc."""
    yield from (library.report() for library in LIBRARIES)
    yield NVCC, str(nvcc(environ) or f"not found, which {' and '.join(COMPILED)} need: {TOOLKIT}")


@cache
def features() -> frozenset[str]:
    """Features of what is installed here."""
    return frozenset(compilers()).union(*(library.features() for library in LIBRARIES))


def compilers(
    environ: Mapping[str, str] = os.environ,
    folder: Callable[[str], Path | None] = package_folder,
) -> Iterator[str]:
    """What gives libraries their kernels: nvcc, and those that were compiled before. Arguments
    stand for the environment in tests."""
    if nvcc(environ) is not None:
        yield NVCC
    if folder(JIT_CACHE) is not None:
        yield JIT_CACHE
