"""Code that an import of a distribution would run, and that is in none of its files.

Its modules may be hidden: by a folder or an extension of the same name, or by a place that is
searched before. Next to them may be others, and bytecode of something else. And they may import
what nobody has installed (`imports_of.py`). Every finder is asked, as an import does: those of
editable installs, and of archives. Torch-free; imports nothing of the distribution.
"""

from __future__ import annotations

import marshal
from collections.abc import Collection, Iterator
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ModuleSpec,
    NamespaceLoader,
)
from importlib.metadata import Distribution
from importlib.resources.abc import Traversable
from importlib.util import MAGIC_NUMBER, cache_from_source
from pathlib import Path, PurePath
from zipfile import Path as ZipPath
from zipfile import is_zipfile

from ds_runtime.plugins.lazy import top_of
from ds_runtime.plugins.trust.imports_of import comes_from, stray

_HEADER = 16  # bytes of a .pyc file before its code
_CACHE = "__pycache__"
_SUFFIXES = (*EXTENSION_SUFFIXES, *SOURCE_SUFFIXES, *BYTECODE_SUFFIXES)


def foreign_code(dist: Distribution) -> str | None:
    """What follows the distribution's name in a sentence about such code; None if there is none."""
    files = {
        Path(str(f.locate())).resolve(): (name, f) for f in dist.files or () if (name := _module(f))
    }
    # What its digest counts; some are no modules, as run-me.py.
    own = {Path(str(f.locate())).resolve() for f in dist.files or () if ".." not in f.parts}
    specs = Specs()
    folders = set[Path]()
    for path, (name, _) in files.items():
        spec = specs[name]
        if spec is None or _is_namespace(spec):
            continue  # an import by this name runs nothing
        place = comes_from(spec)
        if Path(place).resolve() not in files:
            return (
                f"has module {name}, but that comes from {place}, which is no file of {dist.name}"
            )
        if path.suffix in SOURCE_SUFFIXES and (cached := _other_bytecode(path)):
            return f"has {path}, and {cached} is not what that compiles to: delete it"
        folders |= {Path(where).resolve() for where in spec.submodule_search_locations or ()}
    beside = next((p for folder in sorted(folders) for p in _strays(_opened(folder), own)), None)
    if beside is not None:
        return f"has modules next to {beside}, which is no file of {dist.name}"
    sources = [
        (name if f.stem == "__init__" else name.rpartition(".")[0], f.read_binary())
        for path, (name, f) in files.items()
        if path.suffix in SOURCE_SUFFIXES
    ]
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


class Specs(dict[str, ModuleSpec | None]):
    """By name, where a module would be imported from; its parents are looked for, not imported."""

    def __missing__(self, name: str) -> ModuleSpec | None:
        parent = name.rpartition(".")[0]
        found = None
        if not parent:
            found = top_of(name)
        elif (above := self[parent]) is not None:
            # Empty where a finder of the package's own serves them.
            within = above.submodule_search_locations
            found = None if within is None else top_of(name, list(within))
        self[name] = found
        return found


def _is_namespace(spec: ModuleSpec) -> bool:
    """Whether it is a package without a file, of whose own an import runs nothing."""
    return spec.origin is None and (spec.loader is None or isinstance(spec.loader, NamespaceLoader))


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


def _opened(folder: Path) -> Traversable | None:
    """A package's folder, which may be in an archive; None if there is none."""
    if folder.is_dir():
        return folder
    archive = next((place for place in folder.parents if place.is_file()), None)
    if archive is None or not is_zipfile(archive):
        return None
    inside: Traversable = ZipPath(str(archive), f"{folder.relative_to(archive).as_posix()}/")
    return inside


def _strays(
    folder: Traversable | None, files: Collection[Path], seen: set[Path] | None = None
) -> Iterator[Path]:
    """Files of a package that can be imported and are not the distribution's."""
    seen = set() if seen is None else seen
    if folder is None or (where := Path(str(folder)).resolve()) in seen:
        return  # links may lead in circles
    seen.add(where)
    for one in sorted(folder.iterdir(), key=lambda one: one.name) if folder else ():
        path = Path(str(one))
        if path.name.endswith(_SUFFIXES) and one.is_file() and path.resolve() not in files:
            yield path
        elif one.is_dir() and path.name.isidentifier() and path.name != _CACHE:
            yield from _strays(one, files, seen)
