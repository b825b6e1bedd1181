"""Code that an import of a distribution would run, and that is in none of its files.

Its modules may be hidden: by a folder or an extension of the same name, or by a place that is
searched before. Next to them may be others, and bytecode of something else. And they may import
what nobody has installed (`imports_of.py`). Torch-free; imports nothing of the distribution.
"""

from __future__ import annotations

import marshal
from collections.abc import Collection, Iterator
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ModuleSpec,
    PathFinder,
)
from importlib.metadata import Distribution
from importlib.util import MAGIC_NUMBER, cache_from_source
from pathlib import Path, PurePath

from ds_runtime.plugins.lazy import top_of
from ds_runtime.plugins.trust.imports_of import stray

_HEADER = 16  # bytes of a .pyc file before its code
_CACHE = "__pycache__"
_SUFFIXES = (*EXTENSION_SUFFIXES, *SOURCE_SUFFIXES, *BYTECODE_SUFFIXES)


def foreign_code(dist: Distribution) -> str | None:
    """What follows the distribution's name in a sentence about such code; None if there is none."""
    files = {
        Path(str(f.locate())).resolve(): name for f in dist.files or () if (name := _module(f))
    }
    specs = _Specs()
    folders = set[Path]()
    for path, name in files.items():
        spec = specs[name]
        if spec is None or spec.origin is None:
            continue  # nothing is imported by this name
        origin = Path(spec.origin).resolve()
        if origin not in files:
            return (
                f"has module {name}, but that comes from {spec.origin}, which is no file of "
                f"{dist.name}"
            )
        if path.suffix in SOURCE_SUFFIXES and (cached := _other_bytecode(path)):
            return f"has {path}, and {cached} is not what that compiles to: delete it"
        folders |= {Path(place).resolve() for place in spec.submodule_search_locations or ()}
    beside = next((p for folder in sorted(folders) for p in _strays(folder, files)), None)
    if beside is not None:
        return f"has modules next to {beside}, which is no file of {dist.name}"
    sources = [path for path in files if path.suffix in SOURCE_SUFFIXES]
    if (found := stray(dist, sources, specs)) is not None:
        name, place = found
        return (
            f"has code that imports {name}, but that comes from {place}, which no installed "
            "distribution brings: pip install it"
        )
    return None


def _module(file: PurePath) -> str | None:
    """The name by which a file, relative to where packages lie, would be imported."""
    suffix = next((s for s in _SUFFIXES if file.name.endswith(s)), None)
    if suffix is None or _CACHE in file.parts:
        return None
    *parents, last = (*file.parts[:-1], file.name.removesuffix(suffix))
    parts = parents if last == "__init__" else [*parents, last]
    return ".".join(parts) if parts and all(map(str.isidentifier, parts)) else None


class _Specs(dict[str, ModuleSpec | None]):
    """By name, where a module would be imported from; its parents are looked for, not imported."""

    def __missing__(self, name: str) -> ModuleSpec | None:
        parent = name.rpartition(".")[0]
        if not parent:
            found = top_of(name)
        elif (above := self[parent]) is None or not above.submodule_search_locations:
            found = None
        else:
            found = PathFinder.find_spec(name, above.submodule_search_locations)
        self[name] = found
        return found


def _other_bytecode(source: Path) -> str | None:
    """The bytecode that Python would run in place of `source`, if it is of something else."""
    cached = Path(cache_from_source(str(source)))
    try:
        data = cached.read_bytes()
    except OSError:
        return None
    if data[:4] != MAGIC_NUMBER:
        return None  # Python ignores it
    try:
        same = marshal.loads(data[_HEADER:]) == compile(
            source.read_bytes(), str(source), "exec", dont_inherit=True
        )
    except (EOFError, ValueError, TypeError, SyntaxError):
        same = False
    return None if same else str(cached)


def _strays(folder: Path, files: Collection[Path]) -> Iterator[Path]:
    """Files of a package that can be imported and are not the distribution's."""
    for path in sorted(folder.iterdir()):
        if path.name.endswith(_SUFFIXES) and path.is_file() and path.resolve() not in files:
            yield path
        elif path.is_dir() and path.name.isidentifier() and path.name != _CACHE:
            yield from _strays(path, files)
