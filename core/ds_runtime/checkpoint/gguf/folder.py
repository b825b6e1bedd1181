"""`--model FILE.gguf` → a folder of JSON files that stands for it, and back to the tensors.

The folder lies in the user's cache, under a name that changes with the file. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_runtime.checkpoint.files import read_object
from ds_runtime.checkpoint.gguf.config import config_json
from ds_runtime.checkpoint.gguf.header import GgufTensor, Header, read_header
from ds_runtime.checkpoint.gguf.names import named
from ds_runtime.checkpoint.gguf.tokenizer import tokenizer_files
from ds_runtime.errors import CheckpointError

LINK = "gguf.json"  # in the folder: the files, and how many layers are the model's
_MADE = 2  # changes where the same file would give other JSON
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_GENERATION = "generation_config.json"


def folder_of(path: Path) -> Path:
    """The folder that stands for a GGUF file, made if it is not there.

    tokenizer.json and its neighbours next to the file count before the file's own vocabulary.
    """
    path = path.resolve()
    stat = path.stat()
    beside = [path.parent / name for name in (*_TOKENIZER, _GENERATION)]
    there = [(p.name, p.stat().st_mtime_ns) for p in beside if p.is_file()]
    said = json.dumps([_MADE, str(path), stat.st_size, stat.st_mtime_ns, there])
    folder = _cache() / hashlib.sha256(said.encode()).hexdigest()[:16] / path.stem
    if not (folder / LINK).is_file():
        try:
            _make(path, folder, [p for p in beside if p.is_file()])
        except OSError as e:
            raise CheckpointError(
                f"--model {path}: {folder} cannot be written: {e}; it holds what the file says of "
                "the model, so HOME must name a folder with some space"
            ) from e
    return folder


def _cache() -> Path:
    return Path.home() / ".cache" / "ds-runtime" / "gguf"


def _make(path: Path, folder: Path, beside: list[Path]) -> None:
    """All files at once, so that nobody sees half of them."""
    header = read_files(path)
    where = str(path)
    raw = config_json(header.values, header.tensors, where)
    link = {
        "files": sorted({str(t.file) for t in header.tensors.values()}),
        "layers": raw["num_hidden_layers"],
    }
    files: dict[str, Mapping[str, Any]] = {"config.json": raw, LINK: link}
    if not any(p.name == "tokenizer.json" for p in beside):
        files |= tokenizer_files(header.values, where)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    for name, content in files.items():
        text = json.dumps(content, ensure_ascii=False)
        (scratch / name).write_text(text, encoding="utf-8")
    for source in beside:
        shutil.copyfile(source, scratch / source.name)
    try:
        os.rename(scratch, folder)
    except OSError:  # another process was faster
        shutil.rmtree(scratch)
        if not (folder / LINK).is_file():
            raise


def read_files(path: Path) -> Header:
    """The header of a file, with the tensors of all its parts if it was split."""
    first = read_header(path)
    count = first.values.get("split.count", 0) or 1
    if count == 1:
        return first
    number, of = "-00001-of-", f"{count:05}.gguf"
    if not path.name.endswith(number + of):
        raise CheckpointError(
            f"--model {path}: is one of {count} parts; give the first, which ends in {number}{of}"
        )
    tensors: dict[str, GgufTensor] = dict(first.tensors)
    for i in range(2, count + 1):
        part = path.with_name(path.name.removesuffix(number + of) + f"-{i:05}-of-{of}")
        if not part.is_file():
            raise CheckpointError(f"{part}: missing; {path.name} says that there are {count} parts")
        tensors |= read_header(part).tensors
    return Header(first.values, tensors)


def linked_files(link: Path) -> list[Path]:
    """The files that `link` names."""
    return _read(link)[0]


def _read(link: Path) -> tuple[list[Path], int]:
    try:
        said = read_object(link)
        return [Path(name) for name in said["files"]], int(said["layers"])
    except (CheckpointError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(
            f"{link}: cannot be read ({type(e).__name__}: {e}); delete {link.parent} and give "
            "--model the GGUF file again"
        ) from e


def linked_tensors(link: Path) -> dict[str, GgufTensor]:
    """The tensors of the files that `link` names."""
    files, layers = _read(link)
    tensors: dict[str, GgufTensor] = {}
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file}: is no longer there; give --model the GGUF file again")
        tensors |= read_header(file).tensors
    return named(tensors, layers)
