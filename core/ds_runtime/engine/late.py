"""Captures at the time that a step is needed: where recording is cheap and a spare row is not."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ds_runtime.platform.spec import GraphBackend

log = logging.getLogger(__name__)


class LateGraphs:
    """GraphBackend over another one: a step runs op by op `after` times before it is captured.

    One that cannot be captured goes on so, and a warning says why. The backend runs a step while it
    captures it; one that it gives up halfway runs again as a whole, which plain decode steps bear.
    """

    def __init__(self, backend: GraphBackend, after: int) -> None:
        assert after > 0, after
        self._backend, self._after = backend, after

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """See GraphBackend; here `run` may not have been called before."""
        return _Late(run, self._backend, self._after)


class _Late:
    def __init__(self, run: Callable[[], None], backend: GraphBackend, after: int) -> None:
        self._run, self._now, self._backend = run, run, backend
        self._left = after

    def __call__(self) -> None:
        if self._left == 0:
            self._left = -1  # once
            try:
                self._now = self._backend.capture(self._run)
            except Exception as e:
                log.warning("a decode step goes on op by op: %s: %s", type(e).__name__, e)
            else:
                return  # it has run
        elif self._left > 0:
            self._left -= 1
        self._now()
