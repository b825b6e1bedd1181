"""Where the draft layer (MTP, NextN) lies. Torch-free.

In the model it is layer `num_hidden_layers`, after the last; its checkpoint may be the model's own
or another folder, with a format of its own. Embedding and head are the model's: copies of them in
the checkpoint are not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ds_runtime.checkpoint.hub import resolve_model
from ds_runtime.description.config import ModelConfig
from ds_runtime.description.hf import load_config
from ds_runtime.errors import CheckpointError, ConfigError, UnsupportedError

_FLAG = "--speculative-algorithm"


@dataclass(frozen=True, slots=True)
class NextN:
    """The draft layer's checkpoint. layer: its number there; config: of that folder."""

    folder: Path
    layer: int
    config: ModelConfig


def find_nextn(algorithm: str, path: str | None, folder: Path, config: ModelConfig) -> NextN:
    """In the folder that the user names, else in the model's. Errors name what is missing."""
    if path is None:
        if config.mtp_layers < 1:
            raise UnsupportedError(
                f"{_FLAG} {algorithm}: {folder / 'config.json'} has no num_nextn_predict_layers, "
                "so the checkpoint has no layer that drafts; name a folder that has one with "
                "--speculative-draft-model-path, or leave the flag out"
            )
        return NextN(folder, config.layers, config)
    flag = "--speculative-draft-model-path"
    if not path:
        raise ConfigError(f"{flag} '': is empty: name a folder or a hub id, or leave it out")
    try:
        there = resolve_model(path)
        found = load_config(there)
    except (CheckpointError, ConfigError) as e:
        said = str(e).replace("--model", flag, 1)
        raise CheckpointError(said if said.startswith(flag) else f"{flag} {path}: {said}") from e
    if (config.indexing is None) != (found.indexing is None):
        have, lack = ("no indexer", "one") if found.indexing is None else ("an indexer", "none")
        raise ConfigError(
            f"{flag} {there}: its draft layer has {have} ({found.architecture}), the model has "
            f"{lack} ({config.architecture}): it belongs to another model"
        )
    own, other = dict(config.dims()), dict(found.dims())
    for name in own:
        if name not in ("layers", "intermediate") and own[name] != other[name]:
            raise ConfigError(
                f"{flag} {there}: {name} is {other[name]}, the model's is "
                f"{own[name]}: its draft layer belongs to another model"
            )
    # Exported alone, the layer is the first and only one.
    return NextN(there, 0 if found.layers == 1 else found.layers, found)
