"""Scheduler and runner together: requests in, messages out, one step at a time.

Used in process by the offline API and, behind sockets, by `engine/loop.py`.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ds_runtime.assemble import Assembly
from ds_runtime.engine.messages import Failed, Stats, Submit, Tokens
from ds_runtime.engine.pages import PagePool
from ds_runtime.engine.prefix import PrefixCache
from ds_runtime.engine.ranks import Leader
from ds_runtime.engine.runner import Runner
from ds_runtime.engine.scheduler import Scheduler, SchedulerLimits
from ds_runtime.eos import eos_ids
from ds_runtime.errors import QueueFullError, RequestError
from ds_runtime.model.config import ModelConfig


class Engine:
    """Rank 0's engine. `leader` reaches the other ranks, if there are any."""

    def __init__(self, assembly: Assembly, runner: Runner, leader: Leader | None = None) -> None:
        config = assembly.config
        self.assembly = assembly
        self.runner = runner
        self.leader = leader
        limits = SchedulerLimits(
            context_length=runner.context_length,
            vocab_size=assembly.model.vocab_size,
            page_size=config.page_size,
            max_running=config.max_running,
            max_step_tokens=config.max_step_tokens,
            prefill_chunk=config.prefill_chunk,
            queue_limit=config.queue_limit,
            policy=config.policy,
            eos=eos_tokens(assembly.folder, assembly.model),
        )
        prefix = PrefixCache(config.page_size) if config.prefix_cache else None
        self.scheduler = Scheduler(limits, PagePool(runner.num_pages), prefix)
        self._observers = _Observers(assembly)
        self._step_seconds = 0.0

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self.scheduler.has_work

    def submit(self, message: Submit) -> Failed | None:
        """Queue one choice, or say why not."""
        try:
            self.scheduler.submit(message)
        except QueueFullError as e:
            return Failed(message.rid, "queue_full", str(e))
        except RequestError as e:
            return Failed(message.rid, "invalid", str(e), e.param)
        return None

    def abort(self, rids: Iterable[str]) -> None:
        """Forget requests at once; unknown ids are ignored."""
        self.scheduler.abort(rids)

    def flush(self) -> int:
        """Empty the prefix cache; pages freed."""
        return self.scheduler.flush()

    def step(self) -> list[Tokens]:
        """Schedule, launch, collect; new tokens of every request that got some."""
        start = time.perf_counter()
        plan = self.scheduler.schedule()
        if plan is None:
            return []
        if self.leader is not None:
            self.leader.send(plan)
        result = self.runner.collect(self.runner.launch(plan))
        messages = self.scheduler.update(plan, result)
        self._step_seconds += time.perf_counter() - start
        self._observers.tell(self, messages)
        return messages

    def stats(self) -> Stats:
        """Counters since start and gauges now."""
        stats = self.scheduler.stats()
        stats.step_seconds = self._step_seconds
        return stats

    def close(self) -> None:
        """Let the other ranks go and leave the group."""
        if self.leader is not None:
            self.leader.close()
            with contextlib.suppress(RuntimeError):  # they may be gone already
                self.runner.comm.close()


class _Observers:
    """Plugins that watch. One that raises is dropped with a line on standard error."""

    def __init__(self, assembly: Assembly) -> None:
        found = assembly.plugins.call("ds_observer", config=assembly.config)
        self._seen = [(name, observer) for name, observer in found if observer is not None]

    def tell(self, engine: Engine, messages: list[Tokens]) -> None:
        """`on_step(stats)` once, then `on_finish(tokens)` for every request that ended."""
        if not self._seen:
            return
        stats = engine.stats()
        finished = [m for m in messages if m.finish is not None]
        for name, observer in list(self._seen):
            try:
                _call(observer, "on_step", stats)
                for message in finished:
                    _call(observer, "on_finish", message)
            except Exception as e:
                self._seen.remove((name, observer))
                said = f"plugin {name}: observer dropped: {type(e).__name__}: {e}"
                print(said, file=sys.stderr, flush=True)


def _call(observer: Any, method: str, argument: Any) -> None:
    function = getattr(observer, method, None)
    if function is not None:
        function(argument)


def eos_tokens(folder: Path, model: ModelConfig) -> tuple[int, ...]:
    """The ids that end a text: generation_config.json's and config.json's together."""
    ids = dict.fromkeys([*eos_ids(folder / "generation_config.json"), *model.eos_tokens])
    return tuple(i for i in ids if 0 <= i < model.vocab_size)
