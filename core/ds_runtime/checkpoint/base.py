"""A checkpoint that is another one and something more: `base_model` of its config.json names that.

The value is a folder, absolute or relative to the checkpoint's own. config.json is the checkpoint's
own; tensors that it lacks, tokenizer, template and generation settings are the base's. Torch-free.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ds_runtime.checkpoint.files import Stamp, Stamps, read_object
from ds_runtime.checkpoint.gguf.folder import LINK, linked_files
from ds_runtime.config.paths import user_path
from ds_runtime.errors import CheckpointError, shown

KEY = "base_model"


def base_of(folder: Path) -> Path | None:
    """The folder of the base, or None where the checkpoint names none.

    Raises CheckpointError for a base that is not here, that has a base itself, or is no name.
    """
    if (named := _named(folder)) is None:
        return None
    where = folder / "config.json"
    if not isinstance(named, str) or not named:
        raise CheckpointError(f"{where}: {KEY} {shown(named)}: expected the folder of a checkpoint")
    base = folder / user_path(named, f"{where}: {KEY}")
    if not base.is_dir():
        raise CheckpointError(
            f"{where}: {KEY} {shown(named)}: {base} is not there; put the base's folder in its "
            "place, or change the value"
        )
    if _named(base) is not None:
        raise CheckpointError(
            f"{where}: {KEY} {shown(named)} has a {KEY} itself; name the one that holds the weights"
        )
    return base


def part_of(folder: Path, name: str) -> Path:
    """Where file `name` of a checkpoint is or would be: in its folder, else in its base's."""
    path = folder / name
    if path.exists() or (base := base_of(folder)) is None:
        return path
    return base / name


def stamps_of(folder: Path) -> Stamps:
    """Of all files in a checkpoint's folder, or an adapter's, and of those that it stands for: take
    them before the first is read. What is missing or broken is left to whoever reads it."""
    folders, files = [folder], list[Path]()
    with suppress(CheckpointError):
        folders += [base] if (base := base_of(folder)) is not None else []
    for one in folders:
        with suppress(CheckpointError, OSError):
            files += sorted(one.iterdir())
            files += linked_files(one / LINK) if (one / LINK).is_file() else []
    found = dict[Path, Stamp]()
    for file in files:
        with suppress(OSError):
            found[file] = Stamp.of(file)
    return found


def _named(folder: Path) -> object:
    """The value of the key; None for whatever the reader of config.json will complain of."""
    try:
        return read_object(folder / "config.json").get(KEY)
    except CheckpointError:
        return None
