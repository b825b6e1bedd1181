"""The process of one rank, from its first line to its end.

A rank that fails leaves its reason in the private folder and exits. It exits at once when its
parent dies.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path

from ds_runtime.engine.process.entry import set_environment
from ds_runtime.engine.process.failure import during, leave_reason, member_of
from ds_runtime.engine.process.rankspec import RankSpec
from ds_runtime.engine.process.sentry import LEFT
from ds_runtime.errors import DsRuntimeError

SHOW_THREADS: int | None = getattr(signal, "SIGUSR1", None)
"""The signal on which a rank writes where each of its threads is; None where there is none."""


NAME = "ds-runtime rank"
"""What the processes of ranks are called, before their number."""
UNGUARDED = 113
"""The exit code of one that was to make an engine of its own."""


def leave_unless_guarded() -> None:
    """End a rank's process that imports the user's script, which makes an engine once more."""
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False) and process.name.startswith(NAME):
        os._exit(UNGUARDED)


def rank_main(
    spec: RankSpec, output: Connection | None = None, life: Connection | None = None
) -> None:
    """Entry of a rank's process; leaves the reason in the folder when it fails.

    `output`: a pipe for what it writes, also below Python. `life`: one that ends with the process.
    """
    # The parent decides when to leave, also where a signal comes to the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)  # ignored, but not by what this process starts
    if output is not None:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        output.close()
    if SHOW_THREADS is not None:
        faulthandler.register(SHOW_THREADS, all_threads=True)
    _exit_with_parent(spec.folder)
    try:
        if spec.rank == 0:
            _prepare(spec)
            from ds_runtime.engine.process.loop import serve

            serve(spec)
        else:
            with member_of(spec) as member:
                _prepare(spec)
                from ds_runtime.engine.process.ranks import follow

                follow(spec, member)
        if life is not None:
            os.write(life.fileno(), LEFT)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # taking torch down in order costs a second
    except BaseException as e:
        leave_reason(spec.folder, spec.rank, e)
        if not isinstance(e, DsRuntimeError):
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # no clean-up: other ranks may never answer again


def _prepare(spec: RankSpec) -> None:
    with during("at the start"):
        set_environment(spec.process_env())


def _exit_with_parent(folder: Path) -> None:
    """Leave as soon as the parent has, and take the folder along that it can no longer remove."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
