"""Plugins that watch an engine."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from ds_runtime.assembly.result import Assembly
from ds_runtime.engine.messages import Failed, Stats, Tokens
from ds_runtime.errors import named
from ds_runtime.plugins.asking import SLOW


class Observers:
    """Plugins that watch. One that raises is dropped with a line on standard error."""

    def __init__(self, assembly: Assembly) -> None:
        asked = assembly.plugins.implementing("ds_observer")
        found = assembly.plugins.call("ds_observer", config=assembly.config)
        self.seen = [(name, observer) for name, observer in found if observer is not None]
        self._slow = set[tuple[str, str]]()  # told of
        for name in asked:
            if (refusal := assembly.plugins.reports[name].refusal) is not None:
                _drop(name, f"{refusal.reason}; ds-runtime plugins {name} --verbose tells of it")

    def tell(self, stats: Callable[[], Stats], messages: list[Tokens | Failed]) -> None:
        """`on_step(stats)` once, then `on_finish(tokens)` for every request that ended."""
        now = stats()
        finished = [m for m in messages if isinstance(m, Tokens) and m.finish is not None]
        for name, observer in list(self.seen):
            try:
                self._call(name, observer, "on_step", now)
                for message in finished:
                    self._call(name, observer, "on_finish", message)
            except KeyboardInterrupt as e:
                e.add_note(f"in an observer of plugin {name}")
                raise
            except BaseException as e:  # one that leaves must not take the engine along
                self.seen.remove((name, observer))
                _drop(name, named(e))

    def _call(self, name: str, observer: Any, method: str, argument: Any) -> None:
        if (function := getattr(observer, method, None)) is None:
            return
        begin = time.perf_counter()
        function(argument)
        if (took := time.perf_counter() - begin) > SLOW and (name, method) not in self._slow:
            self._slow.add((name, method))
            said = f"its observer's {method} took {took:.1f} s, and steps wait for it"
            print(f"plugin {name}: {said}", file=sys.stderr, flush=True)


def _drop(plugin: str, why: str) -> None:
    print(f"plugin {plugin}: observer dropped: {why}", file=sys.stderr, flush=True)
