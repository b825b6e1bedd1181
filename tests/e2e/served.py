"""`ds-runtime serve` as its users run it: a process of its own, with the real engine behind it."""

from __future__ import annotations

import contextlib
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil


class Serving:
    """A server's process; `url` once it serves. Its lines are read as they come."""

    def __init__(self, model: Path | str, *flags: str) -> None:
        command = [sys.executable, "-m", "ds_runtime", "serve", "--model", str(model), *flags]
        self.process = subprocess.Popen(
            [*command, "--platform", "cpu", "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._queue: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            self._queue.put(line)
        self.process.stdout.close()

    def wait(self, pattern: str, timeout: float = 120.0) -> re.Match[str]:
        """The match in the next line that has one."""
        while True:
            try:
                line = self._queue.get(timeout=timeout)
            except queue.Empty:
                raise AssertionError(f"no {pattern!r} in {self.lines}") from None
            if found := re.search(pattern, line):
                return found

    def wait_url(self) -> str:
        """The address, once it serves."""
        return self.wait(r"serving .* at (http://\S+) ")[1]

    def ranks(self) -> list[psutil.Process]:
        """The engine's processes, in the order of their start."""
        children = psutil.Process(self.process.pid).children(recursive=False)
        found = [c for c in children if any("spawn_main" in word for word in c.cmdline())]
        return sorted(found, key=psutil.Process.create_time)

    def end(self) -> None:
        """Stop, at once if it must be."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join()


@contextlib.contextmanager
def serving(model: Path | str, *flags: str) -> Iterator[Serving]:
    """A started server, ended with all its processes."""
    one = Serving(model, *flags)
    try:
        yield one
    finally:
        one.end()


def rests(process: psutil.Process) -> bool:
    """Whether a process comes to use no processor: spinning threads and last words take a while."""
    for _ in range(8):
        before = process.cpu_times()
        time.sleep(0.5)
        after = process.cpu_times()
        if after.user + after.system - before.user - before.system < 0.05:
            return True
    return False
