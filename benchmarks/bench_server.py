"""A server of the demo model in processes of its own, for benchmarks that load it."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil


@contextlib.contextmanager
def served(*flags: str, seconds: float = 120.0) -> Iterator[tuple[str, psutil.Process]]:
    """(address, the server's process), once it serves within so many seconds; ended at the end."""
    command = [sys.executable, "-m", "ds_runtime", "serve", "--port", "0", *flags]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True)
        try:
            yield _address(process, log.name, seconds), psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            finally:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[str], log: str | int, seconds: float) -> str:
    path, deadline = Path(f"/proc/self/fd/{log}"), time.monotonic() + seconds
    while True:
        said = path.read_text()
        if found := re.search(r"serving .* at (http://\S+) ", said):
            return found[1]
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not start: {said}")
        time.sleep(0.1)
