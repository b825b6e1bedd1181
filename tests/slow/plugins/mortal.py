"""A platform and a kernel of which a rank dies where, and how, the environment says.

MORTAL: "RANK PHASE HOW COMMUNICATOR"; MORTAL_AT: the file that gets the time of the death;
MORTAL_SLOW: "PHASE SECONDS", in each packing ("load") or in closing ("close") of rank 0;
MORTAL_BASE: "module:class" of the platform that it is otherwise (default: the CPU's, with
communicators of its own).
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from ds_runtime.api import OPS, Facts, Kernel, TorchCommunicator, hookimpl
from ds_runtime.ops.contract import load_attr
from ds_runtime.platform.contract import Platform
from ds_runtime_cpu.platform import CpuPlatform

CAUSE = "this is the cause"
PROMPT = 40  # tokens of the prompts that count; the first steps have others
SLEEP = 60.0  # seconds


def rank() -> int:
    """Of this process: as its name says, else it is the user's own."""
    name = multiprocessing.current_process().name
    return int(name.rpartition(" ")[2]) if name.startswith("ds-runtime rank") else 0


def plan() -> tuple[int, str, str, str]:
    """(rank, phase, how, communicator)."""
    number, phase, how, communicator = os.environ["MORTAL"].split()
    return int(number), phase, how, communicator


def die(phase: str) -> None:
    """If it is time."""
    number, when, how, _ = plan()
    if (number, when) != (rank(), phase):
        return
    Path(os.environ["MORTAL_AT"]).write_text(str(time.time()))
    if how == "exit":
        os._exit(7)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        return os.kill(os.getpid(), signal.SIGSTOP)
    if how == "sleep":  # longer than others wait
        return time.sleep(SLEEP)
    raise SystemExit(CAUSE) if how == "leave" else RuntimeError(CAUSE)


def dawdle(phase: str) -> None:
    """Take one's time, in rank 0."""
    when, seconds = os.environ.get("MORTAL_SLOW", "never 0").split()
    if when == phase and rank() == 0:
        time.sleep(float(seconds))


class Backend:
    """Another, until it dies."""

    def __init__(self, backend) -> None:
        self._backend = backend

    def capture(self, run):
        """See GraphBackend."""
        die("capture")
        return self._backend.capture(run)


def never(hold: bool) -> None:
    """As a device that waits for ever for a rank; hold: together with Python's lock."""
    wait = ctypes.PyDLL(None).sleep if hold else ctypes.CDLL(None).sleep
    while True:
        wait(3600)


class Starting(TorchCommunicator):
    """Its sums that overlap compute are what a rank dies in: where the others have started one that
    it has not ("unstarted"), and where it has started its own ("started")."""

    def all_reduce_async(self, x):
        counts = x.shape[0] == PROMPT // 2
        if counts:
            die("unstarted")
        end = super().all_reduce_async(x)
        if counts:
            die("started")
        return end


class Deaf(Starting):
    """Does not notice that a rank has died, and leaves the group only together with all others."""

    hold = False

    def _or_never(self, call, *args):
        try:
            return call(*args)
        except RuntimeError:
            never(self.hold)

    def all_reduce(self, x):
        return self._or_never(super().all_reduce, x)

    def all_reduce_async(self, x):
        end = super().all_reduce_async(x)
        return lambda: self._or_never(end)

    def all_gather(self, x):
        return self._or_never(super().all_gather, x)

    def gather_objects(self, value):
        return self._or_never(super().gather_objects, value)

    def close(self):
        self.gather_objects(None)
        super().close()


class Holding(Deaf):
    """Waits with Python's lock."""

    hold = True


class Spinning(TorchCommunicator):
    """Sums as a kernel of its own would: each rank counts up and polls until the others have, too,
    without a time limit.
    """

    def __init__(self, backend, rank, size, init_method, timeout=600.0):
        super().__init__(backend, rank, size, init_method, timeout)
        path = Path(init_method.removeprefix("file://")).with_name("counts")
        path.touch()
        os.truncate(path, 8 * size)
        self._counts = np.memmap(path, np.int64, "r+", shape=(size,))

    def all_reduce(self, x):
        self._counts[self.rank] += 1
        while self._counts.min() < self._counts[self.rank]:
            pass
        return super().all_reduce(x)


KINDS = {"gloo": Starting, "deaf": Deaf, "holding": Holding, "spinning": Spinning}


class Dying(Platform):
    """What is added before a platform."""

    name = "mortal"

    def process_env(self):
        die("environment")
        return super().process_env()

    def init_worker(self, *given):
        die("device")
        super().init_worker(*given)

    def communicator(self, rank, size, init_method, timeout=600.0):
        die("start")
        made: Any = super().communicator(rank, size, init_method, timeout)
        close = made.close

        def dying():
            made.close = close  # whoever cleans up behind the failure can
            die("close")
            dawdle("close")
            close()

        made.close = dying
        return made

    def graph_backend(self, rank=0):
        return Backend(super().graph_backend(rank))


class Host(CpuPlatform):
    """The CPU, with steps that are captured at the start, as torch's ops."""

    capture_after = 0
    captures = True

    def communicator(self, rank, size, init_method, timeout=600.0):
        return KINDS[plan()[3]]("gloo", rank, size, init_method, timeout)

    def graph_backend(self, rank=0):
        from ds_runtime_kit.checks.replay import ReplayBackend

        return ReplayBackend()


class Linear:
    """The reference, which knows in which step it is by the number of rows."""

    def __init__(self, facts: Facts) -> None:
        from ds_runtime.ops.reference.matrices.linear import ReferenceLinear

        self._reference = ReferenceLinear(facts)
        self._prompted = False

    def pack(self, weight, facts):
        die("load")
        dawdle("load")
        return self._reference.pack(weight, facts)

    def apply(self, x, packed):
        if x.shape[0] == PROMPT:
            self._prompted = True
            die("prefill")
        elif self._prompted:
            die("decode")
        return self._reference.apply(x, packed)


@hookimpl
def ds_platform():
    path = os.environ.get("MORTAL_BASE")
    base = Host() if path is None else load_attr(path)()
    made = type("Mortal", (Dying, type(base)), {})()
    made.__dict__.update(base.__dict__)
    return made


@hookimpl
def ds_ops(facts: Facts) -> list[Kernel]:
    return [Kernel(OPS["linear"], f"{__name__}:Linear", "mortal", 99, formats=frozenset({"dense"}))]
