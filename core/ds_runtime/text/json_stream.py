"""JSON objects in pieces: what comes out is always the beginning of a valid object.

Valid JSON passes unchanged. What models get wrong is mended as it comes: missing closers, colons
and commas, spare commas, control characters and bad escapes in strings, words that are no JSON
(quoted; Python's True, False and None translated).
"""

from __future__ import annotations

import json
import re

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile(r'[^\s{}\[\],:"`]+')
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


class JsonStream:
    """One object. The first character fed must be `{`; after the matching `}` it is `done`."""

    def __init__(self) -> None:
        self.done = False
        self._stack: list[str] = []
        self._expect = _VALUE
        self._in_string = False
        self._is_key = False
        self._held = ""  # half an escape, or what may be the end of a fence
        self._word = ""
        self._comma = ""  # a comma and white space that may turn out to be spare
        self._out: list[str] = []

    def feed(self, text: str) -> tuple[str, str]:
        """(JSON that is certain now, what is left of `text` after the object's end)."""
        text, self._held, pos = self._held + text, "", 0
        while pos < len(text) and not self.done:
            pos = self._string(text, pos) if self._in_string else self._structure(text, pos)
        return self._take(), text[pos:]

    def close(self) -> str:
        """What makes the object whole, if it is not."""
        if self._in_string:
            self._out.append("" if self._held.startswith("\n`") else quoted(self._held))
            self._end_string()
        self._held = ""
        self._end_word()
        while self._stack:
            self._pop()
        self.done = True
        return self._take()

    def _take(self) -> str:
        out = "".join(self._out)
        self._out.clear()
        return out

    def _string(self, text: str, pos: int) -> int:
        if plain := _PLAIN.match(text, pos):
            self._out.append(plain.group())
            return plain.end()
        char = text[pos]
        if char == '"':
            self._end_string()
        elif char == "\n" and _FENCE.fullmatch(text, pos):
            self._held = text[pos:]
            return len(text)
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

    def _end_string(self) -> None:
        self._out.append('"')
        self._in_string = False
        self._expect = _COLON if self._is_key else _COMMA

    def _structure(self, text: str, pos: int) -> int:
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
        if char not in (_CLOSERS[s] for s in self._stack):
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
