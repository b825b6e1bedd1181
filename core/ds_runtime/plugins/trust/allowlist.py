"""Which installed plugins may be loaded: an allowlist by distribution, version and digest.

    {"format": 1, "plugins": [{"distribution": "acme-ds", "version": "1.2", "digest": "sha256:…"}]}

`ds-runtime plugins --lock FILE` writes it. The runtime's own distribution is always allowed. And
whatever is listed, nothing is loaded from the working directory. Torch-free; imports no plugin.
"""

from __future__ import annotations

import csv
import hashlib
import json
import site
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from zipfile import BadZipFile

from ds_runtime.errors import ConfigError, unreadable, unwritable
from ds_runtime.ops.contract import Refusal
from ds_runtime.plugins.trust.code_of import Specs, foreign_code
from ds_runtime.plugins.trust.imports_of import editable_url, first_file

FORMAT = 1
_FIELDS = {"distribution", "version", "digest"}
_NOT_CODE = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}  # written by the installer


class Unreadable(Exception):
    """A distribution whose files cannot be told; the message says why."""


def digest(distribution: Distribution) -> str:
    """sha256 over the names and contents of an installed distribution's files.

    Raises Unreadable where these are not all of the code that an import of it could run.
    """
    try:
        editable = editable_url(distribution) is not None
    except ValueError as e:
        raise Unreadable(f"{e}: install it again") from e
    try:
        files = distribution.files
    except (OSError, ValueError, TypeError, csv.Error) as e:  # TypeError: a row of four fields
        raise Unreadable(f"has a RECORD that cannot be read ({e}): install it again") from e
    if editable:
        raise Unreadable("is installed editable, so its code may change at any time")
    if files is None:
        raise Unreadable("has no RECORD of its files: install it with pip")
    found = hashlib.sha256()
    for file in sorted(files, key=str):
        kept = file.parent.name == "__pycache__" and file.match("*.*.pyc")
        own = len(file.parts) == 2 and file.parts[0].endswith((".dist-info", ".egg-info"))
        if (own and file.name in _NOT_CODE) or kept or ".." in file.parts:
            continue  # kept bytecode is compared with its source
        try:
            content = file.read_binary()  # out of an archive, too
        except (OSError, ValueError, BadZipFile) as e:
            raise Unreadable(f"lacks its file {file}: install it again") from e
        found.update(f"{file}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    if (said := foreign_code(distribution)) is not None:
        raise Unreadable(said)
    return f"sha256:{found.hexdigest()}"


@dataclass(frozen=True, slots=True)
class Allowlist:
    """What may be loaded. `source` is the file, for messages."""

    source: str
    listed: Mapping[str, Mapping[str, str]]  # distribution → version and digest, if given

    def refusal(self, entry: EntryPoint) -> Refusal | None:
        """Why an entry point may not be loaded; broken if it is listed and is something else."""
        dist = entry.dist
        where = f"allowlist {self.source}"
        if dist is None or (wanted := self.listed.get(_canonical(dist.name))) is None:
            name = dist.name if dist is not None else entry.name
            return Refusal("not allowed", f"{name} is not on {where}")
        if wanted.get("version", dist.version) != dist.version:
            return _changed(dist, f"version {dist.version}", wanted["version"], where)
        if "digest" in wanted:
            try:
                have = digest(dist)
            except Unreadable as e:
                return Refusal("broken", f"{dist.name} {e}; {where} needs a digest")
            if have != wanted["digest"]:
                return _changed(dist, have, wanted["digest"], where)
        return None


def _changed(dist: Distribution, have: str, wanted: str, where: str) -> Refusal:
    said = f"{dist.name} is {have}, and {where} has {wanted}: install that one, or list it again"
    return Refusal("broken", said)


def read_allowlist(path: str, installed: Iterable[str]) -> Allowlist:
    """Raises ConfigError for a file that is none, and for a name that is not installed."""
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        made = "an allowlist, as ds-runtime plugins --lock FILE writes it"
        raise unreadable(f"--plugin-allowlist {path}", e, made) from e
    rows = raw.get("plugins") if isinstance(raw, dict) else None
    if not isinstance(rows, list) or raw.get("format") != FORMAT or not all(map(_is_row, rows)):
        raise ConfigError(
            f"--plugin-allowlist {path}: is no allowlist of format {FORMAT}; write one with "
            "ds-runtime plugins --lock FILE"
        )
    known = {_canonical(name) for name in installed}
    for row in rows:
        if _canonical(row["distribution"]) not in known:
            raise ConfigError(
                f"--plugin-allowlist {path}: {row['distribution']!r} brings no plugin here; "
                f"installed: {', '.join(sorted(known)) or 'none'}"
            )
    return Allowlist(path, {_canonical(row["distribution"]): row for row in rows})


def _is_row(row: object) -> bool:
    return (
        isinstance(row, dict)
        and "distribution" in row
        and row.keys() <= _FIELDS
        and all(isinstance(value, str) for value in row.values())
    )


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def write_allowlist(path: str, distributions: Iterable[Distribution]) -> list[str]:
    """Lock these; the names. Raises ConfigError where one has no digest or `path` no room."""
    rows = []
    for dist in sorted({d.name: d for d in distributions}.values(), key=lambda d: d.name):
        try:
            rows.append(
                {"distribution": dist.name, "version": dist.version, "digest": digest(dist)}
            )
        except Unreadable as e:
            raise ConfigError(f"plugins --lock: {dist.name} {e}") from e
    try:
        Path(path).write_text(json.dumps({"format": FORMAT, "plugins": rows}, indent=1) + "\n")
    except OSError as e:
        raise unwritable(f"plugins --lock {path}", e, "a file in a folder that is yours") from e
    return [row["distribution"] for row in rows]


def search_path() -> tuple[list[str], list[str]]:
    """(the module search path for plugins, what of the whole one is the working directory).

    A folder that packages are installed into is searched wherever the process runs.
    """
    installed = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    installed |= {*site.getsitepackages(), site.getusersitepackages()}
    safe = {Path(p).resolve() for p in installed}
    here = Path.cwd().resolve()
    kept, left = list[str](), list[str]()
    for path in sys.path:
        folder = Path(path).resolve()
        (left if folder == here and folder not in safe else kept).append(path)
    return kept, left


def hidden_by(entry: EntryPoint, left: list[str]) -> str | None:
    """Where an entry point's module would come from, if that is the working directory `left`."""
    if not left or (found := first_file(entry.module, specs := Specs())) is None:
        return None
    module, place = found
    if (spec := specs[module]) is None or spec.origin is None:
        return None  # no file
    depth = module.count(".") + (spec.submodule_search_locations is not None)
    if [*Path(place).resolve().parents][depth : depth + 1] != [Path.cwd().resolve()]:
        return None
    try:
        editable = entry.dist is not None and editable_url(entry.dist) is not None
    except ValueError:  # nobody can tell
        editable = False
    return None if editable else place
