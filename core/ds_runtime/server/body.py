"""Request bodies: their size, their JSON, their fields. Every fault is one sentence."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import msgspec
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from ds_runtime.errors import shown
from ds_runtime.nesting import MAX_NESTING, too_deep
from ds_runtime.server.errors import ApiError, ClientGoneError
from ds_runtime.server.protocol import Body

B = TypeVar("B", bound=Body)
T = TypeVar("T")
_INLINE = 4096  # bytes of body that are worked on in the event loop
_LARGE = 1 << 18
_LONGEST_NAME = 100
_BODY_SECONDS, _BODY_RATE = 30.0, 1 << 15  # for a body of any size; and bytes per second
_DRAIN_BYTES = 1 << 28
_DRAIN_SECONDS = 10.0
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # as an escape: UTF-8 itself has none
_TYPE_TAGS = frozenset({"str", "int", "float", "bool", "none"})


async def parse(request: Request, kind: type[B], limit: int, prepare: Callable[[B], T]) -> T:
    """`prepare(body)` of the body as a `kind`; ApiError 413 above `limit` bytes, 400 if it is bad.

    Reading, checking and preparing (templates, tokenisation) take time that grows with the body:
    anything but a small one is worked on in a thread, so that streams go on meanwhile.
    """
    bodies: Bodies = request.app.state.bodies
    with bodies.room() as room:
        raw = await read_body(request, limit, room)
        if len(raw) > _INLINE:
            return await asyncio.to_thread(_work, raw, kind, prepare)
        return _work(raw, kind, prepare)


def _work(raw: bytes, kind: type[B], prepare: Callable[[B], T]) -> T:
    if (field := too_deep(raw)) is not None:
        raise _bad(
            f"{field or 'the body'} is nested too deeply: {MAX_NESTING} levels are the most",
            field or None,
        )
    try:
        value = _json(raw)
        if not isinstance(value, dict):
            raise _bad(f"the body is a JSON {_name(value)}: an object is needed")
        if _SURROGATE.search(raw):
            _check_unicode(value)
        return prepare(validate(kind, value))
    except RecursionError as e:
        raise _bad("the body's JSON is nested too deeply") from e


class Bodies:
    """Bytes of all bodies that are being read or worked on: at most `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0

    @contextlib.contextmanager
    def room(self) -> Iterator[Callable[[int], None]]:
        """A function that takes room for so many bytes more, until the end of the context.

        It raises ApiError 503 when there is none: others hold it.
        """
        mine = 0

        def take(size: int) -> None:
            nonlocal mine
            if (
                mine and size and self._held + size > self._limit
            ):  # small ones, of one part, always fit
                raise ApiError(
                    503,
                    f"the bodies of other requests hold {self._held} bytes: try again",
                    type="server_error",
                    code="busy",
                    headers={"Retry-After": "1", "Connection": "close"},
                )
            mine, self._held = mine + size, self._held + size

        try:
            yield take
        finally:
            self._held -= mine


async def read_body(request: Request, limit: int, room: Callable[[int], None]) -> bytes:
    """The body's bytes, never more than `limit` of them in memory; `room` is asked for each part.

    ApiError 408 for one that comes too slowly.
    """
    begin = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(begin + _BODY_SECONDS) as timeout:
            return await _read(request, limit, room, timeout, begin)
    except TimeoutError as e:
        raise ApiError(
            408,
            f"the body came too slowly: {_BODY_SECONDS:g} s and one more for every {_BODY_RATE} "
            "bytes are given",
            code="body_too_slow",
            headers={"Connection": "close"},
        ) from e


async def _read(
    request: Request,
    limit: int,
    room: Callable[[int], None],
    timeout: asyncio.Timeout,
    begin: float,
) -> bytes:
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdigit() else 0
    parts: list[bytes] = []
    try:
        if size > limit:
            await _refuse(request, size, limit)
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                parts.clear()
                await _refuse(request, size, limit)
            room(len(chunk))
            parts.append(chunk)
            timeout.reschedule(begin + _BODY_SECONDS + size / _BODY_RATE)
    except ClientDisconnect as e:
        raise ClientGoneError from e
    return b"".join(parts)


async def _refuse(request: Request, size: int, limit: int) -> NoReturn:
    # Clients that write everything before they read would see a reset instead of the answer, so
    # throw away what comes, within bounds; those that ask first (Expect) send nothing.
    if "expect" not in request.headers:
        try:
            async with asyncio.timeout(_DRAIN_SECONDS):
                seen = 0
                while seen < _DRAIN_BYTES:
                    message = await request.receive()
                    seen += len(message.get("body", b""))
                    if message["type"] != "http.request" or not message.get("more_body"):
                        break
        except TimeoutError:
            seen = size
    raise ApiError(
        413,
        f"the body has {size} bytes or more: the limit is {limit}; send less, or start the "
        "server with a larger --max-body",
        code="body_too_large",
        headers={"Connection": "close"},
    )


def _json(raw: bytes) -> Any:
    if len(raw) > _LARGE:
        # Four times as fast, and all that time other threads stand still. It refuses what is not
        # JSON; the standard library then says why.
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            return msgspec.json.decode(raw)
    try:
        return json.loads(raw.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as e:
        raise _bad(f"the body is not UTF-8: byte {e.start} is {raw[e.start]:#04x}") from e
    except json.JSONDecodeError as e:
        raise _bad(
            f"the body is not valid JSON: {e.msg} at line {e.lineno}, column {e.colno}"
        ) from e
    except ValueError as e:
        raise _bad(f"the body is not valid JSON: {e}") from e


def _check_unicode(value: Mapping[str, Any]) -> None:
    """ApiError for the first field with half a character: no answer and no token could hold it."""
    for name, field in value.items():
        what, param = "the name of a field", None
        try:
            name.encode()
            what, param = shown(name), name
            json.dumps(field, ensure_ascii=False).encode()
        except UnicodeEncodeError as e:
            raise _bad(
                f"{what} holds the unpaired surrogate {ascii(e.object[e.start])[1:-1]}: "
                "send valid Unicode, both halves or neither",
                param,
                "invalid_value",
            ) from e


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def validate(kind: type[B], value: Mapping[str, Any], prefix: str = "") -> B:
    """`value` as a `kind`, or an ApiError that names the field.

    A null is a field that was left out: the field keeps its default, if it has one.
    """
    known: dict[str, Any] = {}
    for name, field in value.items():
        if name in kind.ONLY:
            _check_only(kind, prefix + name, name, field)
        if (info := kind.model_fields.get(name)) is not None:
            if field is not None or info.is_required():
                known[name] = field
        elif name not in kind.ONLY and name not in kind.IGNORED:
            _unknown(kind, prefix + name, name)
    for name, field in kind.model_fields.items():
        # Nested bodies get the same care before pydantic sees them.
        nested = _nested(field.annotation)
        if nested is not None and isinstance(known.get(name), dict):
            known[name] = validate(nested, known[name], f"{prefix}{name}.")
    try:
        return kind.model_validate(known)
    except ValidationError as e:
        raise _invalid(e, prefix) from e


def _nested(annotation: Any) -> type[Body] | None:
    for option in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(option, type) and issubclass(option, Body):
            return option
    return None


def _check_only(kind: type[Body], path: str, name: str, field: Any) -> None:
    allowed = kind.ONLY[name]
    # By type as well: true would pass as 1.
    if field is None or any(type(field) is type(a) and field == a for a in allowed):
        return
    remedy = " or ".join(json.dumps(a) for a in allowed)
    raise _bad(
        f"{path} {_short(field)} is not supported: "
        + (f"leave it out or send {remedy}" if allowed else "leave it out"),
        path,
        "unsupported_value",
    )


def _unknown(kind: type[Body], path: str, name: str) -> NoReturn:
    # Comparing names takes memory and time that grow with their length.
    known = [*kind.model_fields, *kind.ONLY] if len(name) <= _LONGEST_NAME else []
    near = difflib.get_close_matches(name, known, 1, 0.5)
    hint = f": did you mean {near[0]!r}?" if near else ": remove it"
    raise _bad(f"unknown field {shown(path)}{hint}", path, "unknown_field")


def _invalid(error: ValidationError, prefix: str) -> ApiError:
    """One sentence about the first field that is wrong."""
    faults = error.errors(include_url=False, include_context=False)
    field = faults[0]["loc"][0]
    # Where one of several types would do, each says why it does not: the deepest came closest.
    deepest = max((f for f in faults if f["loc"][0] == field), key=lambda f: len(f["loc"]))
    path = prefix + _path(deepest["loc"])
    same = [f for f in faults if prefix + _path(f["loc"]) == path]
    said = " or ".join(dict.fromkeys(map(_said, same)))
    if deepest["type"] == "missing":
        return _bad(f"{path} is missing: the request needs it", path, "missing_field")
    return _bad(f"{path} is {_short(deepest['input'])}: {said}", path, "invalid_type")


_PLAIN = {  # of what pydantic says in Python's words
    "dict_type": "should be an object",
    "string_pattern_mismatch": "should be printable ASCII without white space",
}


def _said(fault: Mapping[str, Any]) -> str:
    plain: str = fault["msg"].removeprefix("Input ").replace(" after validation", "")
    return _PLAIN.get(fault["type"], plain)


def _path(location: tuple[int | str, ...]) -> str:
    out = ""
    for part in location:
        if isinstance(part, int):
            out += f"[{part}]"
        elif part not in _TYPE_TAGS and "[" not in part:
            out += ("." if out else "") + part
    return out


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _name(value: Any) -> str:
    return {list: "array", str: "string", type(None): "null", bool: "boolean"}.get(
        type(value), "number"
    )


def _bad(message: str, param: str | None = None, code: str = "invalid_json") -> ApiError:
    if len(message) > 600:  # names in the body may be of any length
        message = message[:597] + "..."
    return ApiError(400, message, param=None if param is None else param[:200], code=code)
