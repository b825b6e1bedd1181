"""Modules that the code of a distribution names, and that no installed distribution brings.

Looked for are import statements wherever they are, `import_module("x")`, entry points, and what
is imported by a string such as a kernel's "module:attribute". Nothing is imported for it.
"""

from __future__ import annotations

import ast
import csv
import json
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec
from importlib.metadata import Distribution, distributions
from importlib.util import resolve_name
from pathlib import Path
from urllib.parse import unquote, urlsplit

_BY_NAME = frozenset({"import_module", "__import__"})
_LAZY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_INTERPRETER: tuple[object, ...] = (BuiltinImporter, FrozenImporter)
_OURS = "ds_runtime"  # runs already


def imported(source: bytes, package: str = "") -> Iterator[str]:
    """Dotted names that a module's source names; relative ones where its `package` is given."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # importing it says so
        return
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (one.name for one in names)
            case ast.ImportFrom(module=module, names=names, level=level) if level and package:
                with suppress(ImportError):  # above the top: importing it says so
                    base = resolve_name("." * level + (module or ""), package)
                    yield from (f"{base}.{one.name}" for one in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield from (f"{module}.{one.name}" for one in names)
            case ast.Call(func=func, args=args, keywords=keywords):
                called = getattr(func, "attr", getattr(func, "id", ""))
                named = [*args[:1], *(k.value for k in keywords if k.arg == "name")]
                for one in named if called in _BY_NAME else ():
                    if isinstance(one, ast.Constant) and isinstance(one.value, str):
                        within = [*args[1:2], *(k.value for k in keywords if k.arg == "package")]
                        yield from _resolved(one.value, within, package)
            case ast.Constant(value=str(text)) if _LAZY.fullmatch(text):
                yield text.partition(":")[0]


def _resolved(name: str, within: list[ast.expr], package: str) -> Iterator[str]:
    """What `import_module` looks for; a relative name is taken within the package that the call
    says, and within the module's own where it says that by an expression."""
    for one in within:
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            package = one.value
    if not name.startswith("."):
        yield name
    elif package:
        with suppress(ImportError):  # above the top: importing it says so
            yield resolve_name(name, package)


def stray(
    dist: Distribution, sources: Iterable[tuple[str, bytes]], specs: Mapping[str, ModuleSpec | None]
) -> tuple[str, str] | None:
    """The first module that these sources of a distribution or its entry points name and nobody
    has installed, with its place; None if there is none. sources: of each its
    package and its contents. specs: finds modules by their names.
    """
    names = {point.module for point in dist.entry_points}
    for package, source in sources:
        names |= set(imported(source, package))
    listed: list[Listed] = []
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
        if not Path(place).is_absolute():  # a loader's name: nobody has that as a file
            return module, place
        listed = listed or [Listed(one) for one in distributions()]
        # Those whose lists have its last two names come first: resolving all paths takes long.
        likely = sorted(listed, key=lambda one: not one.may_have(origin))
        if not any(one.has(origin) for one in likely) and not any(
            _is_editable_in(one.dist, origin) for one in listed
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


class Listed:
    """The files of a distribution. Those of a RECORD are read without a path object for each."""

    def __init__(self, dist: Distribution) -> None:
        self.dist = dist
        try:
            record = dist.read_text("RECORD")
            if not record:  # an older kind of installation
                names = [str(file) for file in dist.files or ()]
            else:
                names = [row[0] for row in csv.reader(record.splitlines()) if row]
        except (OSError, ValueError, csv.Error):  # one that nobody can read brings nothing
            names = []
        self._places: dict[str, list[str]] = {}  # by the file's name
        for name in names:
            self._places.setdefault(name.rpartition("/")[2], []).append(name)

    def may_have(self, origin: Path) -> bool:
        """Whether a path ends with the last two names of this one."""
        end = "/".join(origin.parts[-2:])
        return any(f"/{name}".endswith(f"/{end}") for name in self._places.get(origin.name, ()))

    def has(self, origin: Path) -> bool:
        """Whether one of its files is `origin`."""
        every = self._places.get(origin.name, ())
        likely = sorted(every, key=lambda name: not name.endswith("/".join(origin.parts[-2:])))
        return any(Path(str(self.dist.locate_file(name))).resolve() == origin for name in likely)


def editable_url(dist: Distribution) -> str | None:
    """The URL of the project that an editable installation leads to, empty where it does not say;
    None for one that is not editable. Raises ValueError where its direct_url.json is none."""
    try:
        about = json.loads(dist.read_text("direct_url.json") or "{}")
        if not about.get("dir_info", {}).get("editable"):
            return None
        return str(about.get("url", ""))
    except (OSError, ValueError, RecursionError, AttributeError) as e:
        raise ValueError(f"has a direct_url.json that cannot be read ({e})") from e


def _is_editable_in(dist: Distribution, origin: Path) -> bool:
    try:
        url = urlsplit(editable_url(dist) or "")
        folder = Path(unquote(url.path)).resolve()
    except ValueError:  # what nobody can read brings nothing
        return False
    if url.scheme != "file" or not origin.is_relative_to(folder):
        return False
    # An environment may lie in the project's folder; what is installed there has its own lists.
    inside = [p for p in _installed() if p != folder and p.is_relative_to(folder)]
    return not any(map(origin.is_relative_to, inside))


def _installed() -> list[Path]:
    """Folders that packages are installed into."""
    found = [Path(p).resolve() for p in sys.path]
    names = ("site-packages", "dist-packages")
    return [p for p in found if p.name in names or any(p.glob("*.dist-info"))]
