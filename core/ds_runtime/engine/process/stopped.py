"""Ranks that have been stopped by a signal: they live, and the others wait for them for ever.

Whoever started the ranks asks the system for it: a rank that waits for another one in native code
may hold Python's lock, and can tell nothing. One that is soon continued is let be, so that a whole
session may be suspended.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from multiprocessing.process import BaseProcess

from ds_runtime.engine.process.failure import leave_reason
from ds_runtime.engine.process.rankspec import RankSpec
from ds_runtime.errors import EngineDeadError

PATIENCE = 3.0  # seconds for which a rank may be stopped
_LOOK = 1.0  # between two looks at it


def end_stopped(ranks: Iterable[tuple[RankSpec, BaseProcess]], over: threading.Event) -> None:
    """Until `over`, in a thread, end ranks that stay stopped, and leave the reason. What comes of
    that is for those who watch the processes. Nothing where the system cannot tell.
    """
    if hasattr(os, "waitid"):
        args = list(ranks), over
        threading.Thread(target=_watch, args=args, name="ds-runtime stopped", daemon=True).start()


def _watch(ranks: list[tuple[RankSpec, BaseProcess]], over: threading.Event) -> None:
    looks = [0] * len(ranks)
    while not over.wait(_LOOK):
        for number, (spec, process) in enumerate(ranks):
            looks[number] = looks[number] + 1 if _is_stopped(process) else 0
            if looks[number] > PATIENCE / _LOOK:
                said = f"was stopped by a signal and not continued for {PATIENCE:.0f} s"
                error = EngineDeadError(f"engine rank {spec.rank} {said}")
                leave_reason(spec.folder, spec.rank, error)
                process.kill()


def _is_stopped(process: BaseProcess) -> bool:
    assert process.pid is not None
    how = os.WSTOPPED | os.WNOHANG | os.WNOWAIT  # so that its end is left for others to see
    try:
        return os.waitid(os.P_PID, process.pid, how) is not None
    except ChildProcessError:
        return False
