"""Children that have been stopped by a signal: they live, and whoever waits for them does so for
ever.

Their parent asks the system for it, whatever the others wait in. One that is soon continued is let
be, so that a whole session may be suspended.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable

from ds_runtime.common.patience import STOPPED

_LOOK = 1.0  # between two looks at it


def tell_stopped(pids: Iterable[int], over: threading.Event, tell: Callable[[int], None]) -> None:
    """Until `over`, in a thread, call `tell` with every child that stays stopped, look by look.
    Never, where the system cannot say.
    """
    if hasattr(os, "waitid"):
        args = dict.fromkeys(pids, 0), over, tell
        threading.Thread(target=_watch, args=args, name="ds-runtime stopped", daemon=True).start()


def _watch(looks: dict[int, int], over: threading.Event, tell: Callable[[int], None]) -> None:
    while not over.wait(_LOOK):
        for pid in looks:
            looks[pid] = looks[pid] + 1 if is_stopped(pid) else 0
            if looks[pid] > STOPPED / _LOOK:
                tell(pid)


def is_stopped(pid: int) -> bool:
    """Whether this child is; False where the system cannot say."""
    if not hasattr(os, "waitid"):
        return False
    how = os.WSTOPPED | os.WNOHANG | os.WNOWAIT  # so that its end is left for others to see
    try:
        return os.waitid(os.P_PID, pid, how) is not None
    except ChildProcessError:
        return False
