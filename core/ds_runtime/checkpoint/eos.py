"""The ids that end a text, as a checkpoint's JSON files give them. Torch-free."""

from __future__ import annotations

from pathlib import Path

from ds_runtime.checkpoint.files import read_settings
from ds_runtime.errors import CheckpointError, shown


def eos_ids(path: Path) -> list[int]:
    """`eos_token_id` of a JSON file as a list; [] where file or key is missing.

    Raises CheckpointError with file, key and value when it is no id and no list of ids.
    """
    found = read_settings(path).get("eos_token_id")
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise CheckpointError(
            f"{path}: eos_token_id {shown(found)} is neither a token id nor a list of them; "
            "write the number of the end token"
        )
    return ids
