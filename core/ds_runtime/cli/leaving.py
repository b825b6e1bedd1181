"""A command whose process is ended from within, by a plugin or a library, says so and fails."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

from ds_runtime.errors import ConfigError


def own_streams() -> None:
    """Standard streams that the caller closed (`>&-`, some daemons) lead nowhere from now on.

    Their numbers would go to the next socket or file, and a client or a page of the KV cache would
    get what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        null = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is the closed one's
        os.set_inheritable(null, True)
        setattr(sys, name, os.fdopen(null, "w" if number else "r", encoding="utf-8", closefd=False))


def check_folder(needed: bool = True) -> None:
    """Raises ConfigError in a working directory that was deleted, or whose path may not be read:
    torch's libraries end there. Where none is needed, as for help, `/` becomes the process's.
    """
    try:
        os.getcwd()
    except OSError as e:
        if not needed:
            os.chdir(os.sep)  # imports resolve paths
        elif isinstance(e, FileNotFoundError):
            raise ConfigError("the working directory was deleted: cd to one that exists") from e
        else:
            said = f"the working directory cannot be read: {e.strerror}: cd to one that is yours"
            raise ConfigError(said) from e


@contextlib.contextmanager
def never_unseen() -> Iterator[None]:
    """Until its end, `os._exit` in this process says who called it, and no exit code of it is 0.

    Processes that come of this one leave as they like. What native code ends is not seen.
    """
    leave, owner = os._exit, os.getpid()

    def told(status: int) -> NoReturn:
        if os.getpid() == owner:
            caller = sys._getframe(1)
            with contextlib.suppress(OSError, ValueError):
                print(
                    f"ds-runtime: {caller.f_code.co_filename}, line {caller.f_lineno}, has ended "
                    f"this process by os._exit({status}), before the command was done; ds-runtime "
                    "plugins lists whose code is loaded",
                    file=sys.stderr,
                    flush=True,
                )
            status = status or 1
        leave(status)

    os._exit = told
    try:
        yield
    finally:
        os._exit = leave
