"""Which of the optional libraries are installed, and what they export. Torch-free.

None of them is imported to find out: that takes seconds, and some want a GPU for it. Names are
read from the text of a package's __init__.py, because releases of one library differ in what they
hold. Found libraries and functions become device features: "flashinfer", "deep_gemm.fp8_gemm_nt";
so does "nvcc", which some of them run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ds_runtime.api import exported_names, install_command, installed, package_folder


@dataclass(frozen=True, slots=True)
class Library:
    """An importable package, and the distributions that may bring it, best first.

    parts: (module, pattern) of modules inside whose names count too, where a file of the pattern
    lies in the package: a module may be there without its binary.
    """

    module: str
    distributions: tuple[str, ...]
    parts: tuple[tuple[str, str], ...] = ()


LIBRARIES = (
    Library("deep_gemm", ("sgl-deep-gemm",)),
    Library("flash_mla", ("sgl-flash-mla",)),
    Library(
        "flashinfer",
        ("flashinfer-python",),
        (("mla", "*"), ("fused_moe", "*"), ("gemm", "*"), ("cute_dsl", "*")),
    ),
    Library("sgl_kernel", ("sglang-kernel", "sgl-kernel"), (("flash_attn", "flash_ops*"),)),
    Library("triton", ("triton",)),
    Library("cuda.bindings", ("cuda-bindings",)),
)
EXTRA = "cuda"  # that `install_command` names
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


def report(
    version: Callable[[str], str | None] = installed, environ: Mapping[str, str] = os.environ
) -> Iterator[tuple[str, str]]:
    """(library, which version of which package, or that it is not installed), then nvcc."""
    for library in LIBRARIES:
        found = [f"{d} {v}" for d in library.distributions if (v := version(d)) is not None]
        yield library.module, ", ".join(found) or f"not installed: {install_command(EXTRA)}"
    yield NVCC, str(nvcc(environ) or f"not found, which {' and '.join(COMPILED)} need: {TOOLKIT}")


@cache
def features() -> frozenset[str]:
    """Features of the libraries that are installed here."""
    return frozenset(find())


def find(
    folder: Callable[[str], Path | None] = package_folder,
    version: Callable[[str], str | None] = installed,
    environ: Mapping[str, str] = os.environ,
) -> Iterator[str]:
    """Arguments stand for the environment in tests."""
    if nvcc(environ) is not None:
        yield NVCC
    if folder(JIT_CACHE) is not None:
        yield JIT_CACHE
    for library in LIBRARIES:
        brought = [d for d in library.distributions if version(d) is not None]
        where = folder(library.module)
        if where is None:
            continue
        yield library.module
        if len(brought) > 1:  # both wrote into one folder: neither is whole
            yield f"{library.module}:mixed"
        yield from (f"{library.module}.{name}" for name in exported_names(where))
        for part, pattern in library.parts:
            if any(where.glob(pattern)):
                yield from (f"{library.module}.{part}.{n}" for n in exported_names(where, part))
