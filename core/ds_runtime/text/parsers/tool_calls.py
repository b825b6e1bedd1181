"""Tool calls in generated text: what all formats share, and the format of V3 and V3.1.

State machines over the text as it comes: each character is looked at once or twice, whatever the
length. Output that breaks the format never raises; its markers vanish, its text stays. Other
spellings of the markers count from a canonical marker that begins calls on, until text follows
that belongs to none.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from ds_runtime.text.parsers.events import CallArguments, CallBegin, CallEnd, Content, Event
from ds_runtime.text.parsers.json_stream import JsonStream
from ds_runtime.text.parsers.markers import Found, Markers
from ds_runtime.text.parsers.reasoning import CLOSE


@cache
def _with_close(markers: Markers) -> Markers:
    return Markers((*markers.names, CLOSE))


MAX_NAME = 512  # characters; what is longer is no name
_SLICE = 1 << 14  # characters of JSON at a time
_MAX_AGAIN = 1 << 18  # characters that may be read again because a string was none

# The parameters' types by function, where the client's schemas tell.
Schemas = Mapping[str, Mapping[str, Any]]


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The parameter schema of every function in an OpenAI `tools` list."""
    out: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
            parameters = function.get("parameters")
            out[name] = parameters if isinstance(parameters, Mapping) else {}
    return out


class ToolCallParser:
    """Feed it the answer (no reasoning); it gives content and calls.

    `functions`: those that the client offered. Calls of others are passed on (the client answers
    that there is no such function) unless `drop_unknown`. `parallel` false: one call at most.
    `forbidden`: none at all, and no marker is text.
    """

    MARKERS: ClassVar[Markers]  # that count outside calls
    TAGS: ClassVar[Markers]  # all of them
    OPENERS: ClassVar[tuple[str, ...]]  # those of them that begin calls

    def __init__(
        self,
        functions: Schemas,
        *,
        drop_unknown: bool = False,
        parallel: bool = True,
        forbidden: bool = False,
    ) -> None:
        self.functions = functions
        self.num_calls = 0  # complete ones
        self._drop_unknown, self._parallel = drop_unknown, parallel
        self._forbidden = forbidden
        self._index = -1
        self._open = False  # a call has begun and not ended
        self._silent = False  # the open call is not passed on
        self._text = ""
        self._pos = 0
        self._out: list[Event] = []
        self._step: Callable[[], bool] = self._content
        self._watched = self.TAGS if forbidden else self.MARKERS
        self._markers = self._watched
        self._loose = False  # lenient spellings count
        self._again = _MAX_AGAIN
        self._json = JsonStream()
        self._raw: list[str] = []  # of a value that is passed on as a whole

    def drop_close(self) -> None:
        """A `</think>` that comes yet is no content: a call has ended the reasoning before it."""
        self._markers = _with_close(self._watched)

    def feed(self, text: str) -> list[Event]:
        """What became certain with `text`."""
        self._text = self._text[self._pos :] + text if self._text else text
        self._pos = 0
        while self._pos < len(self._text) and self._step():
            pass
        if self._pos == len(self._text):
            self._text, self._pos = "", 0
        return self._take()

    def finish(self, natural: bool) -> list[Event]:
        """What was held back. `natural`: the model ended the text, it was not cut."""
        out = self._take()
        while natural and (unread := self._settle()):
            out += self.feed(unread)
        rest, self._text, self._pos = self._text[self._pos :], "", 0
        self._finish(rest, natural)
        if self._open:
            self._end(complete=False)
        return out + self._take()

    # ---- for the formats ----

    def _content(self) -> bool:
        """One step outside calls; False when more text is needed."""
        raise NotImplementedError

    def _finish(self, rest: str, natural: bool) -> None:
        """The text ends with `rest` not consumed."""
        raise NotImplementedError

    def _settle(self) -> str:
        """Decide at the text's end what was uncertain: text to read on from, if any."""
        raise NotImplementedError

    def _seek(self, markers: Markers) -> tuple[Found | None, int]:
        """The next marker that counts, and where what comes before it, or may be one, ends."""
        found = markers.find(self._text, self._pos, self._loose)
        if found is not None:
            return found, found.start
        return None, markers.held(self._text, self._pos, self._loose)

    def _outside(self) -> None:
        """Between calls: text that is no marker ends what a canonical marker has begun."""
        if self._loose and not self._open:
            text, pos, markers = self._text, self._pos, self._markers
            self._loose = bool(markers.at(text, pos, True) or markers.unfinished(text, pos, True))

    def _say(self, text: str) -> None:
        if text:
            self._loose = self._loose and self._open
            self._out.append(Content(text))

    def _begin(self, name: str) -> None:
        if self._open:
            self._end(complete=True)
        unknown = self._drop_unknown and name not in self.functions
        second = not self._parallel and self._index >= 0
        self._silent = self._forbidden or unknown or second
        self._open = True
        if not self._silent:
            self._index += 1
            self._out.append(CallBegin(self._index, "call_" + secrets.token_hex(12), name))

    def _argue(self, text: str) -> None:
        if text and not self._silent:
            self._out.append(CallArguments(self._index, text))

    def _end(self, complete: bool) -> None:
        self._open = False
        if not self._silent:
            self.num_calls += complete
            self._out.append(CallEnd(self._index, complete))

    def _new_json(self, ends: Markers, bare: bool = False) -> JsonStream:
        return JsonStream(ends, doubts=self._again > 0, bare=bare)

    def _feed_json(self) -> tuple[str, str, int]:
        """Feed the JSON some text: the JSON that is certain, what was fed, and how much is left
        of it and what came before, once the JSON has ended.
        """
        stop = min(len(self._text), self._pos + _SLICE)
        piece = self._text[self._pos : stop]
        certain, rest = self._json.feed(piece)
        if len(rest) > len(piece):  # back to a marker that came before
            self._again -= len(rest)
            self._text, self._pos = rest + self._text[stop:], 0
        else:
            self._pos = stop - len(rest)
        return certain, piece, len(rest)

    def _feed_raw(self) -> bool:
        """Gather a value that is passed on as a whole; whether a marker has ended it."""
        _, piece, left = self._feed_json()
        self._raw.append(piece)
        if self._json.stopped:
            self._cut_raw(left)
        return self._json.stopped

    def _cut_raw(self, left: int) -> None:
        raw = "".join(self._raw)
        self._raw = [raw[: len(raw) - left]]

    def _take(self) -> list[Event]:
        out, self._out = self._out, []
        return out


CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEP = "<｜tool▁sep｜>"
_OUTPUTS = tuple(f"<｜tool▁output{s}▁{e}｜>" for s in ("", "s") for e in ("begin", "end"))
_BOUNDS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END)
_ENDS = Markers(_BOUNDS)
_SPACE = re.compile(r"\s+")
_AFTER_JSON = re.compile(r"[\s`}\]]+")
_NAME_END = re.compile(r"[\n`{]")
_FENCE = re.compile(r"\s*(?:```(?:json)?\s*)?")
_HALF_FENCE = re.compile(r"\s*(?:`{1,2}|```(?:j|js|jso))")


class TokenToolParser(ToolCallParser):
    """V3 (`function`, separator, name, fenced JSON) and V3.1 (name, separator, JSON).

    Which of the two is seen call by call, because checkpoints do not always write what their
    version number says.
    """

    MARKERS = TAGS = Markers((*_BOUNDS, SEP, *_OUTPUTS))
    OPENERS = (CALLS_BEGIN, CALL_BEGIN)

    _skips: re.Pattern[str] | None = None  # what is dropped before content
    _head = ""

    def _content(self) -> bool:
        text = self._text
        if self._skips is not None:
            if skipped := self._skips.match(text, self._pos):
                self._pos = skipped.end()
            if self._pos == len(text):
                return False
        self._outside()
        found, end = self._seek(self._markers)
        if end > self._pos:
            self._skips = None
            self._say(text[self._pos : end])
        self._pos = end
        if found is None:
            return False
        self._marker(found)
        return True

    def _marker(self, found: Found) -> None:
        """Go on after a marker."""
        self._pos = found.end
        if found.name in self.OPENERS:
            self._loose = True
        elif found.name == CALLS_END:
            self._loose = False
        if found.name == CALL_BEGIN:
            self._head, self._raw, self._step = "", [], self._before_separator
        elif found.name == CLOSE:
            self._markers = self._watched
        else:
            self._step = self._content
            self._skips = _SPACE if found.name in _BOUNDS else self._skips

    def _before_separator(self) -> bool:
        """The type (V3) or the name (V3.1)."""
        found, end = self._seek(self._markers)
        if found is not None and found.name == SEP and end - self._pos <= MAX_NAME:
            self._head = self._text[self._pos : end].strip()
            self._pos, self._step = found.end, self._after_separator
            return True
        if found is None and end - self._pos <= MAX_NAME:
            return False
        self._step, self._skips = self._content, None  # not a call: content up to the marker
        return True

    def _after_separator(self) -> bool:
        """JSON, a fence (both V3.1), or the name in V3."""
        if skipped := _SPACE.match(self._text, self._pos):
            self._pos = skipped.end()
        if self._pos == len(self._text):
            return False
        char = self._text[self._pos]
        if char in "{`" or self._head not in ("function", ""):
            self._begin(self._head)
            self._step = self._before_arguments
            return True
        return self._name()

    def _name(self) -> bool:
        text, self._step = self._text, self._name
        match = _NAME_END.search(text, self._pos)
        found, _ = self._seek(_ENDS)
        ends = [m.start() for m in (match,) if m] + [f.start for f in (found,) if f]
        if not ends and len(text) - self._pos <= MAX_NAME:
            return False
        end = min([*ends, self._pos + MAX_NAME])
        self._begin(text[self._pos : end].strip() or self._head)
        self._pos, self._step = end, self._before_arguments
        return True

    def _before_arguments(self) -> bool:
        fence = _FENCE.match(self._text, self._pos)
        assert fence is not None
        rest = self._text[fence.end() : fence.end() + 1]
        if not rest or _HALF_FENCE.fullmatch(self._text, fence.start()):
            return False
        self._pos = fence.end()
        if rest[0] == "{":
            self._json, self._step = self._new_json(_ENDS), self._object
        else:
            self._json, self._step = self._new_json(_ENDS, bare=True), self._no_object
        return True

    def _object(self) -> bool:
        """Arguments, passed on as they come."""
        self._argue(self._feed_json()[0])
        if self._json.done:
            self._end(complete=True)
            self._step, self._skips = self._content, _AFTER_JSON
        elif self._json.stopped:
            self._end_object()
        return True

    def _end_object(self) -> None:
        self._argue(self._json.close())
        self._end(complete=True)
        self._step, self._skips = self._content, None

    def _no_object(self) -> bool:
        """Arguments that are no object: whole or not at all."""
        if self._feed_raw():
            self._end_raw()
        return True

    def _end_raw(self) -> None:
        self._argue(_as_json("".join(self._raw)))
        self._end(complete=True)
        self._step, self._skips = self._content, None

    def _settle(self) -> str:
        unread = self._json.settle() if self._open else ""
        if unread and self._step == self._object:
            self._end_object()
        elif unread:
            self._cut_raw(len(unread))
            self._end_raw()
        self._again -= len(unread)
        return unread

    def _finish(self, rest: str, natural: bool) -> None:
        rest = self._markers.release(rest, self._loose)
        if self._step == self._content:
            self._say(rest)
        elif not self._open:
            if natural:  # never a call, so it was an answer
                self._say(self._head + rest)
        elif self._step == self._object:
            self._argue(self._json.close() if natural else self._json.cut())
        else:
            raw = "".join(self._raw) + rest
            self._argue(_as_json(_ENDS.release(raw, loose=True)) if natural else raw)
        if self._open and natural:  # the model forgot to close it
            self._end(complete=True)


def _as_json(raw: str) -> str:
    """Arguments as JSON: nothing is `{}`, JSON in a JSON string is taken out, text is quoted."""
    text = raw.strip().removesuffix("```").rstrip()
    if not text:
        return "{}"
    value = strict_json(text)
    if value is NO_JSON:
        return json.dumps(text, ensure_ascii=False)
    if isinstance(value, str) and isinstance(strict_json(value), dict):
        return value
    return text


NO_JSON = object()


def strict_json(text: str) -> Any:
    """The value of `text`, or NO_JSON. NaN and the infinities are no JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return NO_JSON


def _refuse(name: str) -> None:
    raise ValueError(name)
