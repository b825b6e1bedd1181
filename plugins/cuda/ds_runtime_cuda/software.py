"""Which of the optional libraries are installed, and what they export. Torch-free.

None of them is imported to find out: that takes seconds, and some want a GPU for it. Names are
read from the text of a package's __init__.py, because releases of one library differ in what they
hold. Found libraries and functions become device features: "flashinfer", "deep_gemm.fp8_gemm_nt".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ds_runtime.api import exported_names, installed, package_folder


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
INSTALL = 'pip install "ds-runtime[cuda]"'


def report(version: Callable[[str], str | None] = installed) -> Iterator[tuple[str, str]]:
    """(library, which version of which package, or that it is not installed)."""
    for library in LIBRARIES:
        found = [f"{d} {v}" for d in library.distributions if (v := version(d)) is not None]
        yield library.module, ", ".join(found) or f"not installed: {INSTALL}"


@cache
def features() -> frozenset[str]:
    """Features of the libraries that are installed here."""
    return frozenset(find())


def find(
    folder: Callable[[str], Path | None] = package_folder,
    version: Callable[[str], str | None] = installed,
) -> Iterator[str]:
    """Arguments stand for the environment in tests."""
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
