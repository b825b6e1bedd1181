"""What is installed: AITER and TileLang, and what this AITER exports. Torch-free, nothing imported.

AITER is built from source and its functions come and go: those that are there become features of
the device, such as "aiter.mla.mla_decode_fwd". It is on no index: PyPI's `aiter` is something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from ds_runtime.api import exported_names, installed, package_folder

INSTALL = "install amd-aiter from source (docs/install.md)"
INSTALL_TILELANG = "pip install tilelang"
DISTRIBUTIONS = {"aiter": "amd-aiter", "tilelang": "tilelang", "triton": "triton"}
PARTS = (
    "mla",
    "fused_moe",
    "ops.shuffle",
    "utility.fp4_utils",
)  # of aiter, with names of their own
_MARK = "mla.py"  # which PyPI's `aiter` has not


@cache
def features() -> frozenset[str]:
    """Features of the libraries that are installed here."""
    return frozenset(find())


def find(folder: Callable[[str], Path | None] = package_folder) -> Iterator[str]:
    """`folder` stands for the environment in tests."""
    for module in ("triton", "tilelang"):
        if folder(module) is not None:
            yield module
    aiter = folder("aiter")
    if aiter is None:
        return
    if not (aiter / _MARK).is_file():
        yield "aiter:other"
        return
    yield "aiter"
    yield from (f"aiter.{name}" for name in exported_names(aiter))
    for part in PARTS:
        yield from (f"aiter.{part}.{name}" for name in exported_names(aiter, part))


def report(version: Callable[[str], str | None] = installed) -> Iterator[tuple[str, str]]:
    """(library, which version of which package, or that it is not installed)."""
    for module, distribution in DISTRIBUTIONS.items():
        found = version(distribution)
        yield module, f"{distribution} {found}" if found else f"{distribution} is not installed"
