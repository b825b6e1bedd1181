"""Tool calls as GLM-4.5 to 5 write them: a function's name and pairs of keys and values in tags."""

from __future__ import annotations

import re
from typing import Any

from ds_runtime.text.parsers.markers import Markers
from ds_runtime.text.parsers.reasoning import CLOSE
from ds_runtime.text.parsers.tag_calls import TagToolParser, ValueKind
from ds_runtime.text.parsers.tool_calls import MAX_NAME

CALL, CALL_END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
_BOUNDS = Markers((KEY, CALL_END))
_KEY_ENDS = Markers((KEY_END, KEY, VALUE, VALUE_END, CALL_END))
_NAME = re.compile(r"""\s*[^\s<>{}()"'`]+\s*""")
_HALF_NAME = re.compile(r"""\s*[^\s<>{}()"'`]*\s*""")


class GlmToolParser(TagToolParser):
    """`<tool_call>`, the name, `<arg_key>` and `<arg_value>` for each argument, `</tool_call>`.

    GLM-4.5 and 4.6 put line breaks between, later ones do not. Values are text where the client's
    schema asks for it, JSON where they are some. Tags are tags only where a call has them: what a
    text says about them, it keeps.
    """

    MARKERS = Markers((CALL,))
    OPENERS = (CALL,)
    TAGS = Markers((CALL, CALL_END, KEY, KEY_END, VALUE, VALUE_END))
    VALUE_ENDS = Markers((VALUE_END,))
    CLOSERS = Markers((VALUE_END, CALL_END))

    _opening = ""  # what began a call, if it is one
    _key = ""

    def _content(self) -> bool:
        text = self._text
        if self._skipped():
            return False
        found, end = self._seek(self._markers)
        said = text[self._pos : end]
        if found is None or found.name == CALL:  # a line break before a call belongs to it
            said = said.removesuffix("\n")
        if said:
            self._skips = False
            self._say(said)
        if found is None:
            self._pos += len(said)
            return False
        self._opening = "" if self._forbidden else text[self._pos + len(said) : found.end]
        self._pos, self._skips = found.end, False
        if found.name == CALL:
            self._step = self._name
        elif found.name == CLOSE:
            self._markers = self._watched
        return True

    def _name(self) -> bool:
        """The function's name, up to the first argument or the call's end."""
        text, pos = self._text, self._pos
        found, end = self._seek(_BOUNDS)
        name = text[pos:end]
        if found is None and len(name) <= MAX_NAME and self._may_be_name(name):
            return False
        if found is None or not self._is_name(name):
            self._step = self._content
            self._say(self._opening)
            return True
        self._begin_call(name.strip())
        self._pos, self._step = end, self._between
        return True

    def _is_name(self, name: str) -> bool:
        return name.strip() in self.functions or _NAME.fullmatch(name) is not None

    def _may_be_name(self, begun: str) -> bool:
        start = begun.strip()
        known = any(name.startswith(start) for name in self.functions)
        return known or _HALF_NAME.fullmatch(begun) is not None

    def _between(self) -> bool:
        """Between a call's tags: what is none of them is dropped."""
        found, end = self._seek(self.TAGS)
        self._pos = end
        if found is None:
            return False
        self._pos = found.end
        if found.name == KEY:
            self._step = self._in_key
        elif found.name == VALUE and self._key:
            self._begin_argument()
        elif found.name in (CALL, CALL_END):
            self._end_call()
            self._step, self._skips = self._content, True
            self._pos = found.start if found.name == CALL else found.end
        return True

    def _in_key(self) -> bool:
        found, end = self._seek(_KEY_ENDS)
        if found is None:
            return False
        self._key = self._text[self._pos : end].strip()
        self._pos = found.end if found.name == KEY_END else end
        self._step = self._between
        return True

    def _begin_argument(self) -> None:
        key, self._key = self._key, ""
        self._begin_value(key, _kind(self._schema(key)))

    def _after_value(self) -> None:
        self._step = self._between

    def _finish(self, rest: str, natural: bool) -> None:
        if self._step == self._content:
            self._say(rest if natural else self._markers.release(rest))
        elif self._step == self._name:
            if natural:  # never a call, so it was an answer
                self._say(self._opening + rest)
        elif self._in_value:
            self._finish_value(self.CLOSERS.release(rest), natural)
        if natural:  # the model forgot to close it
            self._end_call()


def _kind(schema: Any) -> ValueKind:
    """What a schema makes of a value."""
    if schema.get("type") == "string":
        return ValueKind.TEXT
    words = schema.get("enum")
    if isinstance(words, list) and words and all(isinstance(w, str) for w in words):
        return ValueKind.TEXT
    return ValueKind.EITHER
