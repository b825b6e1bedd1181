"""Why an engine ended: what each rank leaves that fails, and how that is told.

A rank leaves its reason first of all, before anything that may wait for other ranks. Those do
not hear of it from the rank: whoever started them ends them, whatever they wait in.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ds_runtime import errors
from ds_runtime.parallel.link.member import Member

if TYPE_CHECKING:
    from ds_runtime.engine.process.rankspec import RankSpec


class Reason(NamedTuple):
    """What a rank left: when it failed, the class of the error, and a sentence."""

    time: float
    rank: int
    kind: str
    message: str

    def error(self) -> errors.DsRuntimeError:
        """The error of the rank, again as its class."""
        known = getattr(errors, self.kind, None)
        if isinstance(known, type) and issubclass(known, errors.DsRuntimeError):
            with contextlib.suppress(TypeError):  # a class that is made of more than a message
                return known(self.message)
        return errors.EngineDeadError(self.message)


@contextlib.contextmanager
def during(what: str) -> Iterator[None]:
    """What fails in here is told with what was being done."""
    try:
        yield
    except BaseException as e:
        e.add_note(what)
        raise


def described(error: BaseException, rank: int) -> str:
    """A sentence on why a rank ends."""
    message = str(error)
    if isinstance(error, errors.DsRuntimeError):
        return message
    if not message and isinstance(error, MemoryError):
        message = "the system refused memory"
    said = ": ".join(filter(None, (type(error).__name__, message)))
    notes = "; ".join(getattr(error, "__notes__", ()))
    return f"engine rank {rank} failed: {said}{f' ({notes})' if notes else ''}"


def leave_reason(folder: Path, rank: int, error: BaseException, when: float | None = None) -> None:
    """Write why a rank ends, for whoever asks `reasons`. What it left before stays. when: the time;
    None: now.
    """
    path = folder / f"rank{rank}.reason"
    kind, message = type(error).__name__, described(error, rank)
    with contextlib.suppress(OSError):  # the folder is gone with the parent
        if not path.exists():
            part = path.with_suffix(".part")
            when = time.time() if when is None else when
            part.write_text(json.dumps([when, rank, kind, message]))
            part.replace(path)


@contextlib.contextmanager
def member_of(spec: RankSpec) -> Iterator[Member]:
    """The link of a rank other than 0 to rank 0, which is told of whatever fails in here. Raises
    EngineDeadError where ranks of other nodes end, with why.
    """
    with during("at the start"):
        member = Member(spec.address, spec.keys)
    try:
        member.arrive(spec.rank)
        yield member
    except BaseException as e:
        own = described(e, spec.rank)
        if not (why := member.fail(spec.rank, own)).startswith(own):
            raise errors.EngineDeadError(why) from e
        raise
    member.close()


def leave(spec: RankSpec, why: str) -> None:
    """End this rank's process at once: ranks that it waits for are gone."""
    leave_reason(spec.folder, spec.rank, errors.EngineDeadError(why))
    os._exit(1)


def reasons(folder: Path, ranks: Iterable[int]) -> list[Reason]:
    """What some ranks have left, the earliest first."""
    found = []
    for rank in ranks:
        with contextlib.suppress(FileNotFoundError):
            found.append(Reason(*json.loads((folder / f"rank{rank}.reason").read_text())))
    return sorted(found)


def bounded(run: Callable[[], object], seconds: float) -> None:
    """Run what may wait for ranks that are gone, and wait no longer; how it fails says nothing."""

    def quietly() -> None:
        with contextlib.suppress(BaseException):
            run()

    thread = threading.Thread(target=quietly, name="ds-runtime ending", daemon=True)
    thread.start()
    thread.join(seconds)
