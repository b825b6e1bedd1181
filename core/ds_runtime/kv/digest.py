"""A short name for the weights in a folder: what is alike in two places has the same one.

Weights take minutes to read, so a digest is of all names, shapes and formats, of small tensors as a
whole, and of three blocks of each large one. Whoever trains or rounds a checkpoint again changes
these. Someone who means to deceive changes other bytes: keys of pages are no proof of weights.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path

from ds_runtime.checkpoint.files import Stamp, Stamps, open_plain, read_bytes
from ds_runtime.checkpoint.tensors import StoredTensor, read_header, tensors_of
from ds_runtime.errors import CheckpointError

_WHOLE = 64 << 10  # bytes of a tensor that are all read
_BLOCK = 4 << 10  # bytes that are read in front, in the middle and at the end of another
_CONFIG, _ADAPTER = "config.json", "adapter_config.json"
_ADAPTED = "adapter_model.safetensors"


def weights_digest(folder: Path, loaded: Stamps, most: int | None = None) -> str:
    """Of a checkpoint and its config.json, or of an adapter: 64 hexadecimal digits. loaded: stamps
    of its files from before they were loaded. most: tensors that are read, evenly among all; else
    every one. Raises CheckpointError, also for files that have changed since: what runs is of
    others then."""
    try:
        if (folder / _ADAPTER).is_file():
            said, entries = folder / _ADAPTER, read_header(folder / _ADAPTED)
        else:
            said, entries = folder / _CONFIG, tensors_of(folder)
        found = _digest(read_bytes(said), entries, most)
        _check({said, *(entry.file for entry in entries.values())}, loaded)
    except OSError as e:
        raise CheckpointError(f"{folder}: its weights cannot be read for their digest: {e}") from e
    return found


def config_digest(folder: Path, loaded: Stamps) -> str:
    """As `weights_digest`, of config.json alone."""
    found = hashlib.sha256(read_bytes(folder / _CONFIG)).hexdigest()
    _check({folder / _CONFIG}, loaded)
    return found


def _check(files: Collection[Path], loaded: Stamps) -> None:
    """After they were read: a file that changes meanwhile has another stamp for ever."""
    for file in sorted(files):
        if loaded.get(file) != Stamp.of(file):
            raise CheckpointError(
                f"{file}: has changed since it was loaded, so nobody can say what pages are of: "
                "start the engine again (an adapter: load it again) to hand pages over"
            )


def _digest(said: bytes, entries: Mapping[str, StoredTensor], most: int | None) -> str:
    found, files = hashlib.sha256(said), dict[Path, int]()
    step = 1 if most is None else -(-len(entries) // most)
    with ExitStack() as opened:
        for number, (name, entry) in enumerate(sorted(entries.items())):
            found.update(json.dumps([name, entry.dtype, entry.shape]).encode())
            if number % step:
                continue
            if entry.file not in files:
                files[entry.file] = opened.enter_context(open_plain(entry.file)).fileno()
            for begin, size in _blocks(entry):
                found.update(os.pread(files[entry.file], size, begin))
    return found.hexdigest()


def _blocks(entry: StoredTensor) -> list[tuple[int, int]]:
    """Where its bytes are read: (offset in the file, number)."""
    begin, size = entry.begin, entry.nbytes
    if size <= _WHOLE:
        return [(begin, size)]
    return [(begin + at, _BLOCK) for at in (0, (size - _BLOCK) // 2, size - _BLOCK)]
