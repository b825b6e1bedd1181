"""`ds-runtime new-plugin`: a complete plugin package from the templates in `templates`.

The templates are packages of a vendor called Acme; a new one is the same with another name. What
all have is in `plugin`, the rest in a folder for each kind.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection, Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath

from ds_runtime.errors import ConfigError, unwritable

KINDS = {  # what a package brings, and what to run next
    "platform": "ds-runtime serve --platform {name}",
    "loader": "ds-runtime conform {name}",
}
PLATFORM = "platform"
_SUFFIX = ".tmpl"
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def write_plugin(name: str, into: Path, taken: Collection[str] = (), kind: str = PLATFORM) -> Path:
    """Write the package of plugin `name`, one of `KINDS`, to `into`/ds-runtime-NAME; that folder.

    Raises ConfigError for a name that cannot be one or is taken, and for a folder with files.
    """
    if not _NAME.fullmatch(name) or keyword.iskeyword(name) or name.endswith("_"):
        near = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
        hint = f"; {near!r} would do" if _NAME.fullmatch(near) and near != name else ""
        raise ConfigError(
            f"new-plugin {name!r}: a name has small letters, digits and inner underscores, and "
            f"begins with a letter{hint}"
        )
    if name in taken:
        raise ConfigError(f"new-plugin {name}: a plugin of that name is installed; choose another")
    folder = into / f"ds-runtime-{name.replace('_', '-')}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"new-plugin {name}: {folder} exists and is not an empty folder")
    try:
        for path, text in files(name, kind):
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as e:
        raise unwritable(f"new-plugin {name}: {folder}", e, "--into a folder that is yours") from e
    return folder


def files(name: str, kind: str = PLATFORM) -> Iterator[tuple[str, str]]:
    """(path, text) of every file of the package."""
    root = resources.files("ds_runtime_kit") / "templates"
    for folder in ("plugin", kind):
        for path, file in _walk(root / folder, PurePosixPath()):
            yield _renamed(str(path), name), _renamed(file.read_text(encoding="utf-8"), name)


def _walk(folder: Traversable, at: PurePosixPath) -> Iterator[tuple[PurePosixPath, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        if entry.is_dir():
            yield from _walk(entry, at / entry.name)
        elif entry.name.endswith(_SUFFIX):
            yield at / entry.name.removesuffix(_SUFFIX), entry


def _renamed(text: str, name: str) -> str:
    words = name.split("_")
    text = text.replace("ds-runtime-acme", f"ds-runtime-{'-'.join(words)}")
    text = text.replace("Acme", "".join(w.capitalize() for w in words))
    return text.replace("acme", name)
