"""What runs a phase of a step again: a recording, made at the start or once it has come often.

A phase is a function without arguments over tensors that never move. Whoever has one calls it, or
what `record` made of it: nothing else knows of graphs, of the host's replay or of rehearsals.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

from ds_runtime.errors import DsRuntimeError, KernelError, PluginError
from ds_runtime.ops.binding.bound import BoundOps
from ds_runtime.ops.contract import load_attr
from ds_runtime.platform.contract import GraphBackend

log = logging.getLogger(__name__)

Phase = Callable[[], None]
Checking = Callable[[], AbstractContextManager[None]]
"""Within, a kernel that fails is named."""


class Recorder:
    """Records phases on a backend. after: 0, or how often a phase runs op by op before it is
    recorded. One that cannot be recorded then continues op by op, and a warning says why, once for
    every reason. Without a backend nothing is recorded: a rehearsal, in which every phase runs
    once.

    checking: around each phase that is recorded late. Around those of the start, whoever records
    them enters `checked` once.

    A backend that records late runs a phase while it does, and one that it gives up halfway runs
    again as a whole: every phase bears that. Drafts may be others then, and need not be right.
    Where there are several ranks it is an error: others would wait for its collectives.
    """

    def __init__(
        self,
        backend: GraphBackend | None,
        after: int = 0,
        checking: Checking = nullcontext,
        ranks: int = 1,
    ) -> None:
        self._backend, self._checking = backend, checking
        self.after, self._ranks = after, ranks
        self._reasons: set[str] = set()

    def record(
        self, phase: Phase, what: str, remedy: str = "--disable-graph", ready: bool = False
    ) -> Phase:
        """What runs it again. It runs once before, unless it is recorded late or is `ready`: its
        kernels have run. what: the step that this is for.

        Raises PluginError, or KernelError, where it cannot be captured.
        """
        if self._backend is not None and self.after:
            give_up = self._warn if self._ranks == 1 else partial(_refuse, what, remedy)
            return _Late(phase, self.after, self._capture_late, give_up)
        if not ready:
            self.ready(phase, what, remedy)
        with _refusing(what, remedy):
            return phase if self._backend is None else self._backend.capture(phase)

    @property
    def checked(self) -> AbstractContextManager[None]:
        """Around recordings at the start. Entering it takes as long as a piece of one."""
        return nullcontext() if self._backend is None or self.after else self._checking()

    def ready(self, phase: Phase, what: str, remedy: str) -> None:
        """Run it for the first time. Raises PluginError, or KernelError, where it fails."""
        with _refusing(what, remedy):
            phase()

    def _capture_late(self, phase: Phase) -> Phase:
        assert self._backend is not None
        with self._checking():
            return self._backend.capture(phase)

    def _warn(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        if reason not in self._reasons:
            self._reasons.add(reason)
            log.warning("decode steps continue op by op: %s", reason)


def given_up(phase: Phase) -> bool:
    """Whether it was to be recorded late and could not be."""
    return isinstance(phase, _Late) and phase.given_up


class _Late:
    """A phase that is recorded when it has run `after` times."""

    def __init__(
        self,
        phase: Phase,
        after: int,
        capture: Callable[[Phase], Phase],
        give_up: Callable[[Exception], None],
    ) -> None:
        self._phase, self._now, self._capture, self._give_up = phase, phase, capture, give_up
        self._left = after
        self.given_up = False

    def __call__(self) -> None:
        if self._left == 0:
            self._left = -1  # once
            try:
                self._now = self._capture(self._phase)
            except Exception as e:
                self._give_up(e)
                self.given_up = True
            else:
                return  # it has run
        elif self._left > 0:
            self._left -= 1
        self._now()


def _refuse(what: str, remedy: str, error: Exception) -> None:
    with _refusing(what, remedy):
        raise error


@contextmanager
def _refusing(what: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except KernelError as e:
        raise KernelError(f"{what} cannot be captured: {e}; {remedy} runs without") from e
    except DsRuntimeError:
        raise
    except Exception as e:
        raise PluginError(
            f"{what} cannot be captured: {type(e).__name__}: {e}; {remedy} runs without"
        ) from e


@contextmanager
def rehearsing(bound: BoundOps) -> Iterator[bool]:
    """Whether there is anything to rehearse: contexts that bound kernels name, and that work.

    A kernel that compiles when it first runs keeps all others waiting. In a rehearsal launches of
    such kernels return at once, and leaving it waits until all have been compiled; whatever else a
    step does is done, over zeros.
    """
    paths = sorted({k.compiles.rehearsal for k, _ in bound.kernels() if k.compiles.rehearsal})
    with ExitStack() as stack:
        works = [stack.enter_context(load_attr(path)()) for path in paths]
        yield any(works)
