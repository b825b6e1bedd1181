"""Files that a command writes at its end, checked at its start. Torch-free."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ds_runtime.errors import unwritable


def check_output(path: Path, flag: str, give: str = "a file in a folder that is yours") -> None:
    """Raises ConfigError where `path` cannot be written, so that no measured hour is lost.

    It makes the folder of the file, as the write would, and changes no file. flag: how the user
    named the path. give: what to name instead.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path):
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as e:
        raise unwritable(f"{flag} {path}", e, give) from e
