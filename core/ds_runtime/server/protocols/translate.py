"""Other protocols' requests become chat requests; what is wrong is named as the client wrote it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ds_runtime.errors import FieldPath, RequestError
from ds_runtime.server.errors import ApiError, shown
from ds_runtime.server.protocols.fields import EMPTY, is_neutral

Json = dict[str, Any]
Path = tuple[str | int, ...]
Pattern = tuple[str | type[int], ...]


class ClientNames:
    """Where each part of a chat request was in the client's own body.

    paths: one per chat message. fields: how chat's path begins → the client's; the first that fits
    counts, and an index, `int`, is kept. inside: the same after the path of a message.
    """

    def __init__(
        self,
        paths: Sequence[str] = (),
        fields: Mapping[Pattern, Pattern] | None = None,
        inside: Mapping[Pattern, Pattern] | None = None,
    ) -> None:
        self._paths, self._fields, self._inside = paths, fields or {}, inside or {}

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Errors that leave the block name the client's fields."""
        try:
            yield
        except (RequestError, ApiError) as e:
            raise self.renamed(e) from e

    def renamed(self, error: Exception) -> Exception:
        """An error that names the client's fields, if it names any."""
        if not isinstance(error, RequestError | ApiError):
            return error
        said = tuple(self.own(p) if isinstance(p, FieldPath) else p for p in error.said)
        param = None if error.param is None else str(self.own(FieldPath.of(error.param)))
        if isinstance(error, RequestError):
            return RequestError(said, param)
        error.said, error.param = said, param
        error.args = (error.message,)
        return error

    def own(self, field: FieldPath) -> FieldPath:
        """The client's field for chat's."""
        match field.path:
            case ("messages", int(number), *rest) if number < len(self._paths):
                inside = _renamed(tuple(rest), self._inside)
                return FieldPath((*FieldPath.of(self._paths[number]).path, *inside))
        return FieldPath(_renamed(field.path, self._fields))


def _renamed(path: Path, fields: Mapping[Pattern, Pattern]) -> Path:
    """The path, with the first of `fields` that it begins with as the client's."""
    for chat, client in fields.items():
        if len(chat) <= len(path) and all(map(_fits, path, chat)):
            indices = iter([key for key in path[: len(chat)] if isinstance(key, int)])
            own = (key if isinstance(key, str) else next(indices) for key in client)
            return (*own, *path[len(chat) :])
    return path


def _fits(key: str | int, wanted: str | type[int]) -> bool:
    return isinstance(key, int) if isinstance(wanted, type) else key == wanted


def bad(path: str, value: object, needed: str) -> RequestError:
    """The error for a value at `path`."""
    said = " is missing" if value is None else f" is {shown(value)}"
    return RequestError.of(path, f"{said}: {needed}")


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
            needed = f"models here read text alone: give {' or '.join(kinds)}"
            raise bad(f"{path}[{i}].type", kind, needed)
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
