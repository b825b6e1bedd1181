"""Finds, checks and calls the native library. Torch-free: pointers come as integers.

The wheel brings one library per instruction set, in `_lib`. The process computes with the best
that its processor runs, or with the one that `choose` names (`--cpu-isa`). Objects that own packed
weights take `calls()` once, when they are made: a later choice does not change under them. Without
a compiler at install time there is no library, and every kernel that needs one refuses with the
sentence that `why_not` gives.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from ds_runtime.api import UnsupportedError
from ds_runtime_cpu import placement
from ds_runtime_cpu.isa import ISAS, missing, usable
from ds_runtime_cpu.machine import processor

ABI_VERSION = 14
NOT_BUILT = (
    "native library not built: reinstall with a C++17 compiler and CMake (DS_REQUIRE_NATIVE=1 pip "
    "install ... shows why it could not be)"
)
_NONE_RUNS = "none of which this processor runs; reinstall, which builds one for every x86-64"
_STEM = "ds_cpu_"  # and the variant, behind "lib" where systems have that

_P, _I, _D = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_T = ctypes.c_int32  # dtype code, see DTYPES
DTYPES: Mapping[str, int] = {"float32": 0, "bfloat16": 1}

# As in csrc/ds_cpu.h, without the prefix `ds_cpu_`; each is listed in csrc/calls.cpp, too.
SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "set_threads": (_I,),
    "bind_threads": (_P, _P, _I),
    "large_pages": (_P, _I),
    "read": (_P, _I, _I, _P),
    "rms_norm": (_T, _T, _P, _I, _P, _D, _P, _I, _I),
    "add_rms_norm": (_T, _T, _P, _I, _P, _I, _P, _D, _P, _P, _I, _I),
    "silu_mul": (_T, _P, _I, _D, _P, _I, _I),
    "rope": (_T, _P, _I, _I, _P, _P, _P, _I, _I, _I),
    "cache_write": (_T, _T, _P, _I, _P, _I, _I, _P, _I, _P, _I),
    "mla_prologue": (
        *(_T, _T, _T, _P, _I, _I, _I, _P, _I, _I, _I),
        *(_P, _D, _P, _P, _P, _P, _P, _P, _P, _I),
    ),
    "embed": (_P, _P, _I, _I, _I, _P, _I, _I),
    "quantize_group": (_T, _P, _I, _I, _T, _P, _P, _I, _I),
    "router_logits": (_T, _P, _I, _P, _P, _I, _I, _I),
    "route": (_P, _I, _P, _P, _P, _I, _I, _I, _I, _I, _I, _T, _T, _T, _D),
    "sample": (_P, _I, _P, _P, _P, _P, _P, _P, _I, _I),
    "mask_logits": (_P, _I, _P, _P, _P, _I, _I),
    "logprobs": (_P, _I, _P, _I, _P, _P, _P, _I, _I),
    "pack": (_T, _T, _P, _I, _I, _P, _P, _I, _P, _I, _I, _I, _I, _I, _T),
    "narrow": (_P, _P, _I, _I, _P),
    "unpack": (_T, _T, _P, _P, _I, _I, _I),
    "linear": (_T, _T, _P, _I, _I, _P, _I, _P, _I, _I, _I, _I, _I, _I),
    "mla_decode": (_T, _T, _P, _I, _I, _P, _I, _I, _I, _P, _I, _P, _P, _D, _P, _I, _I, _P, _P, _P),
    "compact_slots": (_P, _I, _I, _P, _P, _I),
    "index_prologue": (
        *(_T, _T, _P, _I, _I, _I, _P, _I, _I, _P, _P, _D),
        *(_P, _P, _I, _T, _P, _I, _P, _P, _P, _I),
    ),
    "index_encode": (_T, _T, _P, _I, _I, _I, _P, _I, _I, _P, _P, _I, _T, _P, _I, _P, _P, _P, _I),
    "index_scores": (_T, _T, _P, _I, _I, _P, _I, _P, _I, _P, _I, _P, _P, _P, _I, _I),
    "index_topk": (_P, _I, _P, _P, _P, _I, _I, _I, _P, _I),
    "mha_prefill": (_T, *(_P, _I, _I) * 3, _P, _P, _T, _D, _P, _P, _I, _I, _I, _I),
    "experts": (_T, _T, _P, _I, _P, _P, _P, _I, _P, _I, _D, _P, _I, _I, _I, _I, _I),
    "route_softplus": (_P, _I, _P, _P, _P, _P, _I, _I, _I, _D),
    "hc_pre": (_T, _P, _P, _P, _P, _D, _D, _I, _P, _P, _P, _I, _I, _I),
    "hc_post": (_T, _P, _I, _P, _P, _P, _P, _I, _I, _I),
    "norm_rope": (_T, _P, _I, _I, _P, _D, _P, _P, _I, _P, _I, _I, _I, _I),
    "rope_back": (_T, _P, _I, _I, _P, _P, _P, _I, _I, _I, _I),
    "window_rows": (_T, _T, _P, _I, _P, _I, _P, _P, _I, _P, _P, _I, _I, _I, _I, _P, _P, _I),
    "compress_windows": (_T, _P, _I, _P, _I, _I, _P, _D, _P, _P, _I, _I, _P, _I, _P, _P, _I, _I),
    "copy": (_T, _T, _P, _I, _I, _P, _I, _I, _I, _I, _I),
    "add": (_T, _P, _I, _P, _I, _I, _I),
    "replay": (_P, _I),
}


@dataclass(frozen=True)
class Library:
    """The loaded library: `call.<name>(...)` for every name in SIGNATURES."""

    path: str
    isa: str
    score: int
    call: Any
    threads: Callable[[], int]  # that a kernel called from this thread may use
    panel_bytes: Callable[[int, int, int, int], int]  # of a format, a dtype's code, k, its group
    narrows: bool  # whether it streams bfloat16 in 12 bits faster than in 16


@dataclass(frozen=True)
class NotAvailable:
    """No library can be used here, and why."""

    reason: str


class _Calls:
    """The C functions as attributes. They take integers and floats, no keywords, and return None.

    Arguments go as one array of 8-byte slots: ctypes would take longer over a dozen typed ones
    than a small kernel over its work (benchmarks/results/cpu_small.jsonl).
    """

    def __init__(self, dll: ctypes.CDLL) -> None:
        self._bound: dict[str, Any] = {}
        self._addresses: dict[str, int] = {}
        for name, kinds in SIGNATURES.items():
            function = getattr(dll, f"ds_cpu_slots_{name}")
            function.argtypes = (ctypes.c_char_p,)
            function.restype = None
            setattr(self, name, _packed(function, struct.Struct(_slots(kinds)).pack))
            self._addresses[name] = _address(function)
            bound = self._bound[name] = getattr(dll, f"ds_cpu_bound_{name}")
            bound.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
            bound.restype = None

    def prepared(self, name: str, *arguments: float) -> tuple[int, bytes]:
        """What `recorded` would be told of a call that is not made."""
        return self._addresses[name], struct.pack(_slots(SIGNATURES[name]), *arguments)

    def bound(self, name: str, *arguments: float | None) -> Callable[..., None]:
        """A function with some arguments given for good: it takes those that are None here.

        For kernels that own weights: their addresses and sizes need not be looked up again.
        """
        kinds, places = SIGNATURES[name], [i for i, a in enumerate(arguments) if a is None]
        assert len(arguments) == len(kinds), name
        head = struct.pack(f"={1 + len(places)}q", len(places), *places)
        plan = head + struct.pack(_slots(kinds), *(0 if a is None else a for a in arguments))
        function, pack = self._bound[name], struct.Struct(_slots([kinds[i] for i in places])).pack
        address, every = self._addresses[name], struct.Struct(_slots(kinds)).pack

        def call(*rest: float) -> None:
            function(plan, pack(*rest))
            if _recorders and (by := _recorders.get(threading.get_ident())):
                given = iter(rest)
                by(address, every(*(next(given) if a is None else a for a in arguments)))

        return call


def _slots(kinds: Iterable[Any]) -> str:
    return "=" + "".join("d" if kind is _D else "q" for kind in kinds)


def _packed(function: Any, pack: Callable[..., bytes]) -> Callable[..., None]:
    address = _address(function)

    def call(*arguments: float) -> None:
        slots = pack(*arguments)
        function(slots)
        if _recorders and (by := _recorders.get(threading.get_ident())):
            by(address, slots)

    return call


def _address(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


_recorders: dict[int, Callable[[int, bytes], None]] = {}  # by thread


@contextlib.contextmanager
def recorded(by: Callable[[int, bytes], None]) -> Iterator[None]:
    """Tell `by` the address and the slots of every function that this thread calls, once it has
    run: what `replay` takes.
    """
    thread = threading.get_ident()
    assert thread not in _recorders, "calls are being recorded"
    _recorders[thread] = by
    try:
        yield
    finally:
        del _recorders[thread]


def records() -> bool:
    """Whether this thread's calls are being recorded."""
    return threading.get_ident() in _recorders


def library_folder() -> Traversable:
    """`_lib` of the installed package; an editable install keeps it apart from the sources."""
    return files("ds_runtime_cpu").joinpath("_lib")


def _candidates(folder: Traversable) -> list[Path]:
    if not folder.is_dir():
        return []
    found = [Path(str(p)) for p in folder.iterdir() if p.name.removeprefix("lib").startswith(_STEM)]
    return sorted(p for p in found if p.suffix in (".so", ".dylib", ".dll"))


def _isa(path: Path) -> str:
    return path.stem.removeprefix("lib").removeprefix(_STEM)


def open_library(path: Path) -> Library | NotAvailable:
    """The library in a file, if it has this release's interface and can run here."""
    try:
        dll = _loaded(path)
        version = int(dll.ds_cpu_abi_version())
        score = int(dll.ds_cpu_score())
        if version != ABI_VERSION:
            return NotAvailable(
                f"{path.name}: interface {version}, this release reads {ABI_VERSION}; install again"
            )
        threads = dll.ds_cpu_threads
        panel_bytes = dll.ds_cpu_panel_bytes
        panel_bytes.argtypes, panel_bytes.restype = (_T, _T, _I, _I), _I
        narrows = bool(dll.ds_cpu_narrows())
        typed = _Calls(dll)
    except (OSError, AttributeError) as error:
        return NotAvailable(f"{path.name}: {error}")
    if score <= 0:
        return NotAvailable(f"{path.name}: needs instructions that cannot be used here")
    return Library(str(path), _isa(path), score, typed, threads, panel_bytes, narrows)


def _loaded(path: Path) -> ctypes.CDLL:
    """The file, and where the system has no OpenMP library the one that torch brings."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as missing:
        spec = importlib.util.find_spec("torch")
        for folder in (spec and spec.submodule_search_locations) or ():
            for found in sorted(Path(folder, "lib").glob("libgomp*.so*")):
                if "libgomp" in str(missing):
                    ctypes.CDLL(str(found), mode=ctypes.RTLD_GLOBAL)
                    return ctypes.CDLL(str(path))
        raise


def _share_threads_with_torch() -> None:
    """Load torch first where it is going to be used: then both run on one OpenMP pool."""
    if sys.platform != "win32" and "torch" not in sys.modules:
        import torch  # noqa: F401


@cache
def _opened(path: Path) -> Library:
    _share_threads_with_torch()
    found = open_library(path)
    if isinstance(found, NotAvailable):
        opened = (n for n in runnable() if isinstance(open_library(_path(n)), Library))
        others = ", ".join(opened)
        raise UnsupportedError(
            f"native library: {found.reason}" + (f"; --cpu-isa takes {others}" if others else "")
        )
    return found


def _path(isa: str) -> Path:
    (path,) = (p for p in _candidates(library_folder()) if _isa(p) == isa)
    return path


_chosen: str | None = None  # None: the best
_library: Library | None = None  # loaded at the first call


def choose(isa: str | None) -> None:
    """Compute with variant `isa` in this process, one of `runnable()`; None: with the best."""
    global _chosen, _library
    assert isa is None or isa in runnable(), isa
    _chosen, _library = isa, None
    vars(active).clear()


@contextlib.contextmanager
def using(isa: str | None) -> Iterator[None]:
    """`choose` for a while."""
    before = _chosen
    choose(isa)
    try:
        yield
    finally:
        choose(before)


def isa_in_use() -> str | None:
    """The variant that this process computes with, or None where none was built. Loads nothing."""
    return _chosen or next(iter(runnable()), None)


def library() -> Library:
    """The library in use, loaded after torch. Raises UnsupportedError if there is none."""
    global _library
    if _library is None:
        name = isa_in_use()
        if name is None:
            raise UnsupportedError(why_not() or NOT_BUILT)
        _library = _opened(_path(name))
    return _library


def check() -> str | None:
    """Why the library in use cannot be loaded, or None. Loads it, so torch is not to follow."""
    name = isa_in_use()
    found = None if name is None else open_library(_path(name))
    return found.reason if isinstance(found, NotAvailable) else None


def calls() -> Any:
    """The typed C functions of the library in use, by name."""
    return library().call


class _Active:
    """The functions of the library in use, whichever it is: `active.<name>(...)`."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        """At the first use after `choose`; from then on it is an attribute."""
        function: Callable[..., None] = getattr(calls(), name)
        setattr(self, name, function)
        return function


active = _Active()


def threads() -> int:
    """How many threads a kernel that is called from here may use."""
    return int(library().threads())


_unbound: frozenset[int] | None = None  # where the calling thread ran before it was bound


def bind_threads(cpus: Sequence[frozenset[int]]) -> None:
    """Let thread i of this process's kernels run on the processors cpus[i] only."""
    global _unbound
    if cpus:
        _unbound = placement.allowed_cpus()
        flat, ends = placement.flat(cpus)
        numbers = (ctypes.c_int32 * len(flat))(*flat)
        bounds = (ctypes.c_int64 * len(ends))(*ends)
        calls().bind_threads(ctypes.addressof(numbers), ctypes.addressof(bounds), len(ends))


def unbind_caller() -> None:
    """Give the calling thread back what `bind_threads` took: for the next engine of the process."""
    global _unbound
    if _unbound is not None and sys.platform == "linux":
        os.sched_setaffinity(0, _unbound)
        _unbound = None


def why_not() -> str | None:
    """None if a native library was built that this processor runs, else the sentence. Looks at
    files only.
    """
    if runnable():
        return None
    built = ", ".join(built_for())
    return f"native library: built for {built} only, {_NONE_RUNS}" if built else NOT_BUILT


def built_for() -> list[str]:
    """The variants that the installed libraries were built for."""
    return [_isa(path) for path in _candidates(library_folder())]


@cache
def runnable() -> tuple[str, ...]:
    """Those of them that this processor runs, best first."""
    return tuple(usable(built_for(), processor().features))


def refused(isa: str) -> str | None:
    """Why variant `isa` cannot be chosen here, or None."""
    if isa in runnable():
        return None
    if (reason := why_not()) is not None:
        return reason
    if isa not in ISAS:
        return "no such instruction set"
    if isa not in built_for():
        return "this installation has no library for it; a newer C++ compiler may build it"
    return f"this processor lacks {', '.join(missing(isa, processor().features))}"
