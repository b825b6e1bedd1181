"""Modules that the code of a distribution names, and that no installed distribution brings.

Looked for are import statements wherever they are, `import_module("x")`, entry points, and what
is imported by a string such as a kernel's "module:attribute". Nothing is imported for it.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec
from importlib.metadata import Distribution, distributions, packages_distributions
from pathlib import Path
from urllib.parse import unquote, urlsplit

_BY_NAME = frozenset({"import_module", "__import__"})
_LAZY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_INTERPRETER: tuple[object, ...] = (BuiltinImporter, FrozenImporter)
_OURS = "ds_runtime"  # runs already


def imported(source: bytes) -> Iterator[str]:
    """Dotted names that a module's source names; nothing of its own package."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # importing it says so
        return
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (one.name for one in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield from (f"{module}.{one.name}" for one in names)
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
                called = getattr(func, "attr", getattr(func, "id", ""))
                if called in _BY_NAME:
                    yield name
            case ast.Constant(value=str(text)) if _LAZY.fullmatch(text):
                yield text.partition(":")[0]


def stray(
    dist: Distribution, sources: Iterable[bytes], specs: Mapping[str, ModuleSpec | None]
) -> tuple[str, str] | None:
    """The first module that these sources of a distribution or its entry points name and nobody
    has installed, with its place; None if there is none. sources: their contents. specs: finds
    modules by their names.
    """
    names = {point.module for point in dist.entry_points}
    for source in sources:
        names |= set(imported(source))
    owners: Mapping[str, list[str]] | None = None
    seen = set[str]()
    for name in sorted(names):
        found = first_file(name, specs)
        if found is None or found[0] in seen:
            continue
        module, place = found
        seen.add(module)
        origin = Path(place).resolve()
        if module == _OURS or _is_standard(module, origin):
            continue
        if owners is None:
            owners = packages_distributions()
        by = {dist.name, *owners.get(module.partition(".")[0], ())}
        # Those whose name it is come first: reading every list of files takes long.
        likely = sorted(distributions(), key=lambda one: one.name not in by)
        if not Path(place).is_absolute():  # a loader's name: nobody has that as a file
            return module, place
        if not any(_has(one, origin) for one in likely) and not any(
            _is_editable_in(one, origin) for one in likely
        ):
            return module, place
    return None


def comes_from(spec: ModuleSpec) -> str:
    """The file that an import runs, or what else it says of itself, or at least its loader."""
    return spec.origin or f"{type(spec.loader).__module__}.{type(spec.loader).__qualname__}"


def first_file(name: str, specs: Mapping[str, ModuleSpec | None]) -> tuple[str, str] | None:
    """The outermost package or module on the way to `name` that is a file, and that file. One that
    comes from a loader without a file counts, with the loader's name. None for one of the
    interpreter's, and for none at all."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        module = ".".join(parts[:count])
        spec = specs[module]
        if spec is None or spec.loader in _INTERPRETER:
            return None
        if spec.origin is not None or not spec.submodule_search_locations:
            return module, comes_from(spec)
    return None


def _is_standard(module: str, origin: Path) -> bool:
    """Whether a file is Python's own of this name."""
    if module not in sys.stdlib_module_names:
        return False
    for name in ("stdlib", "platstdlib"):
        folder = Path(sysconfig.get_path(name)).resolve()
        if origin.is_relative_to(folder):
            return origin.relative_to(folder).parts[0] not in ("site-packages", "dist-packages")
    return False


def _has(dist: Distribution, origin: Path) -> bool:
    return any(
        f.name == origin.name and Path(str(f.locate())).resolve() == origin
        for f in dist.files or ()
    )


def _is_editable_in(dist: Distribution, origin: Path) -> bool:
    about = json.loads(dist.read_text("direct_url.json") or "{}")
    if not about.get("dir_info", {}).get("editable"):
        return False
    return origin.is_relative_to(Path(unquote(urlsplit(about.get("url", "")).path)).resolve())
