"""Finds, checks and calls the native library. Torch-free: pointers come as integers.

The wheel brings one library per instruction set, in `_lib`. Each says by itself whether it can
run here; the best that can is loaded. Without a compiler at install time there is none, and
every kernel that needs it refuses with the sentence that `why_not` gives.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

ABI_VERSION = 1
NOT_BUILT = "native library not built: reinstall with a C++17 compiler"

_P, _I, _D = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_T = ctypes.c_int32  # dtype code, see DTYPES
DTYPES: Mapping[str, int] = {"float32": 0, "bfloat16": 1}

# As in csrc/ds_cpu.h, without the prefix `ds_cpu_`.
SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "large_pages": (_P, _I),
    "rms_norm": (_T, _T, _P, _I, _P, _D, _P, _I, _I),
    "add_rms_norm": (_T, _T, _P, _I, _P, _I, _P, _D, _P, _P, _I, _I),
    "silu_mul": (_T, _P, _I, _P, _I, _I),
    "rope": (_T, _P, _I, _I, _P, _P, _P, _I, _I, _I),
    "cache_write": (_T, _P, _I, _P, _I, _I, _P, _I, _P, _I),
    "linear_heads": (_T, _P, _I, _I, _P, _P, _I, _I, _I, _I, _I, _I),
    "mla_decode": (_T, _P, _I, _I, _P, _I, _I, _I, _P, _I, _P, _D, _P, _I, _I),
    "experts": (_T, _P, _I, _P, _P, _P, _P, _P, _P, _P, _P, _I, _I, _I, _I, _I),
}


@dataclass(frozen=True)
class Library:
    """The loaded library: `call.<name>(...)` for every name in SIGNATURES."""

    path: str
    isa: str
    score: int
    call: Any


@dataclass(frozen=True)
class NotAvailable:
    """No library can be used here, and why."""

    reason: str


class _Calls:
    """The C functions as attributes, typed once."""

    def __init__(self, dll: ctypes.CDLL) -> None:
        for name, arguments in SIGNATURES.items():
            function = getattr(dll, f"ds_cpu_{name}")
            function.argtypes = arguments
            function.restype = None
            setattr(self, name, function)


def library_folder() -> Traversable:
    """`_lib` of the installed package; an editable install keeps it apart from the sources."""
    return files("ds_runtime_cpu").joinpath("_lib")


def _candidates(folder: Traversable) -> list[Path]:
    if not folder.is_dir():
        return []
    found = [Path(str(p)) for p in folder.iterdir() if "ds_cpu_" in p.name]
    return sorted(p for p in found if p.suffix in (".so", ".dylib", ".dll"))


def _isa(path: Path) -> str:
    return path.stem.partition("ds_cpu_")[2]


def open_best(folder: Traversable) -> Library | NotAvailable:
    """The library with the highest score of those in `folder` that can run here."""
    found = _candidates(folder)
    if not found:
        return NotAvailable(NOT_BUILT)
    problems: list[str] = []
    best: tuple[int, Path, _Calls] | None = None
    for path in found:
        try:
            dll = ctypes.CDLL(str(path))
            version = int(dll.ds_cpu_abi_version())
            score = int(dll.ds_cpu_score())
            typed = _Calls(dll)
        except (OSError, AttributeError) as error:
            problems.append(f"{path.name}: {error}")
            continue
        if version != ABI_VERSION:
            problems.append(f"{path.name}: interface {version}, this release reads {ABI_VERSION}")
        elif score <= 0:
            problems.append(f"{path.name}: needs instructions that this processor lacks")
        elif best is None or score > best[0]:
            best = (score, path, typed)
    if best is None:
        return NotAvailable("no native library can run here (" + "; ".join(problems) + ")")
    score, path, typed = best
    return Library(str(path), _isa(path), score, typed)


def _share_threads_with_torch() -> None:
    """Load torch first where it is going to be used: then both run on one OpenMP pool."""
    if sys.platform != "win32" and "torch" not in sys.modules:
        import torch  # noqa: F401


@cache
def library() -> Library:
    """The best library, loaded after torch. Raises RuntimeError if there is none."""
    _share_threads_with_torch()
    found = open_best(library_folder())
    if isinstance(found, NotAvailable):
        raise RuntimeError(found.reason)
    return found


def calls() -> Any:
    """The typed C functions of the best library, by name."""
    return library().call


@cache
def why_not() -> str | None:
    """None if native libraries were built, else the sentence. Looks at files only."""
    return None if _candidates(library_folder()) else NOT_BUILT


def built_for() -> list[str]:
    """The instruction sets that the installed libraries were built for."""
    return [_isa(path) for path in _candidates(library_folder())]
