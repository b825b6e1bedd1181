"""A trace of what rank 0 does between a start and a stop, as torch's profiler writes it."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import torch

from ds_runtime.errors import RequestError, unwritable


class Profiler:
    """One trace at a time, of the host and of whatever device torch can trace."""

    def __init__(self) -> None:
        self._running: torch.profiler.profile | None = None
        self._folder = ""

    def start(self, folder: str) -> None:
        """Begin. RequestError while another trace runs, or if `folder` cannot be written."""
        if self._running is not None:
            raise RequestError("a profile is running: stop it first, with /stop_profile")
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as e:
            said = unwritable(f"--profile-dir {folder}", e, "another folder")
            raise RequestError(str(said)) from e
        if not os.access(folder, os.W_OK):
            raise RequestError(f"--profile-dir {folder}: may not be written")
        profile = torch.profiler.profile()  # of everything that torch can trace here
        profile.start()
        self._running, self._folder = profile, folder

    def stop(self) -> str:
        """End, and write the trace; its path. RequestError if none runs or the disk is full."""
        profile, self._running = self._running, None
        if profile is None:
            raise RequestError("no profile is running: begin one with /start_profile")
        profile.stop()
        name = time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}.trace.json.gz")
        path = Path(self._folder) / name
        try:
            profile.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as e:
            with contextlib.suppress(OSError):
                path.unlink()
            raise RequestError(f"the trace {path} cannot be written: {e}") from e
        return str(path)
