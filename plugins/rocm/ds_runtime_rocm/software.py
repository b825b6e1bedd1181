"""What kernels want besides torch: AITER and TileLang.

AITER is built from source and its functions come and go: those that are there become features of
the device, such as "aiter.mla.mla_decode_fwd". It is on no index: PyPI's `aiter` is something else.
"""

from __future__ import annotations

from ds_runtime.api import Fixable, Library, exports

_INSTALL = "install amd-aiter from source (docs/install.md)"
AITER = Library(
    "aiter",
    ("amd-aiter",),
    tuple(map(exports.names, ("", "mla", "fused_moe", "ops.shuffle", "utility.fp4_utils"))),
    install=_INSTALL,
    ours=lambda folder: (folder / "mla.py").is_file(),
    other=Fixable(
        "the installed aiter is PyPI's, an async iterator", f"pip uninstall aiter, and {_INSTALL}"
    ),
)
TILELANG = Library("tilelang", install="pip install tilelang")
LIBRARIES = (AITER, TILELANG, Library("triton"))


def features() -> frozenset[str]:
    """Features of the libraries that are installed here."""
    return frozenset().union(*(library.features() for library in LIBRARIES))


def report() -> list[tuple[str, str]]:
    """(library, its version) for `ds-runtime doctor`."""
    return [library.report() for library in LIBRARIES]
