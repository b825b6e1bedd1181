"""JSON objects in pieces: what comes out is always the beginning of a valid object.

Valid JSON passes unchanged. What models get wrong is mended as it comes: missing closers, colons
and commas, spare commas, and control characters and bad escapes in strings. Words that are no JSON
are quoted. Python's True, False and None are translated.

A marker ends the JSON, but not inside a string. What looks like a string may be one that the model
never closed: from a canonical marker in it on, nothing is certain until the string's end. What
JSON allows there proves that it was a string; anything else, that the marker had ended it.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from ds_runtime.text.parsers.markers import Markers

_PLAIN = re.compile(r'[^"\\\x00-\x1f<]+')
_WORD = re.compile(r'[^\s{}\[\],:"`<]+')
_SPACE = re.compile(r"[ \t\r\n]+")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_HALF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_FENCE = re.compile(r"\n(?:`{1,3}\s*)?")  # perhaps the end of a block around an unfinished string
_WORDS = {w: w for w in ("true", "false", "null")} | {
    "True": "true",
    "False": "false",
    "None": "null",
}
_CLOSERS = {"{": "}", "[": "]"}
# What the innermost object or list waits for.
_KEY, _COLON, _VALUE, _COMMA = range(4)


def quoted(text: str) -> str:
    """`text` as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class _Doubt(NamedTuple):
    """A marker stands in a string: what is known if it ended the JSON."""

    text: list[str]  # from the marker on
    sure: int  # how many pieces of output came before it
    expect: int
    held: str


class JsonStream:
    """One object. The first character fed must be `{`; after the matching `}` it is `done`.

    `ends`: markers that end it before; then it is `stopped`, and what is left begins with one.
    `doubts`: whether one in a string that is not closed may. `bare`: any value, which only a
    marker ends.
    """

    def __init__(
        self, ends: Markers | None = None, *, doubts: bool = True, bare: bool = False
    ) -> None:
        self.done = False
        self.stopped = False
        self._ends, self._doubts = ends, doubts
        self._stack: list[str] = ["["] if bare else []
        self._floor = len(self._stack)
        self._expect = _VALUE
        self._in_string = False
        self._is_key = False
        self._held = ""  # half an escape or a marker, or what may be the end of a fence
        self._word = ""
        self._comma = ""  # a comma and white space that may turn out to be spare
        self._out: list[str] = []
        self._doubt: _Doubt | None = None
        self._left = ""

    def feed(self, text: str) -> tuple[str, str]:
        """(JSON that is certain now, what is left of the text after the object's end)."""
        if self._doubt is not None:
            self._doubt.text.append(text)
        text, self._held, pos = self._held + text, "", 0
        while pos < len(text) and not self.done and not self.stopped:
            pos = self._string(text, pos) if self._in_string else self._structure(text, pos)
        left, self._left = self._left, ""
        return self._take(), left or text[pos:]

    def settle(self) -> str:
        """Decide at the text's end: what is left from a marker on that was no string's."""
        if self._doubt is None:
            return ""
        if self._in_string:
            self._refute(self._doubt)
        else:
            self._doubt = None
        left, self._left = self._left, ""
        return left

    def cut(self) -> str:
        """What has come and was not certain; for text that was cut."""
        self._doubt = None
        return self._take()

    def close(self) -> str:
        """What makes the object whole, if it is not."""
        held, self._held = self._held, ""
        if self._ends is not None:
            held = self._ends.release(held, not self._in_string)
        if self._in_string:
            self._out.append("" if held.startswith("\n`") else quoted(held))
            self._end_string()
        else:
            self._word += held
        self._end_word()
        while self._stack:
            self._pop()
        self.done = True
        return self._take()

    def _take(self) -> str:
        sure = len(self._out) if self._doubt is None else self._doubt.sure
        out = "".join(self._out[:sure])
        del self._out[:sure]
        if self._doubt is not None:
            self._doubt = self._doubt._replace(sure=0)
        return out

    def _string(self, text: str, pos: int) -> int:
        if plain := _PLAIN.match(text, pos):
            self._out.append(plain.group())
            return plain.end()
        char = text[pos]
        if char == '"':
            self._end_string()
        elif char == "<":
            return self._bracket(text, pos, pos)
        elif char == "\n" and (fence := _FENCE.match(text, pos)):
            if fence.end() == len(text):
                self._held = text[pos:]
                return len(text)
            if text[fence.end()] == "<":
                return self._bracket(text, pos, fence.end())
            self._out.append(quoted(char))
        elif char != "\\":
            self._out.append(quoted(char))
        elif escape := _ESCAPE.match(text, pos):
            self._out.append(escape.group())
            return escape.end()
        elif _HALF_ESCAPE.fullmatch(text, pos):
            self._held = text[pos:]
            return len(text)
        else:
            self._out.append("\\\\")
        return pos + 1

    def _bracket(self, text: str, pos: int, bracket: int) -> int:
        """Inside a string: a `<`, perhaps behind the end of a fence, which begins at `pos`."""
        if self._ends is not None and self._doubts and self._doubt is None:
            if self._ends.at(text, bracket):
                self._doubt = _Doubt(
                    [text[bracket:]], len(self._out), self._expect, text[pos:bracket]
                )
            elif self._ends.unfinished(text, bracket):
                self._held = text[pos:]
                return len(text)
        self._out.append(quoted(text[pos]))
        return pos + 1

    def _refute(self, doubt: _Doubt) -> None:
        """The string in doubt was none: back to the marker."""
        del self._out[doubt.sure :]
        self._in_string, self._expect, self._held = True, doubt.expect, doubt.held
        self._left, self._doubt, self.stopped = "".join(doubt.text), None, True

    def _is_followed(self, text: str, pos: int) -> bool:
        """Whether what stands at `pos` may follow a string."""
        if text[pos] == "<":
            return self._ends is not None and self._ends.at(text, pos, loose=True) is not None
        return text[pos] in (":" if self._is_key else ",}]`")

    def _end_string(self) -> None:
        self._out.append('"')
        self._in_string = False
        self._expect = _COLON if self._is_key else _COMMA

    def _structure(self, text: str, pos: int) -> int:
        if text[pos] == "<" and self._ends is not None:
            self.stopped = self._ends.at(text, pos, loose=True) is not None
            if not self.stopped and self._ends.unfinished(text, pos, loose=True):
                self._held = text[pos:]
                return len(text)
        if self._doubt is not None and not text[pos].isspace():
            if not self._is_followed(text, pos):
                self._refute(self._doubt)
                return pos
            self._doubt = None
        if self.stopped:
            return pos
        if text[pos] == "<":
            self._word += "<"
            return pos + 1
        if word := _WORD.match(text, pos):
            self._word += word.group()
            return word.end()
        self._end_word()
        if space := _SPACE.match(text, pos):
            if self._comma:
                self._comma += space.group()
            else:
                self._out.append(space.group())
            return space.end()
        char = text[pos]
        if char == '"':
            self._is_key = self._before(scalar=True)
            self._out.append(char)
            self._in_string = True
        elif char in "{[":
            if self._stack:
                self._before(scalar=False)
            self._out.append(char)
            self._stack.append(char)
            self._expect = _KEY if char == "{" else _VALUE
        elif char in "}]":
            self._close(char)
        elif char == ":":
            if self._expect == _COLON:
                self._out.append(char)
                self._expect = _VALUE
        elif char == ",":
            self._between()
        return pos + 1  # white space that JSON does not know is dropped, and the ends of fences

    def _end_word(self) -> None:
        word, self._word = self._word, ""
        if not word:
            return
        is_key = self._before(scalar=True)
        known = _WORDS.get(word) or (word if _NUMBER.fullmatch(word) else None)
        self._out.append(f'"{quoted(word)}"' if is_key or known is None else known)
        self._expect = _COLON if is_key else _COMMA

    def _before(self, scalar: bool) -> bool:
        """Put what is missing before a key or value; whether it is a key."""
        if self._expect == _COMMA:
            self._out.append(",")
            self._expect = self._element()
        self._out.append(self._comma)
        self._comma = ""
        if self._expect == _COLON:
            self._out.append(":")
        elif self._expect == _KEY:
            if scalar:
                return True
            self._out.append('"":')
        return False

    def _element(self) -> int:
        """What follows `{`, `[` or a comma."""
        return _KEY if self._stack[-1] == "{" else _VALUE

    def _between(self) -> None:
        """A comma."""
        if self._expect == _COLON or (self._expect == _VALUE and self._stack[-1] == "{"):
            self._fill()
        if self._expect == _COMMA:
            self._comma = ","
            self._expect = self._element()

    def _fill(self) -> None:
        """A null where a key has no value."""
        self._out.append(":null" if self._expect == _COLON else "null")
        self._expect = _COMMA

    def _close(self, char: str) -> None:
        if char not in (_CLOSERS[s] for s in self._stack[self._floor :]):
            return
        while self._pop() != char:
            pass

    def _pop(self) -> str:
        """Close the innermost object or list."""
        self._comma = ""
        top = self._stack[-1]
        if self._expect == _COLON or (self._expect == _VALUE and top == "{"):
            self._fill()
        self._stack.pop()
        self._out.append(_CLOSERS[top])
        self._expect = _COMMA
        self.done = not self._stack
        return _CLOSERS[top]
