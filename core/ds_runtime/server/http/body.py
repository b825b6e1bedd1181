"""Request bodies: their JSON and their fields. Every fault is one sentence."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import json.scanner
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NoReturn, TypeVar

import msgspec
from pydantic import ValidationError
from starlette.requests import Request

from ds_runtime.common.nesting import MAX_NESTING, too_deep
from ds_runtime.errors import FieldPath, RequestError, Said
from ds_runtime.server.errors import ApiError, ClientGoneError, as_json, shown
from ds_runtime.server.generate.protocol import Body
from ds_runtime.server.http.bodies import LARGE, Bodies, Shape, read_body
from ds_runtime.server.protocols.fields import is_neutral

B = TypeVar("B", bound=Body)
E = TypeVar("E", bound=Exception)
T = TypeVar("T")
_SMALL = 4096  # bytes of body that wait for nobody's
_MANY = 1 << 18  # values whose reading would take too long at once
_LONGEST_NAME = 100
_CLOSE = 0.75  # of two names: how much of them is the same
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # as an escape: UTF-8 itself has none
_TYPE_TAGS = frozenset({"str", "int", "float", "bool", "none", "constrained-str"})


async def parse(request: Request, kind: type[B], prepare: Callable[[B], T]) -> T:
    """`prepare(body)` of the body as a `kind`; ApiError 413 for one that no context could need, 400
    if it is bad.

    Reading, checking and preparing (templates, tokenisation) take time that grows with the body: it
    happens in a thread, so that streams continue meanwhile. With a hostile checkpoint a small one
    takes long as well.
    """
    bodies: Bodies = request.app.state.bodies
    with bodies.room() as room:
        raw = await read_body(request, bodies.limit, room)
        if len(raw) <= _SMALL:
            return await asyncio.to_thread(_small, bodies, prepare, raw, kind)
        await _check_there(request)  # and be told from now on
        async with bodies.turn(len(raw)):
            await _check_there(request)
            body = await bodies.work(partial(_read, bodies, raw, kind))
        return await asyncio.to_thread(_large, bodies, prepare, body)


async def _check_there(request: Request) -> None:
    if await request.is_disconnected():
        raise ClientGoneError


def _read(bodies: Bodies, raw: bytes, kind: type[B]) -> B:
    if len(raw) <= _SMALL:
        _check_depth(raw)
        return _read_as(kind, raw)
    with bodies.alone():
        items = Shape.of(raw, bodies.limit).items
        _check_depth(raw)
        return _read_as(kind, raw, items)


def _small(bodies: Bodies, prepare: Callable[[B], T], raw: bytes, kind: type[B]) -> T:
    with bodies.preparing():
        return _prepared(prepare, _read(bodies, raw, kind))


def _large(bodies: Bodies, prepare: Callable[[B], T], body: B) -> T:
    with bodies.preparing():
        return _prepared(prepare, body)


def _prepared(prepare: Callable[[B], T], body: B) -> T:
    try:
        return prepare(body)
    except RecursionError:
        raise _bad("the body's JSON is nested too deeply") from None
    except (ApiError, RequestError) as e:
        raise _alone(e) from None


def _check_depth(raw: bytes) -> None:
    if (field := too_deep(raw)) is not None:
        raise _bad(
            f"{field or 'the body'} is nested too deeply: {MAX_NESTING} levels are the most",
            field or None,
        )


def _read_as(kind: type[B], raw: bytes, items: int = 0) -> B:
    try:
        return _checked(kind, raw, items)
    except RecursionError:
        raise _bad("the body's JSON is nested too deeply") from None
    except ApiError as e:
        raise _alone(e) from None


def _alone(error: E) -> E:
    """Without its traceback and what led to it: these would hold all that was read for a while."""
    error.__context__ = None
    return error.with_traceback(None)


def _checked(kind: type[B], raw: bytes, items: int) -> B:
    value = _json(raw, items)
    if not isinstance(value, dict):
        raise _bad(f"the body is a JSON {_name(value)}: an object is needed")
    if _SURROGATE.search(raw):
        _check_unicode(value)
    return validate(kind, value)


def _json(raw: bytes, items: int) -> Any:
    if not raw or raw.isspace():  # a strip would copy it
        raise _bad("the body is empty: send a JSON object")
    if len(raw) > LARGE and items < _MANY:
        # Four times as fast, and all that time other threads stand still. It refuses what is not
        # JSON; the standard library then says why.
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            return msgspec.json.decode(raw)
    try:
        if items < _MANY:
            return json.loads(raw.decode(), parse_constant=_no_constant)
        return _PATIENT.decode(raw.decode())
    except UnicodeDecodeError as e:
        raise _bad(f"the body is not UTF-8: byte {e.start} is {raw[e.start]:#04x}") from e
    except json.JSONDecodeError as e:
        raise _bad(
            f"the body is not valid JSON: {e.msg} at line {e.lineno}, column {e.colno}"
        ) from e
    except ValueError as e:
        raise _bad(f"the body is not valid JSON: {e}") from e


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


# Reads arrays and objects in Python: slow, but other threads run meanwhile.
_PATIENT = json.JSONDecoder(parse_constant=_no_constant)
_PATIENT.scan_once = json.scanner.py_make_scanner(_PATIENT)  # type: ignore[attr-defined]


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


def validate(kind: type[B], value: Mapping[str, Any], prefix: str = "") -> B:
    """`value` as a `kind`, or an ApiError that names the field.

    A null is a field that was left out: the field keeps its default, if it has one. So is what is
    neutral of a field that this body has not, or that is of another type here.
    """
    known: dict[str, Any] = {}
    for name, field in value.items():
        if (info := kind.model_fields.get(name)) is None:
            _check_foreign(kind, prefix + name, name, field)
        elif info.is_required() or not (field is None or _says_nothing(kind, name, field)):
            known[name] = field
    for name, nested in nested_bodies(kind).items():
        # They get the same care before pydantic sees them.
        given = known.get(name)
        if isinstance(given, dict):
            known[name] = validate(nested, given, f"{prefix}{name}.")
        elif isinstance(given, list):
            known[name] = [
                validate(nested, one, f"{prefix}{name}[{i}].") if isinstance(one, dict) else one
                for i, one in enumerate(given)
            ]
    try:
        return kind.model_validate(known)
    except ValidationError as e:
        raise _invalid(kind, e, prefix) from e


@cache
def nested_bodies(kind: type[Body]) -> dict[str, type[Body]]:
    """The fields of a body that hold a body, or a list of them."""
    found = {name: _nested(field.annotation) for name, field in kind.model_fields.items()}
    return {name: nested for name, nested in found.items() if nested is not None}


def _nested(annotation: Any) -> type[Body] | None:
    if isinstance(annotation, type) and issubclass(annotation, Body):
        return annotation
    found = map(_nested, getattr(annotation, "__args__", ()))
    return next((one for one in found if one is not None), None)


def _says_nothing(kind: type[Body], name: str, field: Any) -> bool:
    """Whether a field's value is the false of another type that it has elsewhere."""
    return field is False and any(one is False for one in kind.KNOWN.get(name) or ())


def _check_foreign(kind: type[Body], path: str, name: str, field: Any) -> None:
    """ApiError for a field that this body has not and that would change the answer."""
    if field is None or (name in kind.KNOWN and _asks_nothing(kind, name, field)):
        return
    near = _near(kind, name)
    if name not in kind.KNOWN:
        hint = f": did you mean {near!r}?" if near else ": remove it"
        raise _bad(f"unknown field {shown(path)}{hint}", path, "unknown_field")
    also = kind.KNOWN[name] or ()
    sends = also or ((False,) if field is True else ())
    remedy = " or send ".join(["leave it out", *dict.fromkeys(map(json.dumps, sends))])
    if near:
        remedy = f"did you mean {near!r}?"
    said = f" {as_json(field)} is not supported: {remedy}"
    raise _bad((FieldPath.of(path), said), path, "unsupported_value")


def _asks_nothing(kind: type[Body], name: str, field: Any) -> bool:
    also = kind.KNOWN[name]
    listed = kind.PER_PROMPT and isinstance(field, list)
    return is_neutral(field, also) or (listed and all(is_neutral(one, also) for one in field))


def _near(kind: type[Body], name: str) -> str | None:
    """The field of this body that a name may have meant, if it is close: a slip or a part of it."""
    if len(name) > _LONGEST_NAME:  # comparing takes memory and time that grow with the length
        return None
    names, words = list(kind.model_fields), name.split("_")
    inside = (f"{at}.{name}" for at, n in nested_bodies(kind).items() if name in n.model_fields)
    if (found := next(inside, None)) is not None:
        return found
    near = difflib.get_close_matches(name, names, 1, _CLOSE)
    parts = [one for one in names if len(name) > 3 and set(words) <= set(one.split("_"))]
    return near[0] if near else min(parts, key=lambda one: one.count("_"), default=None)


def _invalid(kind: type[Body], error: ValidationError, prefix: str) -> ApiError:
    """One sentence about the first field that is wrong."""
    bodies = {nested.__name__ for nested in nested_bodies(kind).values()}
    faults = error.errors(include_url=False)
    for fault in faults:  # of types that are no fields
        fault["loc"] = tuple(part for part in fault["loc"] if part not in bodies)
    field = faults[0]["loc"][0]
    # Where one of several types would do, each says why it does not: the deepest came closest.
    deepest = max((f for f in faults if f["loc"][0] == field), key=lambda f: len(f["loc"]))
    path = prefix + _path(deepest["loc"])
    same = [f for f in faults if prefix + _path(f["loc"]) == path]
    said = " or ".join(dict.fromkeys(map(_said, same))).replace(" or must be ", " or ")
    if deepest["type"] == "missing":
        said = " is missing: the request needs it"
        return _bad((FieldPath.of(path), said), path, "missing_field")
    wrong = f" is {as_json(deepest['input'])}: {said}"
    return _bad((FieldPath.of(path), wrong), path, "invalid_type")


_WANTED = {  # by pydantic's name of a fault, in JSON's words
    "bool_type": "true or false",
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "list_type": "a list",
    "string_too_short": "a string of at least {min_length} character",
    "string_too_long": "a string of at most {max_length} characters",
    "dict_type": "an object",
    "model_type": "an object",
    "literal_error": "{expected}",
    "less_than": "less than {lt}",
    "greater_than_equal": "greater than or equal to {ge}",
    "string_pattern_mismatch": "printable ASCII without white space",
}
_BOUNDS = {"too_long": ("at most", "max_length"), "too_short": ("at least", "min_length")}


def _said(fault: Mapping[str, Any]) -> str:
    kind, given = fault["type"], fault.get("ctx", {})
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind][0], given[_BOUNDS[kind][1]]
        items = "item" if bound == 1 else "items"
        return f"must be a list of {words} {bound} {items}, not of {given['actual_length']}"
    plain: str = fault["msg"]
    return f"must be {_WANTED[kind].format_map(given)}" if kind in _WANTED else plain


def _path(location: tuple[int | str, ...]) -> str:
    out = ""
    for part in location:
        if isinstance(part, int):
            out += f"[{part}]"
        elif part not in _TYPE_TAGS and "[" not in part:
            out += ("." if out else "") + part
    return out


def _name(value: Any) -> str:
    return {list: "array", str: "string", type(None): "null", bool: "boolean"}.get(
        type(value), "number"
    )


def _bad(said: Said, param: str | None = None, code: str = "invalid_json") -> ApiError:
    text = "".join(map(str, said))
    if len(text) > 600:  # names in the body may be of any length
        said = text[:597] + "..."
    return ApiError(400, said, param=None if param is None else param[:200], code=code)
