"""What the server writes: one line per event, for people or as JSON, and the access log.

No line holds a prompt, an answer, a key or a query string, at any level. Lines are written by a
thread of their own, so that a reader who stalls (a full pipe, a slow disk) stalls no request. When
too many wait, new ones are dropped, and counted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ds_runtime.server.observe.request_record import Exchange, current_id

if TYPE_CHECKING:
    from ds_runtime.config import ServerConfig
    from ds_runtime.engine.process.rankspec import RankSpec

_WAITING = 10_000  # lines
_CLOSE_SECONDS = 1.0
_LONGEST = 200  # characters of what a client chose: a path, its own id
# Asked for every second.
_OFTEN = frozenset({"/health", "/ping", "/metrics", "/load", "/", "/dashboard/{name}"})
_engine = logging.getLogger("ds_runtime.engine")
_access = logging.getLogger("ds_runtime.access")


def engine_output(spec: RankSpec, text: str) -> None:
    """A line that an engine's process wrote, or its traceback; from any thread."""
    level = logging.INFO
    if text.startswith("Traceback "):
        level = logging.ERROR
    elif text.startswith("warning: "):
        level = logging.WARNING
    facts = {"replica": spec.replica, "rank": spec.rank}
    _engine.log(level, "%s", text, extra={"beside": facts})


def access(exchange: Exchange) -> None:
    """The line of one request; that of a probe only at level debug."""
    level = logging.INFO
    if exchange.route in _OFTEN and exchange.status != 500:
        level = logging.DEBUG
    elif exchange.status >= 500:
        level = logging.WARNING
    if _access.isEnabledFor(level):
        facts = access_facts(exchange)
        _access.log(level, _sentence(facts), extra={"facts": facts})


def access_facts(exchange: Exchange) -> dict[str, Any]:
    """The fields of the access log: docs/operating.md lists them."""
    known = exchange.route != "other"
    facts: dict[str, Any] = {
        "request_id": exchange.request_id,
        "client": exchange.client,
        "method": exchange.method,
        "route": exchange.route if known else exchange.path[:_LONGEST],
        "status": exchange.status,
        "seconds": round(exchange.seconds, 6),
    }
    if exchange.gone:
        facts["client_gone"] = True
    run = exchange.run
    if run is None:
        return facts
    facts["answer_id"] = run.id[:_LONGEST]
    facts["stream"] = exchange.stream
    facts["choices"] = len(run.choices)
    facts["prompt_tokens"] = run.prompt_tokens
    facts["cached_tokens"] = run.cached_tokens
    facts["completion_tokens"] = run.generated_tokens
    facts["finish_reasons"] = sorted({c.finish_reason or "abort" for c in run.choices})
    timer = run.timer
    if timer.first is not None:
        facts["queue_seconds"] = round(timer.queued, 6)
        facts["ttft_seconds"] = round(timer.first - timer.begin, 6)
    return facts


def _sentence(facts: dict[str, Any]) -> str:
    route = facts["route"]
    path = route if route.isprintable() else ascii(route)[1:-1]  # no line breaks of a client's
    said = (
        f"{facts['client']} {facts['method']} {path} {facts['status']} in {facts['seconds']:.3f} s"
    )
    if "answer_id" in facts:
        said += (
            f", {facts['prompt_tokens']} tokens in ({facts['cached_tokens']} cached), "
            f"{facts['completion_tokens']} out, {'/'.join(facts['finish_reasons'])}"
        )
    if "ttft_seconds" in facts:
        said += f", first token after {facts['ttft_seconds']:.3f} s"
    return said + (", client gone" if "client_gone" in facts else "")


class _Text(logging.Formatter):
    """`2026-01-31 12:30:01.123 INFO access [request id] message`, then a traceback, if any."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, or with a traceback more than one."""
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        name = record.name.removeprefix("ds_runtime.")
        request = "" if (found := current_id.get()) is None else f" [{found}]"
        said = record.getMessage()
        if record.exc_info:
            said += "\n" + self.formatException(record.exc_info)
        return f"{now}.{int(record.msecs):03d} {record.levelname} {name}{request} {said}"


class _Json(logging.Formatter):
    """One JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """The object; the access log's fields stand beside the common ones."""
        now = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{now}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if (facts := getattr(record, "facts", None)) is not None:
            return json.dumps(line | facts, ensure_ascii=False)
        line |= getattr(record, "beside", {})
        line["message"] = record.getMessage()
        if (found := current_id.get()) is not None:
            line["request_id"] = found
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _Hand(logging.Handler):
    """Makes the line where the request is known, and leaves the writing to a thread."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._waiting: queue.Queue[tuple[int, str] | None] = queue.Queue(_WAITING)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Warnings and errors to standard error, the rest to standard output. Never waits."""
        stream = 2 if record.levelno >= logging.WARNING else 1
        try:
            self._waiting.put_nowait((stream, self.format(record)))
        except queue.Full:
            self._dropped += 1

    def end(self) -> None:
        """Write what waits, but do not wait long for a reader that stalls."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=_CLOSE_SECONDS)
            self._thread.join(_CLOSE_SECONDS)

    def _write(self) -> None:
        told = 0
        while (item := self._waiting.get()) is not None:
            _put(*item)
            if (dropped := self._dropped) > told:
                said = f"{dropped - told} log lines were dropped: their reader is too slow"
                gap = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
                _put(2, self.format(logging.makeLogRecord(gap | {"msg": said})))
                told = dropped


def _put(stream: int, line: str) -> None:
    """By the descriptor: a write that hangs must hold no lock of Python's when the process ends."""
    data = (line + "\n").encode(errors="backslashreplace")
    with contextlib.suppress(OSError):  # nobody reads any more
        while data:
            data = data[os.write(stream, data) :]


@contextlib.contextmanager
def logging_to(config: ServerConfig) -> Iterator[None]:
    """All logging of this process goes through here until the block ends."""
    level = int(getattr(logging, config.log_level.upper()))
    hand = _Hand(_Json() if config.log_format == "json" else _Text())
    root, ours = logging.getLogger(), logging.getLogger("ds_runtime")
    before = root.level, ours.level, _access.disabled
    root.addHandler(hand)
    # Others' libraries, the web server's among them, tell of their daily work only to debuggers.
    root.setLevel(level if level <= logging.DEBUG else max(level, logging.WARNING))
    ours.setLevel(level)
    _access.disabled = not config.access_log
    try:
        yield
    finally:
        root.removeHandler(hand)
        root.setLevel(before[0])
        ours.setLevel(before[1])
        _access.disabled = before[2]
        hand.end()
