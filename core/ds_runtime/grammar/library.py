"""Compiled rules by their text, and the thread that compiles: nobody's step waits for it."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from ds_runtime.errors import QueueFullError, RequestError
from ds_runtime.grammar.check import Checker, start_deep
from ds_runtime.grammar.compile import Compiler, why_not
from ds_runtime.grammar.guide import Guide, Start
from ds_runtime.output_rules import OutputRules
from ds_runtime.platform.cores import work_behind

CACHED = 64  # grammars
WAITING = 64  # rules that may wait to be compiled, shared by the clients that wait for some


class Grammars:
    """The grammars of one engine. `eos` are the ids that end a text.

    What the vocabulary costs (a second for 129,000 tokens, holding the interpreter) is paid here,
    at start, so that no running request waits for it.
    """

    def __init__(self, folder: Path, vocab_size: int, eos: Sequence[int]) -> None:
        self._why_not = why_not(folder)
        self._compiled: OrderedDict[str, PendingGrammar] = OrderedDict()
        self._queue = _Queue()
        self._thread: threading.Thread | None = None
        if self._why_not is None:
            try:
                self._compiler = Compiler(folder, vocab_size, eos)
            except ValueError as e:  # a pattern that only the tokenizer's own library takes
                self._why_not = f"the tokenizer cannot be followed by rules: {str(e)[:300]}"
        if self._why_not is None:
            self._checker = Checker(folder, vocab_size, eos)
            weakref.finalize(self, self._checker.close)
            self._not_eos = self._compiler.allowed.copy()
            for token in eos:
                self._not_eos[token // 32] &= ~np.uint32(1 << token % 32)

    def ask(self, rules: OutputRules, client: str = "", salt: str = "") -> PendingGrammar:
        """`rules` compiled, now or later; RequestError comes in the future as well. Whoever does
        not wait any longer says so (`leave`). Only those of the same salt share what is compiled:
        the time that it takes would tell others who asked for the same.

        Clients take turns; "" is this process itself. QueueFullError, if another waits for its
        share of WAITING rules already.
        """
        if self._why_not is not None:
            failed = PendingGrammar(rules)
            failed.set_exception(RequestError.of(rules.param, f": {self._why_not}"))
            return failed
        key = f"{salt}\0{rules.key}"
        asked = self._compiled.get(key)
        if asked is None or asked.cancelled() or (asked.done() and asked.exception()):
            asked = PendingGrammar(rules)
        if not asked.done():
            self._queue.put(asked, client)
        asked.waiting += 1
        self._compiled[key] = asked
        self._compiled.move_to_end(key)
        while len(self._compiled) > CACHED:
            self._compiled.popitem(last=False)
        if self._thread is None:
            worker = _Worker(self._queue, self._checker, self._compiler)
            self._thread = threading.Thread(target=worker.run, name="grammars", daemon=True)
            start_deep(self._thread)
            weakref.finalize(self, self._queue.close)
        return asked

    def leave(self, asked: PendingGrammar) -> None:
        """One who asked waits no longer; what nobody waits for is not compiled."""
        asked.waiting -= 1
        if not asked.waiting and asked.cancel():
            self._queue.forget(asked)

    @property
    def waiting(self) -> int:
        """Rules that wait to be compiled."""
        return self._queue.size

    def close(self) -> None:
        """End the thread and the child. May be called twice."""
        self._queue.close()
        if self._why_not is None:
            self._checker.close()

    def guide(self, rules: OutputRules, start: Start) -> Guide:
        """The state of one choice."""
        return Guide(start, self._compiler.allowed, self._not_eos, rules.param)


class PendingGrammar(Future[Start]):
    """A rule that `waiting` requests wait for."""

    def __init__(self, rules: OutputRules) -> None:
        super().__init__()
        self.rules = rules
        self.waiting = 0


class _Queue:
    """Rules that wait, by client. The clients take turns."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turns: OrderedDict[str, deque[PendingGrammar]] = OrderedDict()
        self._closed = False

    @property
    def size(self) -> int:
        """How many rules wait; one that several clients wait for counts for each."""
        with self._changed:
            return sum(map(len, self._turns.values()))

    def put(self, asked: PendingGrammar, client: str) -> None:
        """Add a rule once. QueueFullError beyond the client's share."""
        with self._changed:
            own = self._turns.get(client, ())
            if asked in own or asked.running():
                return
            share = -(-WAITING // len(self._turns.keys() | {client}))
            if client and len(own) >= share:
                raise QueueFullError(
                    f"{len(own)} rules for the output wait to be compiled, your share of the queue "
                    f"is {share}: try again later"
                )
            self._turns.setdefault(client, deque()).append(asked)
            self._changed.notify()

    def forget(self, asked: PendingGrammar) -> None:
        """Take a rule out again."""
        with self._changed:
            for client, own in list(self._turns.items()):
                if asked in own:
                    own.remove(asked)
                if not own:
                    del self._turns[client]

    def take(self) -> PendingGrammar | None:
        """The next rule, once there is one; None at the end."""
        with self._changed:
            while True:
                while not self._turns and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return None
                client, own = self._turns.popitem(last=False)
                asked = own.popleft()
                if own:
                    self._turns[client] = own  # behind the others
                pending = not (asked.done() or asked.running())  # else another's turn had it
                if pending and asked.set_running_or_notify_cancel():
                    return asked

    def close(self) -> None:
        """Let whoever takes leave."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class _Worker:
    """The compiling thread. It knows no Grammars: those may be forgotten while it waits."""

    def __init__(self, queue: _Queue, checker: Checker, compiler: Compiler) -> None:
        self._queue, self._checker, self._compiler = queue, checker, compiler

    def run(self) -> None:
        work_behind()
        while (asked := self._queue.take()) is not None:
            try:
                self._checker.check(asked.rules)
                asked.set_result(self._compiler.compile(asked.rules))
            except Exception as e:
                asked.set_exception(e)
