"""Captures at the time that a step is needed: where recording is cheap and a spare row is not."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ds_runtime.platform.contract import GraphBackend

log = logging.getLogger(__name__)


class LateGraphs:
    """GraphBackend over another one: a step runs op by op `after` times before it is captured.

    One that cannot be captured goes on so, and a warning says why, once for every reason. The
    backend runs a step while it captures it; one that it gives up halfway runs again as a whole,
    which decode steps and verifications bear. Drafting writes over the logits that it begins with:
    its drafts may be others then, and need not be right.
    """

    def __init__(self, backend: GraphBackend, after: int) -> None:
        assert after > 0, after
        self._backend, self._after = backend, after
        self._reasons: set[str] = set()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """See GraphBackend; here `run` may not have been called before."""
        return _Late(run, self._backend, self._after, self._warn)

    def _warn(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        if reason not in self._reasons:
            self._reasons.add(reason)
            log.warning("decode steps go on op by op: %s", reason)


class _Late:
    def __init__(
        self,
        run: Callable[[], None],
        backend: GraphBackend,
        after: int,
        warn: Callable[[Exception], None],
    ) -> None:
        self._run, self._now, self._backend, self._warn = run, run, backend, warn
        self._left = after

    def __call__(self) -> None:
        if self._left == 0:
            self._left = -1  # once
            try:
                self._now = self._backend.capture(self._run)
            except Exception as e:
                self._warn(e)
            else:
                return  # it has run
        elif self._left > 0:
            self._left -= 1
        self._now()
