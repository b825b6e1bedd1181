"""Which of the optional libraries are installed, and what they export. Torch-free.

None of them is imported to find out: that takes seconds, and some want a GPU for it. Names are
read from the text of a package's __init__.py, because releases of one library differ in what they
hold. Found libraries and functions become device features: "flashinfer", "deep_gemm.fp8_gemm_nt".
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ds_runtime.api import installed


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
        "flashinfer", ("flashinfer-python",), (("mla", "*"), ("fused_moe", "*"), ("gemm", "*"))
    ),
    Library("sgl_kernel", ("sglang-kernel", "sgl-kernel"), (("flash_attn", "flash_ops*"),)),
    Library("triton", ("triton",)),
)
INSTALL = 'pip install "ds-runtime[cuda]"'


def folder_of(module: str) -> Path | None:
    """Where a package lies, without importing it."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def exported(source: Path) -> frozenset[str]:
    """Names that a module binds at its top level, also inside `if` and `try`."""
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
        return frozenset(_bound(tree.body, source.parent))
    except (OSError, SyntaxError, ValueError):
        return frozenset()


def _bound(statements: list[ast.stmt], folder: Path) -> Iterator[str]:
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            if node.level == 1 and node.module:  # from .module import *
                yield from exported(_file(folder, node.module.replace(".", "/")))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (a.asname or a.name.partition(".")[0] for a in node.names)
        elif isinstance(node, ast.Assign):
            yield from (t.id for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.If | ast.Try):
            yield from _bound([*node.body, *node.orelse], folder)
            for handler in getattr(node, "handlers", ()):
                yield from _bound(handler.body, folder)


def _file(folder: Path, module: str) -> Path:
    """The source of a module inside a package."""
    package = folder / module / "__init__.py"
    return package if package.is_file() else folder / f"{module}.py"


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
    folder: Callable[[str], Path | None] = folder_of,
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
        yield from (f"{library.module}.{name}" for name in exported(where / "__init__.py"))
        for part, pattern in library.parts:
            if any(where.glob(pattern)):
                yield from (f"{library.module}.{part}.{n}" for n in exported(_file(where, part)))
