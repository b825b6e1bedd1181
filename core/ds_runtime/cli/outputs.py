"""Files that a command writes at its end, checked at its start. Torch-free."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ds_runtime.errors import unwritable


def check_output(path: Path, flag: str, give: str = "a file in a folder that is yours") -> None:
    """Raises ConfigError where `path` cannot be written, so that no measured hour is lost.

    It changes no file and makes no folder, though the write may make some. A link stands for what
    it leads to, which need not be there yet. A pipe is not touched. flag: how the user named the
    path. give: what to name instead.
    """
    real = Path(os.path.realpath(path))
    try:
        if real.is_fifo():
            return
        if os.path.lexists(real):
            os.close(os.open(real, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        else:
            there = next(folder for folder in real.parents if os.path.lexists(folder))
            tempfile.TemporaryFile(dir=there).close()
    except OSError as e:
        raise unwritable(f"{flag} {path}", e, give) from e
