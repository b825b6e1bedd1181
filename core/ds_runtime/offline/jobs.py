"""The offline API's requests under way: one registry, whoever asked and whoever steps.

Several calls may be open at a time (streams are generators). A step serves all of them, so its
messages go to the registry, which brings each to the call that it belongs to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from ds_runtime.engine.engine import Engine
from ds_runtime.engine.messages import Failed, Tokens
from ds_runtime.offline.outputs import PendingChoice


class Registry:
    """Every job in the engine, by request id, with the call that asked for it."""

    def __init__(self) -> None:
        self.calls: dict[str, PendingCall] = {}

    def take(self, engine: Engine, messages: Iterable[Tokens | Failed]) -> None:
        """Hand a step's messages to their calls; jobs that end leave."""
        for message in messages:
            call = self.calls.get(message.rid)
            if call is None:  # its text was whole before the step that failed
                continue
            if isinstance(message, Failed):
                call.failed = message
                continue
            job = call.running[message.rid]
            ended = job.take(message)
            call.news.append(job)
            if ended or message.finish is not None:
                del self.calls[message.rid], call.running[message.rid]
            if ended:
                engine.abort([message.rid])


class PendingCall:
    """The jobs of one call. `news`: those that got tokens and were not yet given to the caller.
    `failed`: the first that the engine gave up; `check` raises it.
    """

    def __init__(self, registry: Registry, jobs: Sequence[PendingChoice]) -> None:
        self._registry = registry
        self._pending = deque(jobs)
        self.running: dict[str, PendingChoice] = {}
        self.news: deque[PendingChoice] = deque()
        self.failed: Failed | None = None

    @property
    def is_done(self) -> bool:
        """Whether every job has ended; `news` may still hold some."""
        return not self._pending and not self.running

    def submit(self, engine: Engine) -> None:
        """Queue what the engine's queue allows. RequestError for a job that cannot be served."""
        window = engine.assembly.config.max_queued_requests
        while self._pending and len(self._registry.calls) < window:
            job = self._pending.popleft()
            failed = engine.submit(job.submit)
            if failed is not None:
                raise failed.error
            self._registry.calls[job.submit.rid] = self
            self.running[job.submit.rid] = job

    def check(self) -> None:
        """RequestError or LogitsError for a job that the engine could not continue with."""
        if self.failed is not None:
            raise self.failed.error

    def drop(self, engine: Engine) -> None:
        """Abort what still runs."""
        self._pending.clear()
        engine.abort(self.running)
        for rid in self.running:
            del self._registry.calls[rid]
        self.running.clear()
