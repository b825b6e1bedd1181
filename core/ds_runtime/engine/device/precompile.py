"""Kernels that compile when they first run, compiled during loading by processes of their own.

What they compile lies in caches on disk, where this process finds it. Such a process is
`python -m ds_runtime.engine.device.precompile`; it reads a `CompileJob` from its standard input.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from tempfile import TemporaryFile
from typing import Any

import torch

from ds_runtime.engine.device.compile_record import CompileRecord, Folders, found_in
from ds_runtime.ops.binding.bound import BoundOps
from ds_runtime.ops.contract import Facts, load_attr
from ds_runtime.platform.compilations import counted, folders, heard
from ds_runtime.platform.cores import cores_per_device

_CORES = 1.5  # of the host, for each process
_PIECES = 2  # for each at least
_TOLD = "compiled: "  # what the last line begins with; libraries may speak after it
_MEMORY = 16 << 30  # bytes of the device's size for each
_HELD = 8 << 30  # bytes that each may take of them


Task = tuple[str, Facts, range]
"""`Compiles.ahead`, facts of a place, rows of the calls there."""


@dataclass(frozen=True)
class CompileJob:
    """What one process compiles. index: the device's; share: of its memory, that torch may take;
    0: it is not known."""

    tasks: tuple[Task, ...]
    index: int | None
    share: float = 0.0


def tasks_of(bound: BoundOps, most: int) -> list[Task]:
    """Of all kernels that are bound, once per shape, the largest first. most: rows of a call."""
    found: dict[tuple[str, tuple[int, ...], str, str], Task] = {}
    for kernel, facts, ranges in bound.served(most):
        if kernel.compiles.ahead and ranges:
            rows = range(ranges[0].start, ranges[-1].stop)
            key = kernel.compiles.ahead, facts.shape, facts.weight_format, facts.dtype
            held = found.get(key, (kernel.compiles.ahead, facts, rows))[2]
            both = range(min(held.start, rows.start), max(held.stop, rows.stop))
            found[key] = kernel.compiles.ahead, facts, both
    return sorted(found.values(), key=lambda task: -prod(task[1].shape))


def divided(tasks: Sequence[Task], processes: int) -> list[list[Task]]:
    """What each process compiles. A task's rows are cut where tasks are few: rows that lie together
    are often served by one kernel.
    """
    cuts = max(1, -(-_PIECES * processes // max(1, len(tasks))))
    pieces = [
        (path, facts, part)
        for path, facts, rows in tasks
        for i in range(cuts)
        if (part := rows[len(rows) * i // cuts : len(rows) * (i + 1) // cuts])
    ]
    count = min(processes, len(pieces))
    return [pieces[first::count] for first in range(count)]


class Ahead:
    """The processes at work, from construction on; leaving the context waits for them, since they
    hold memory of the device. None is started where all was compiled before. most: rows of the
    calls that must not compile any more; 0: no process. memory: of the device, in bytes.
    """

    def __init__(self, bound: BoundOps, device: torch.device, most: int, memory: int = 0) -> None:
        tasks = tasks_of(bound, most)
        self._record = CompileRecord(tasks, [path.partition(":")[0] for path, *_ in tasks])
        if self._record.holds():
            tasks = []
        processes = max(2, min(memory // _MEMORY, int(cores_per_device() / _CORES)))
        share = min(1.0, _HELD / memory) if memory else 0.0
        self._running = [
            _Process(CompileJob(tuple(own), device.index, share))
            for own in divided(tasks, processes)
        ]

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        whole, kept = kind is None, dict[str, Sequence[int]]()
        for process in self._running:
            why = process.end(kill=kind is not None)
            whole = whole and not why
            kept.update(process.kept)
            for (compiler, kernel), count in process.compiled.items():
                heard(compiler, kernel, count)
            if why and kind is None:
                print(
                    f"kernels could not be compiled while weights were loaded ({why}); they are "
                    "compiled when they first run",
                    file=sys.stderr,
                    flush=True,
                )
        if whole and self._running:
            self._record.write(kept)


class _Process:
    """What it writes is kept for the case that it fails."""

    def __init__(self, work: CompileJob) -> None:
        self.compiled: dict[tuple[str, str], int] = {}
        self.kept: Folders = {}
        self._said = TemporaryFile()  # noqa: SIM115 (open until `end`)
        command = [sys.executable, "-P", "-m", "ds_runtime.engine.device.precompile"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self._said, stderr=self._said
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:  # `end` tells
            pickle.dump(work, pipe)

    def end(self, kill: bool) -> str:
        """The last line of one that failed or did not tell, after waiting for it."""
        if kill:
            self._process.kill()
        code = self._process.wait()
        with self._said as said:
            said.seek(0)
            lines = [line.strip() for line in said.read().decode(errors="replace").split("\n")]
        last = next((line for line in reversed(lines) if line.startswith(_TOLD)), None)
        if code or last is None:
            return next((line for line in reversed(lines) if line), f"exit {code}")
        told, self.kept = json.loads(last.removeprefix(_TOLD))
        self.compiled = {(compiler, kernel): count for compiler, kernel, count in told}
        return ""


def keep_within(device: Any, share: float) -> None:
    """Torch frees what it keeps before it takes more than this share of the memory. Calls of ever
    more rows would else take all of it, while weights are loaded. device: torch's module of it."""
    if share and (keep := getattr(device, "set_per_process_memory_fraction", None)) is not None:
        keep(share)


@torch.inference_mode()
def main() -> None:
    """The life of such a process."""
    work: CompileJob = pickle.load(sys.stdin.buffer)
    if work.index is not None:
        torch.accelerator.set_device_index(work.index)
        keep_within(torch.get_device_module(), work.share)
    for path, facts, rows in work.tasks:
        load_attr(path)(facts, rows)
    told = [(*key, count) for key, count in counted().items()]
    print(_TOLD + json.dumps((told, found_in(folders()))), flush=True)


if __name__ == "__main__":
    main()
