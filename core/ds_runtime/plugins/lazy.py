"""Whether a lazy "module:attr" names a module that is there. Nothing is imported for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from typing import Any


def absent(path: str) -> str:
    """What is wrong with the path, or "": a module that nobody has, or one that is imported and
    lacks the attribute."""
    module, _, attr = path.partition(":")
    if (loaded := sys.modules.get(module)) is not None:
        try:
            return "" if hasattr(loaded, attr) else f"module {module} has no {attr}"
        except (Exception, SystemExit) as e:  # of its own __getattr__
            return f"module {module}, asked for {attr}, raised {type(e).__name__}: {e}"
    return "" if _is_there(module) else f"there is no module {module}"


def _is_there(module: str) -> bool:
    """Whether an import would find it: its parents are looked for, not imported."""
    *parents, _ = parts = module.split(".")
    within: list[str] | None = None
    for count in range(1, len(parts)):
        found = sys.modules.get(name := ".".join(parts[:count])) or _find(name, within)
        # Empty where a finder of the package's own serves them.
        attr = "submodule_search_locations" if isinstance(found, ModuleSpec) else "__path__"
        if (within := getattr(found, attr, None)) is None:
            return False
    return _find(module, within if parents else None) is not None


def _find(name: str, within: list[str] | None) -> ModuleSpec | None:
    return top_of(name, None if within is None else list(within))


def top_of(name: str, within: Sequence[str] | None = None) -> ModuleSpec | None:
    """Where a process that has not imported it yet would find it. within: the folders of its
    package, which finders of editable installs may do without."""
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, within)
        except KeyError:  # a namespace in one that is not imported: Python looks for that in vain
            spec = _in_namespace(finder, name, within)
        except (Exception, SystemExit):  # importing it says so
            continue
        if spec is not None:
            return spec
    return None


def _in_namespace(finder: Any, name: str, within: Sequence[str] | None) -> ModuleSpec | None:
    """The same by the last part alone, which is all that finders of folders look at."""
    if within is None:
        return None
    with suppress(Exception, SystemExit):
        found: ModuleSpec | None = finder.find_spec(name.rpartition(".")[2], within)
        return found
    return None
