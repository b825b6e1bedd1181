"""`--model` → a checkpoint folder: the embedded demo, a folder, or a hub id. Torch-free."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from ds_runtime.errors import CheckpointError

PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt"]  # data only: no code, no pickle


def resolve_model(name: str) -> Path:
    """The folder of `name`. A hub id comes from the local cache, else is downloaded.

    Raises CheckpointError with the command to run when it is neither here nor reachable.
    """
    if name == "demo":
        return Path(str(importlib.resources.files("ds_runtime.demo")))
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"--model {name}: is a file; give the folder that holds config.json")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise CheckpointError(
            f"--model {name}: no such folder; give a checkpoint folder, a hub id like "
            "deepseek-ai/DeepSeek-V2-Lite, or 'demo'"
        )
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=PATTERNS, local_files_only=True))
    except LocalEntryNotFoundError:
        pass  # not cached: download below
    try:
        return Path(snapshot_download(name, allow_patterns=PATTERNS))
    except Exception as e:
        raise CheckpointError(
            f"--model {name}: not in the local cache, and the download failed "
            f"({type(e).__name__}: {e}); where there is a network, run: hf download {name}"
        ) from e
