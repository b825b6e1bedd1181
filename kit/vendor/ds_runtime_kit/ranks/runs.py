"""Ranks in a process for each, asked what `ranks` asks; one of them may die, or hang.

Torch-free at import: a platform's `process_env` is set in a rank's process before torch loads.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from ds_runtime.common.patience import WHOLE
from ds_runtime.errors import ConfigError, DsRuntimeError
from ds_runtime_kit.ranks.checks import drawn
from ds_runtime_kit.ranks.optional import NONE
from ds_runtime_kit.ranks.questions import Key, questions

if TYPE_CHECKING:
    from ds_runtime.platform.contract import Platform

_DEAD = "a dead rank"
_QUIET = 120.0  # seconds without a word of any rank, after which they hang
Told = dict[int, dict[Key, str]]


@dataclass(frozen=True)
class RankResult:
    """What one question found. group: its name and ranks; failure: of the first rank with one;
    note: what a vendor may want to know of one that conforms.
    """

    op: str
    group: str
    case: str
    failure: str = ""
    note: str = ""


def check_ranks(platform: str, plugins: Sequence[str] | None, size: int) -> Iterator[RankResult]:
    """Ask every question of the platform's communicator with `size` ranks. Raises ConfigError where
    there are fewer devices, or ranks cannot meet.
    """
    for killed in (None, size - 1):
        with tempfile.TemporaryDirectory(prefix="ds-runtime-conform-") as folder:
            yield from _collected(_Ranks(platform, plugins, size, f"{folder}/meet", killed))


class _Ranks:
    """The processes. killed: the rank that dies once all have met."""

    def __init__(
        self,
        platform: str,
        plugins: Sequence[str] | None,
        size: int,
        meet: str,
        killed: int | None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.size, self.killed = size, killed
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            args = (platform, plugins, rank, size, f"file://{meet}", theirs, killed)
            process = context.Process(target=_rank, args=args, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _collected(ranks: _Ranks) -> Iterator[RankResult]:
    """What the ranks found, joined; then what became of them where one was to die."""
    try:
        yield from _died(ranks) if ranks.killed is not None else _answered(ranks)
    finally:
        ranks.end()


def _answered(ranks: _Ranks) -> Iterator[RankResult]:
    told: Told = {}
    asked: dict[int, Key] = {}
    ended: dict[int, str] = {}
    quiet = ""
    for rank, word in _words(ranks, _QUIET):
        if word is None:
            quiet = f"has not returned after {_QUIET:.0f} s without a word"
        elif word[0] == "ended":
            ended[rank] = f"its process has ended (exit code {_code(ranks, rank)})"
            if rank not in asked:
                raise ConfigError(f"--ranks {ranks.size}: rank {rank}: {ended[rank]}")
            if asked[rank] not in told.get(rank, {}):
                break  # nobody can answer any more
        elif word[0] == "asked":
            asked[rank] = word[1]
        elif word[0] == "found":
            told.setdefault(rank, {})[word[1]] = word[2]
    for key in dict.fromkeys([*told.get(0, {}), *asked.values()]):
        said = [f"rank {r}: {found[key]}" for r, found in sorted(told.items()) if found.get(key)]
        said += [
            f"rank {r}: {ended.get(r, quiet)}"
            for r, last in sorted(asked.items(), key=lambda one: one[0] not in ended)
            if last == key and key not in told.get(r, {})
        ]
        yield RankResult(*key, failure=said[0] if said else "")


def _died(ranks: _Ranks) -> Iterator[RankResult]:
    """Ranks that wait for a dead one may do so, as whoever started them ends them. On other
    machines a thread of their own does, which has to run.
    """
    alive, failure, waits = {*range(ranks.size)} - {ranks.killed}, "", list[str]()
    for rank, word in _words(ranks, WHOLE):
        if word is None:
            names = ", ".join(map(str, sorted(alive)))
            failure = failure or (
                f"rank {names} had not ended {WHOLE:.0f} s after rank {ranks.killed} was dead, "
                "and no other thread of it has run: its wait holds Python's lock"
            )
        elif word[0] == "ended":
            alive.discard(rank)
        elif word[0] == "returned":
            failure = f"rank {rank} got a sum although rank {ranks.killed} was dead"
        elif word[0] == "waits":
            waits.append(f"rank {rank}")
    note = f"{', '.join(sorted(waits))} waited for ever, and was ended" if waits else ""
    yield RankResult("all_reduce", f"all {ranks.size}", _DEAD, failure, note)


def _words(ranks: _Ranks, patience: float) -> Iterator[tuple[int, tuple[Any, ...] | None]]:
    """(rank, what it says) until all have ended, or for one who says nothing for so long, once all
    have begun, None. Raises ConfigError where a rank is refused.
    """
    open_, begun = dict(enumerate(ranks.pipes)), set[int]()
    while open_:
        limit = patience if len(begun) == ranks.size else max(patience, _QUIET)
        if not (ready := wait(list(open_.values()), limit)):
            yield min(open_), None
            return
        for rank, pipe in list(open_.items()):
            if pipe not in ready:
                continue
            try:
                word = pipe.recv()
            except EOFError:
                del open_[rank]
                word = ("ended",)
            begun.add(rank)
            if word[0] == "refused":
                raise ConfigError(f"--ranks {ranks.size}: {word[1]}")
            yield rank, word


def _code(ranks: _Ranks, rank: int) -> int | None:
    ranks.processes[rank].join(1.0)
    return ranks.processes[rank].exitcode


def _rank(
    name: str,
    plugins: Sequence[str] | None,
    rank: int,
    size: int,
    meet: str,
    pipe: Connection,
    killed: int | None,
) -> None:
    """The life of one rank's process."""
    try:
        platform = _platform(name, plugins, rank, size)
        everyone = platform.communicator(rank, size, meet, 60.0)
        pipe.send(("begun",))
        if killed is None:
            for key, run in questions(platform, everyone):
                pipe.send(("asked", key))
                pipe.send(("found", key, _answer(run)))
            everyone.barrier()
            everyone.close()
            return
        everyone.barrier()
        if rank == killed:
            os._exit(1)
        threading.Thread(target=_waits, args=(pipe,), daemon=True).start()
        with contextlib.suppress(Exception):  # an error is what it should get
            value = everyone.all_reduce(drawn(platform, "float32", (4, 4), 0, rank))
            platform.synchronize()
            pipe.send(("returned", float(value.sum())))
        os._exit(0)
    except DsRuntimeError as e:
        pipe.send(("refused", str(e)))
    except BaseException:
        pipe.send(("refused", f"rank {rank}: {traceback.format_exc()}"))
    pipe.close()
    os._exit(1)  # other ranks may never answer again


def _platform(name: str, plugins: Sequence[str] | None, rank: int, size: int) -> Platform:
    from ds_runtime.config import EngineConfig
    from ds_runtime.engine.process.entry import enter, set_environment
    from ds_runtime.plugins.manager import load_plugins
    from ds_runtime.plugins.select_platform import select_platform

    platform, _ = select_platform(load_plugins(plugins), name)
    platform.configure(EngineConfig(tp=size))
    set_environment(platform.process_env())
    try:
        platform.info(rank)
    except Exception as e:
        raise ConfigError(f"device {rank} cannot be had: {e}") from e
    enter(platform, rank, size, 1)
    return platform


def _waits(pipe: Connection) -> None:
    """End this process, unless it does by itself."""
    time.sleep(WHOLE / 2)
    pipe.send(("waits",))
    os._exit(0)


def _answer(run: Callable[[], str]) -> str:
    try:
        return run()
    except Exception as e:
        return f"{type(e).__name__}: {e}"


def as_lines(found: Sequence[RankResult]) -> list[str]:
    """A line per op and group, and below it what is wrong."""
    grouped: dict[tuple[str, str], list[RankResult]] = {}
    for one in found:
        grouped.setdefault((one.op, one.group), []).append(one)
    of_op = 2 + max((len(op) for op, _ in grouped), default=0)
    of_group = 2 + max((len(group) for _, group in grouped), default=0)
    lines = []
    for (op, group), results in grouped.items():
        judged = "FAILED" if any(r.failure for r in results) else "conforms"
        said = f"{judged} ({len(results)} cases)"
        if len(results) == 1 and results[0].case.startswith(NONE):
            said = results[0].case
        lines.append(f"{op:<{of_op}}{group:<{of_group}}{said}")
        lines += [f"  {r.case}: {r.failure or r.note}" for r in results if r.failure or r.note]
    return lines


def as_dict(found: Sequence[RankResult]) -> list[dict[str, Any]]:
    """For JSON."""
    return [asdict(one) for one in found]
