"""`--model` → a checkpoint folder: the embedded demo, a folder, a GGUF file or a hub id.

Torch-free.
"""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from ds_runtime.checkpoint.base import part_of
from ds_runtime.checkpoint.files import LISTS, read_object
from ds_runtime.config.paths import user_path
from ds_runtime.errors import CheckpointError

EMBEDDED = {
    "demo": "ds_runtime.demo",
    "demo-v32": "ds_runtime.demo_v32",
    "demo-v4": "ds_runtime.demo_v4",
}
PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt"]  # data only: no code, no pickle


def resolve_model(name: str) -> Path:
    """The folder of `name`. A hub id comes from the local cache, else is downloaded.

    Raises CheckpointError with the command to run when it is neither here nor reachable. Also for a
    path that cannot be read. Raises ConfigError for the home of a user who has none.
    """
    if name in EMBEDDED:
        return Path(str(importlib.resources.files(EMBEDDED[name])))
    folder = user_path(name, "--model")
    try:
        is_folder, is_there = folder.is_dir(), folder.exists()
    except OSError as e:
        raise CheckpointError(
            f"--model {name}: cannot be read: {e.strerror}; give a checkpoint folder of yours"
        ) from e
    if is_folder:
        return folder
    if folder.suffix == ".gguf" and folder.is_file():
        from ds_runtime.checkpoint.gguf.folder import folder_of

        return folder_of(folder)
    if is_there:
        raise CheckpointError(
            f"--model {name}: is a file; give the folder that holds config.json, or a .gguf file"
        )
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise CheckpointError(
            f"--model {name}: no such folder; give a checkpoint folder, a hub id like "
            f"deepseek-ai/DeepSeek-V2-Lite, or one of {', '.join(map(repr, EMBEDDED))}"
        )
    return _from_hub(name)


def plan_name(folder: Path) -> str:
    """What a plan calls a checkpoint: an embedded one as users do, others by their folder."""
    return next((name for name in EMBEDDED if resolve_model(name) == folder), folder.name)


def text_folder(folder: Path, load_format: str) -> Path:
    """Where tokenizer and template lie: in the model's folder. Those of the demo stand in for a
    model of dummy weights that has none."""
    if load_format == "dummy" and not part_of(folder, "tokenizer.json").exists():
        return resolve_model("demo")
    return folder


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    here = "not in the local cache"
    try:
        folder = Path(snapshot_download(name, allow_patterns=PATTERNS, local_files_only=True))
        if not (lacking := _missing_shards(folder)):
            return folder
        here = lacking
    except HFValidationError as e:
        raise CheckpointError(
            f"--model {name!r}: no such folder, and no hub id: one is OWNER/NAME of letters, "
            "digits, '-', '_' and '.', like deepseek-ai/DeepSeek-V2-Lite"
        ) from e
    except LocalEntryNotFoundError as e:
        if partial := getattr(e, "snapshot_path", None):
            here = f"{partial}: an earlier download did not finish"
    command = f"where there is a network, run: hf download {name}"
    try:
        folder = Path(snapshot_download(name, allow_patterns=PATTERNS))
    except Exception as e:
        said = str(e).strip().partition("\n")[0].rstrip(".:")  # the hub's errors are paragraphs
        failed = f"the download failed ({type(e).__name__}: {said})"
        raise CheckpointError(f"--model {name}: {here}, and {failed}; {command}") from e
    if lacking := _missing_shards(folder):  # without a network this may be the cache again
        raise CheckpointError(f"--model {name}: {lacking}; {command}")
    return folder


def _missing_shards(folder: Path) -> str:
    """Which shards the index names and the folder lacks, or ""."""
    try:
        index = read_object(folder / "model.safetensors.index.json", LISTS)
        names = {str(name) for name in index["weight_map"].values()}
    except (CheckpointError, KeyError, AttributeError):
        return ""  # no index, or one that whoever opens the checkpoint complains of
    lacking = sorted(name for name in names if not (folder / name).is_file())
    if not lacking:
        return ""
    count, here = len(names), len(names) - len(lacking)
    return f"{folder / lacking[0]}: missing; the index names {count} shards and {here} are here"
