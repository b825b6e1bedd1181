"""Tool calls whose arguments stand in tags, one each: what DSML and GLM's format share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar

from ds_runtime.text.parsers.json_stream import quoted
from ds_runtime.text.parsers.markers import Found, Markers
from ds_runtime.text.parsers.tool_calls import NO_JSON, ToolCallParser, strict_json

_SPACE = re.compile(r"\s+")


class ValueKind(Enum):
    """What a value is, as far as is known before it."""

    TEXT = 0
    JSON = 1
    EITHER = 2  # JSON if it is some, else text


class TagToolParser(ToolCallParser):
    """Arguments come out as one JSON object: text values while they come, others whole.

    A text value is raw and continues to the tag that ends values: other closing tags, and those of
    lenient spelling, end it only where the output ends without one.
    """

    VALUE_ENDS: ClassVar[Markers]  # the tag
    CLOSERS: ClassVar[Markers]  # VALUE_ENDS, and the ends of what is around a value

    _skips = False  # white space between tags, or behind a call, is no content
    _called = ""
    _num_params = 0
    _kind = ValueKind.TEXT
    _spelled_loosely = False  # the value's opening tag
    _gives_up = False  # any tag ends a value: the format's own is missing
    _kept: list[str] | None = None  # from a tag on that may have ended the value
    _head = ""  # what comes before a value that may be all arguments

    def _after_value(self) -> None:
        """Go on behind a value, at the tag that ends it."""
        raise NotImplementedError

    def _skipped(self) -> bool:
        """Leave out white space where it is no content; whether nothing is left to read."""
        if self._skips and (space := _SPACE.match(self._text, self._pos)):
            self._pos = space.end()
        return self._skips and self._pos == len(self._text)

    def _begin_call(self, name: str) -> None:
        self._called, self._num_params = name, 0
        self._begin(name)

    def _end_call(self) -> None:
        if self._open:
            self._argue("}" if self._num_params else "{}")
            self._end(complete=True)

    def _schema(self, key: str) -> Mapping[str, Any]:
        """The client's schema of an argument."""
        properties = self.functions.get(self._called, {}).get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return schema if isinstance(schema, Mapping) else {}

    def _lacks(self, key: str) -> bool:
        """Whether the client's function has arguments, and none of this name."""
        properties = self.functions.get(self._called, {}).get("properties")
        return isinstance(properties, Mapping) and bool(properties) and key not in properties

    def _begin_value(
        self, key: str, kind: ValueKind, loosely: bool = False, wraps: bool = False
    ) -> None:
        """Begin a value. wraps: an object in it is all arguments."""
        before = ", " if self._num_params else "{"
        is_text = kind is ValueKind.TEXT and not wraps
        head = f'{before}"{quoted(key)}": ' + ('"' if is_text else "")
        self._head = head if wraps else ""
        self._argue("" if wraps else head)
        self._num_params += 1
        self._kind, self._spelled_loosely, self._kept = kind, loosely, None
        self._raw, self._step = [], self._text_value if is_text else self._other_value
        bounded = kind is ValueKind.EITHER or (wraps and kind is ValueKind.TEXT)
        ends = self.VALUE_ENDS if bounded and not self._gives_up else self.TAGS
        self._json = self._new_json(ends, bare=True)

    def _text_value(self) -> bool:
        """One step inside a value that is text; False when more is needed."""
        markers = self.TAGS if self._gives_up else self.CLOSERS
        found, end = self._seek(markers)
        if found is not None and self._ends_text(found):
            self._pass_on("".join(self._kept or ()) + self._text[self._pos : end])
            self._kept, self._pos = None, end
            self._end_value()
            return True
        if found is not None:  # perhaps it ends the value, perhaps it is text
            if self._kept is None:
                self._pass_on(self._text[self._pos : end])
                self._kept, self._pos = [], end
            end = found.end
        if self._kept is None:
            self._pass_on(self._text[self._pos : end])
        else:
            self._kept.append(self._text[self._pos : end])
        self._pos = end
        return found is not None

    def _ends_text(self, found: Found) -> bool:
        if self._gives_up:
            return True
        return found.name in self.VALUE_ENDS.names and (found.exact or self._spelled_loosely)

    def _pass_on(self, text: str) -> None:
        self._argue(quoted(text))

    def _other_value(self) -> bool:
        """One step inside a value that may be JSON."""
        if self._feed_raw():
            self._end_value()
        return True

    def _end_value(self) -> None:
        if self._kind is ValueKind.TEXT and not self._head:
            self._argue('"')
        else:
            raw = "".join(self._raw)
            value = strict_json(raw.strip())
            if self._head and isinstance(value, dict):
                self._num_params = len(value)
                self._argue(raw.strip().removesuffix("}") if value else "")
            else:
                is_json = value is not NO_JSON and self._kind is not ValueKind.TEXT
                self._argue(self._head + (raw.strip() if is_json else f'"{quoted(raw)}"'))
        self._head = ""
        self._after_value()

    @property
    def _in_value(self) -> bool:
        return self._step in (self._text_value, self._other_value)

    def _settle(self) -> str:
        unread = ""
        if self._step == self._text_value:
            unread, self._kept = "".join(self._kept or ()), None
        elif self._open:
            unread = self._json.settle()
            if self._step == self._other_value:
                unread = unread or self._other_end()
                self._cut_raw(len(unread))
        if not unread:
            return ""
        self._gives_up, self._again = True, self._again - len(unread)
        if self._in_value:
            self._end_value()
        else:
            self._argue(self._json.close())
            self._end(complete=True)
            self._after_value()
        return unread

    def _other_end(self) -> str:
        """What stands from a tag on that could have ended a value, where its own is missing."""
        raw = "".join(self._raw)
        found = None if self._gives_up else self.CLOSERS.find(raw, loose=self._loose)
        return "" if found is None or strict_json(raw) is not NO_JSON else raw[found.start :]

    def _finish_value(self, rest: str, natural: bool) -> None:
        """The text ends inside a value."""
        if self._kind is ValueKind.TEXT and not self._head:
            self._pass_on("".join(self._kept or ()) + rest)
            if natural:
                self._end_value()
            return
        raw = "".join(self._raw)
        self._raw = [self.TAGS.release(raw, self._loose)]
        if natural:
            self._end_value()
        else:
            self._argue(self._head + "".join(self._raw))
