"""Other protocols' requests become chat requests; what is wrong is named as the client wrote it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ds_runtime.errors import RequestError, shown
from ds_runtime.server.errors import ApiError
from ds_runtime.server.fields import EMPTY, is_neutral

Json = dict[str, Any]
_QUOTED = re.compile(r"""(?<!\w)('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""")
_MESSAGE = re.compile(r"\bmessages\[(\d+)\]")


class Names:
    """Where each part of a chat request stood in the client's own body.

    paths: one per chat message. fields: chat's name, a regular expression → the client's, put in
    one after the other.
    """

    def __init__(self, paths: Sequence[str] = (), fields: Mapping[str, str] | None = None) -> None:
        self._paths, self._fields = paths, fields or {}

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Errors that leave the block name the client's fields."""
        try:
            yield
        except (RequestError, ApiError) as e:
            raise self.renamed(e) from e

    def renamed(self, error: Exception) -> Exception:
        """An error that names the client's fields, if it names any."""
        if isinstance(error, RequestError):
            return RequestError(self.own(str(error)), self._param(error.param))
        if isinstance(error, ApiError):
            error.message, error.param = self.own(error.message), self._param(error.param)
            error.args = (error.message,)
        return error

    def own(self, text: str) -> str:
        """`text` with the client's names; what is quoted is the client's own."""
        parts = _QUOTED.split(text)
        parts[::2] = map(self._renamed, parts[::2])
        return "".join(parts)

    def _renamed(self, text: str) -> str:
        text = _MESSAGE.sub(self._path, text)
        for chat, client in self._fields.items():
            text = re.sub(rf"(?<![\w.])(?<!these ){chat}\b", client, text)
        return text

    def _param(self, param: str | None) -> str | None:
        return None if param is None else self.own(param)

    def _path(self, match: re.Match[str]) -> str:
        number = int(match[1])
        return self._paths[number] if number < len(self._paths) else match[0]


def bad(path: str, value: object, needed: str) -> RequestError:
    """The error for a value at `path`."""
    return RequestError(f"{path} is {shown(value)}: {needed}", path)


def only(given: Mapping[str, Any], path: str, known: Sequence[str]) -> None:
    """RequestError for the first key that is none of `known` and asks for something."""
    for name in given:
        if name not in known and not is_neutral(given[name], EMPTY):
            raise bad(f"{path}.{name}", given[name], f"only {', '.join(known)} are known")


def parts_text(content: Any, path: str, kinds: Sequence[str]) -> str:
    """Text, or the texts of a list of parts of these types, joined by line breaks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(path, content, "text or a list of parts is needed")
    texts: list[str] = []
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in kinds:
            kind = part.get("type") if isinstance(part, dict) else part
            raise bad(f"{path}[{i}].type", kind, f"only {', '.join(kinds)} is supported")
        if not isinstance(part.get("text"), str):
            raise bad(f"{path}[{i}].text", part.get("text"), "text is needed")
        texts.append(part["text"])
    return "\n".join(texts)


def text_in(item: Mapping[str, Any], name: str, path: str) -> str:
    """The text under a name; RequestError for anything else."""
    value = item.get(name)
    if not isinstance(value, str):
        raise bad(f"{path}.{name}", value, "text is needed")
    return value


def present(values: Mapping[str, Any]) -> Json:
    """Without the fields that are None."""
    return {name: value for name, value in values.items() if value is not None}
