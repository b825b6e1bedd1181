"""Tool calls as V3.2 and V4 write them: DSML tags, one parameter each."""

from __future__ import annotations

import re

from ds_runtime.text.parsers.markers import Found, Markers
from ds_runtime.text.parsers.tag_calls import TagToolParser, ValueKind

# V3.2's name of the block, V4's, and those that V4 has been seen to write.
_BLOCKS = ("function_calls", "tool_calls", "toolcalls", "tool>")
BLOCKS = tuple(f"<｜DSML｜{name}" for name in _BLOCKS)
BLOCK_ENDS = tuple(f"</｜DSML｜{name}" for name in _BLOCKS)
INVOKE, INVOKE_END = "<｜DSML｜invoke", "</｜DSML｜invoke"
PARAM, PARAM_END = "<｜DSML｜parameter", "</｜DSML｜parameter"
_WRAPPERS = ("arguments", "input")
_MAX_TAG = 1024  # characters up to its `>`; what is longer is no tag
_TAG = re.compile(r'(?:[^>"<]|"[^"]*")*>')
_HALF_TAG = re.compile(r'(?:[^>"<]|"[^"]*")*(?:"[^"]*)?')
_BARE = re.compile(r"\s*>?")
_ATTRIBUTE = re.compile(r'\s*\w+="')
_NAME = re.compile(r'\bname="([^"]*)"')
_STRING = re.compile(r'\bstring="(true|false)"')


class DsmlToolParser(TagToolParser):
    """`<D function_calls>`, or `<D tool_calls>` in V4, `<D invoke name>` and
    `<D parameter name string>`, where D is ｜DSML｜.

    Accepted too: calls without the outer block, a JSON object instead of parameters, the same
    wrapped in a parameter "arguments" or "input" that the function does not have,
    `<D invoke …/>`.
    """

    MARKERS = Markers((*BLOCKS, *BLOCK_ENDS, INVOKE, INVOKE_END, PARAM, PARAM_END))
    OPENERS = (*BLOCKS, INVOKE)
    TAGS, VALUE_ENDS = MARKERS, Markers((PARAM_END,))
    CLOSERS = Markers((PARAM_END, INVOKE_END, *BLOCK_ENDS))

    _tag = ""
    _tag_loosely = False

    def _content(self) -> bool:
        text = self._text
        if self._skipped():
            return False
        if self._open and self._skips and not self._num_params and text[self._pos] == "{":
            self._json, self._step = self._new_json(self.TAGS), self._object
            return True
        self._outside()
        found, end = self._seek(self._markers)
        # Two line breaks before the calls belong to the format.
        said = text[self._pos : end]
        if found is None:
            said = said[: len(said) - min(2, len(said) - len(said.rstrip("\n")))]
        elif found.name in self.OPENERS:
            said = said.removesuffix("\n\n")
        if said:
            self._skips = False
            self._say(said)
        if found is None:
            self._pos += len(said)
            return False
        self._marker(found)
        return True

    def _marker(self, found: Found) -> None:
        """Go on after the beginning of a tag."""
        self._pos = found.end
        if found.name in self.MARKERS.names:
            self._tag, self._step, self._skips = found.name, self._inside_tag, True
            self._tag_loosely = not found.exact
            self._loose = self._loose or found.name in self.OPENERS
        else:
            self._markers, self._step = self._watched, self._content

    def _inside_tag(self) -> bool:
        """Attributes, up to `>`. What cannot be a tag is content."""
        text, pos = self._text, self._pos
        tag = (_TAG if self._tag in (INVOKE, PARAM) else _BARE).match(text, pos)
        if tag is None or (tag.end() == len(text) and not tag.group().endswith(">")):
            half = tag or _HALF_TAG.match(text, pos)
            if half is not None and half.end() == len(text) and half.end() - pos <= _MAX_TAG:
                return False
        self._step = self._content
        if tag is not None and tag.end() - pos <= _MAX_TAG:
            self._pos = tag.end()
            self._take_tag(tag.group())
        return True

    def _take_tag(self, attributes: str) -> None:
        if self._tag == PARAM_END:
            return
        if self._tag == PARAM:
            self._parameter(attributes)
            return
        self._end_call()
        if self._tag in BLOCK_ENDS:
            self._loose = False
        if self._tag != INVOKE:
            return
        name = _NAME.search(attributes)
        if name is None:  # no call: what stands in the tag is content
            said = attributes.rstrip("/>").strip()
            self._skips = self._skips and not said
            self._say(said)
            return
        self._begin_call(name.group(1))
        if attributes.endswith("/>"):
            self._end_call()

    def _parameter(self, attributes: str) -> None:
        name, told = _NAME.search(attributes), _STRING.search(attributes)
        if not self._open or name is None:
            return  # what follows is content
        key = name.group(1)
        if told is not None:
            kind = ValueKind.TEXT if told.group(1) == "true" else ValueKind.JSON
        else:
            kind = ValueKind.TEXT if self._schema(key).get("type") == "string" else ValueKind.EITHER
        wraps = not self._num_params and key in _WRAPPERS and self._lacks(key)
        self._begin_value(key, kind, self._tag_loosely, wraps)

    def _after_value(self) -> None:
        self._step, self._skips = self._content, True

    def _object(self) -> bool:
        """All arguments as one JSON object."""
        self._argue(self._feed_json()[0])
        if self._json.done or self._json.stopped:
            self._argue("" if self._json.done else self._json.close())
            self._end(complete=True)
            self._after_value()
        return True

    def _finish(self, rest: str, natural: bool) -> None:
        rest = self._markers.release(rest, self._loose)
        if self._step == self._content:
            self._say(rest.rstrip("</｜") if self._open or self._skips else rest)
        elif self._step == self._inside_tag:
            if self._tag not in (INVOKE, PARAM):
                self._take_tag("")
            elif natural and rest.strip() and not _ATTRIBUTE.match(rest):
                self._say(rest)  # never became a tag
        elif self._in_value:
            self._finish_value(rest, natural)
        elif self._step == self._object:
            self._argue(self._json.close() if natural else self._json.cut())
            if natural:
                self._end(complete=True)
        if natural:  # the model forgot to close it
            self._end_call()
