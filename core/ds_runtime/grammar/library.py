"""Compiled rules by their text, and the thread that compiles: nobody's step waits for it."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from ds_runtime.errors import RequestError
from ds_runtime.grammar.check import Checker, start_deep
from ds_runtime.grammar.compile import Compiler, why_not
from ds_runtime.grammar.guide import Guide
from ds_runtime.output_rules import OutputRules

if TYPE_CHECKING:
    from llguidance import LLMatcher

CACHED = 64  # grammars


class Grammars:
    """The grammars of one engine. `eos` are the ids that end a text.

    What the vocabulary costs (a second for 129,000 tokens, holding the interpreter) is paid here,
    at start, so that no running request waits for it.
    """

    def __init__(self, folder: Path, vocab_size: int, eos: Sequence[int]) -> None:
        self._why_not = why_not(folder)
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._asked: SimpleQueue[tuple[OutputRules, Future[LLMatcher]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if self._why_not is None:
            self._compiler = Compiler(folder, vocab_size, eos)
            self._checker = Checker(folder, vocab_size, eos)
            weakref.finalize(self, self._checker.close)
            self._not_eos = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
            for token in eos:
                self._not_eos[token // 32] &= ~np.uint32(1 << token % 32)

    def ask(self, rules: OutputRules) -> Future[LLMatcher]:
        """The matcher of `rules`, now or later; RequestError comes in the future as well."""
        if self._why_not is not None:
            failed: Future[LLMatcher] = Future()
            failed.set_exception(RequestError(f"{rules.param}: {self._why_not}", rules.param))
            return failed
        known = self._compiled.get(rules.key)
        if known is not None and not (known.done() and known.exception()):
            self._compiled.move_to_end(rules.key)
            return known
        future = self._compiled[rules.key] = Future()
        while len(self._compiled) > CACHED:
            self._compiled.popitem(last=False)
        if self._thread is None:
            worker = _Worker(self._asked, self._checker, self._compiler)
            self._thread = threading.Thread(target=worker.run, name="grammars", daemon=True)
            start_deep(self._thread)
            weakref.finalize(self, self._asked.put, None)
        self._asked.put((rules, future))
        return future

    def close(self) -> None:
        """End the thread and the child. May be called twice."""
        self._asked.put(None)
        if self._why_not is None:
            self._checker.close()

    def guide(self, rules: OutputRules, matcher: LLMatcher) -> Guide:
        """The state of one choice."""
        return Guide(matcher.deep_copy(), self._not_eos, rules.param)


class _Worker:
    """The compiling thread. It knows no Grammars: those may be forgotten while it waits."""

    def __init__(
        self,
        asked: SimpleQueue[tuple[OutputRules, Future[LLMatcher]] | None],
        checker: Checker,
        compiler: Compiler,
    ) -> None:
        self._asked, self._checker, self._compiler = asked, checker, compiler

    def run(self) -> None:
        while (item := self._asked.get()) is not None:
            rules, future = item
            try:
                self._checker.check(rules)
                future.set_result(self._compiler.compile(rules))
            except Exception as e:
                future.set_exception(e)
