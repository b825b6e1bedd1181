"""Tool calls as V3.2 writes them: DSML tags, one parameter each."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ds_runtime.text.json_stream import JsonStream, quoted
from ds_runtime.text.markers import Markers
from ds_runtime.text.tool_calls import NO_JSON, Schemas, ToolCallParser, strict_json

BLOCK, BLOCK_END = "<｜DSML｜function_calls", "</｜DSML｜function_calls"
INVOKE, INVOKE_END = "<｜DSML｜invoke", "</｜DSML｜invoke"
PARAM, PARAM_END = "<｜DSML｜parameter", "</｜DSML｜parameter"
_OTHER = ("<｜DSML｜tool_calls", "</｜DSML｜tool_calls")  # V4's name of the block
_MAX_TAG = 1024  # characters up to its `>`; what is longer is no tag
_TAG = re.compile(r'(?:[^>"<]|"[^"]*")*>')
_HALF_TAG = re.compile(r'(?:[^>"<]|"[^"]*")*(?:"[^"]*)?')
_BARE = re.compile(r"\s*>?")
_ATTRIBUTE = re.compile(r'\s*\w+="')
_NAME = re.compile(r'\bname="([^"]*)"')
_STRING = re.compile(r'\bstring="(true|false)"')
_SPACE = re.compile(r"\s+")


class DsmlToolParser(ToolCallParser):
    """`<D function_calls>`, `<D invoke name>` and `<D parameter name string>`, where D is ｜DSML｜.

    Arguments come out as one JSON object: text parameters while they come, others whole. Accepted
    too: calls without the outer block, a JSON object instead of parameters, `<D invoke …/>`.
    """

    MARKERS = Markers((BLOCK, BLOCK_END, INVOKE, INVOKE_END, PARAM, PARAM_END, *_OTHER))
    OPENERS = (BLOCK, INVOKE, _OTHER[0])

    def __init__(
        self, functions: Schemas, *, drop_unknown: bool = False, parallel: bool = True
    ) -> None:
        super().__init__(functions, drop_unknown=drop_unknown, parallel=parallel)
        self._skips = False  # white space between tags is no content
        self._tag = ""
        self._called = ""
        self._num_params = 0
        self._is_text = True
        self._value: list[str] = []
        self._json = JsonStream()

    def _content(self) -> bool:
        text = self._text
        if self._skips:
            if skipped := _SPACE.match(text, self._pos):
                self._pos = skipped.end()
            if self._pos == len(text):
                return False
        if self._open and self._skips and not self._num_params and text[self._pos] == "{":
            self._json, self._step = JsonStream(), self._object
            return True
        found = self._markers.find(text, self._pos)
        end = self._markers.held(text, self._pos) if found is None else found[0]
        # Two line breaks before the calls belong to the format.
        said = text[self._pos : end]
        if found is None:
            said = said[: len(said) - min(2, len(said) - len(said.rstrip("\n")))]
        elif found[2] in self.OPENERS:
            said = said.removesuffix("\n\n")
        if said:
            self._skips = False
            self._say(said)
        if found is None:
            self._pos += len(said)
            return False
        self._marker(found)
        return True

    def _marker(self, found: tuple[int, int, str]) -> None:
        """Go on after the beginning of a tag."""
        self._pos = found[1]
        if found[2] in self.MARKERS.names:
            self._tag, self._step, self._skips = found[2], self._inside_tag, True
        else:
            self._markers, self._step = self.MARKERS, self._content

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
            self._begin_value(attributes)
            return
        self._end_call()
        if self._tag != INVOKE:
            return
        name = _NAME.search(attributes)
        if name is None:  # no call: what stands in the tag is content
            said = attributes.rstrip("/>").strip()
            self._skips = self._skips and not said
            self._say(said)
            return
        self._called, self._num_params = name.group(1), 0
        self._begin(self._called)
        if attributes.endswith("/>"):
            self._end_call()

    def _end_call(self) -> None:
        if self._open:
            self._argue("}" if self._num_params else "{}")
            self._end(complete=True)

    def _begin_value(self, attributes: str) -> None:
        name, kind = _NAME.search(attributes), _STRING.search(attributes)
        if not self._open or name is None:
            return  # what follows is content
        key = name.group(1)
        self._is_text = kind.group(1) == "true" if kind else self._wants_text(key)
        before = ", " if self._num_params else "{"
        self._argue(f'{before}"{quoted(key)}": ' + ('"' if self._is_text else ""))
        self._num_params += 1
        self._value, self._step = [], self._inside_value

    def _wants_text(self, key: str) -> bool:
        """Whether the client's schema asks for a string there."""
        properties = self.functions.get(self._called, {}).get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return isinstance(schema, Mapping) and schema.get("type") == "string"

    def _inside_value(self) -> bool:
        """A parameter's value; any tag ends it."""
        found = self.MARKERS.find(self._text, self._pos)
        end = self.MARKERS.held(self._text, self._pos) if found is None else found[0]
        self._add_value(self._text[self._pos : end])
        self._pos = end
        if found is None:
            return False
        self._end_value()
        self._marker(found)
        return True

    def _add_value(self, part: str) -> None:
        if self._is_text:
            self._argue(quoted(part))
        else:
            self._value.append(part)

    def _end_value(self) -> None:
        if self._is_text:
            self._argue('"')
            return
        raw = "".join(self._value)
        is_json = strict_json(raw.strip()) is not NO_JSON
        self._argue(raw.strip() if is_json else f'"{quoted(raw)}"')

    def _object(self) -> bool:
        """All arguments as one JSON object."""
        found = self.MARKERS.find(self._text, self._pos)
        end = self.MARKERS.held(self._text, self._pos) if found is None else found[0]
        part, rest = self._json.feed(self._text[self._pos : end])
        self._argue(part)
        self._pos = end - len(rest)
        if not self._json.done:
            if found is None:
                return False
            self._argue(self._json.close())
        self._end(complete=True)
        self._step, self._skips = self._content, True
        return True

    def _finish(self, rest: str, natural: bool) -> None:
        rest = self._markers.release(rest)
        if self._step == self._content:
            self._say(rest.rstrip("</｜") if self._open or self._skips else rest)
        elif self._step == self._inside_tag:
            if self._tag not in (INVOKE, PARAM):
                self._take_tag("")
            elif natural and rest.strip() and not _ATTRIBUTE.match(rest):
                self._say(rest)  # never became a tag
        elif self._step == self._inside_value:
            self._add_value(rest)
            if natural:
                self._end_value()
            else:
                self._argue("".join(self._value))
        elif self._step == self._object:
            self._argue(self._json.feed(rest)[0])
            if natural:
                self._argue(self._json.close())
                self._end(complete=True)
        if natural:  # the model forgot to close it
            self._end_call()
