"""Stand-ins for vendors' libraries: their recorded signatures, layouts and refusals, over torch.

`signatures/NAME.json` holds what the vendor's functions take, written by
tools/record_signatures.py. A stand-in is a function of those parameters alone that it computes
with. `doubles` puts the recorded signature before it: a call that the vendor's function would not
take is a TypeError, and a parameter that the stand-in does not compute with must have its default.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import re
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

SIGNATURES = Path(__file__).parents[1] / "signatures"


class RefusedError(Exception):
    """What a vendor's function would not compute."""


def require(holds: object, sentence: str) -> None:
    """Refuse as the library does, where its condition does not hold."""
    if not holds:
        raise RefusedError(sentence)


def records(name: str) -> dict[str, str]:
    """ "module:function" → its recorded signature."""
    return json.loads((SIGNATURES / f"{name}.json").read_text())["calls"]


class Named(str):
    """A default that is not a literal, as written: "dtypes.bf16"."""


def parsed(text: str) -> inspect.Signature:
    """A recorded signature, Python's or an op schema."""
    return _schema(text) if re.search(r"\) -> ", text) else _python(text)


def _python(text: str) -> inspect.Signature:
    args = ast.parse(f"def f{text}: ...").body[0].args  # type: ignore[attr-defined]
    kinds = inspect.Parameter
    made = []
    positional: list[tuple[ast.arg, Any]] = [(a, kinds.POSITIONAL_ONLY) for a in args.posonlyargs]
    positional += [(a, kinds.POSITIONAL_OR_KEYWORD) for a in args.args]
    required = len(positional) - len(args.defaults)
    for i, (arg, kind) in enumerate(positional):
        default = kinds.empty if i < required else _value(args.defaults[i - required])
        made.append(inspect.Parameter(arg.arg, kind, default=default))
    if args.vararg:
        made.append(inspect.Parameter(args.vararg.arg, kinds.VAR_POSITIONAL))
    for arg, node in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        default = kinds.empty if node is None else _value(node)
        made.append(inspect.Parameter(arg.arg, kinds.KEYWORD_ONLY, default=default))
    if args.kwarg:
        made.append(inspect.Parameter(args.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(made)


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return Named(ast.unparse(node))


def _schema(text: str) -> inspect.Signature:
    import torch

    kinds = inspect.Parameter
    made = []
    for a in torch._C.parse_schema(f"vendor::op{text}").arguments:
        kind = kinds.KEYWORD_ONLY if a.kwarg_only else kinds.POSITIONAL_OR_KEYWORD
        default = a.default_value if a.has_default_value() else kinds.empty
        made.append(inspect.Parameter(a.name, kind, default=default, annotation=str(a.type)))
    return inspect.Signature(made)


def _same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and value == default)


_TYPES: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("Optional[", lambda v: True),  # what is inside is asked for below
    ("Tensor", lambda v: type(v).__name__ in ("Tensor", "Parameter")),
    ("List[Tensor]", lambda v: isinstance(v, list | tuple)),
    ("List[int]", lambda v: isinstance(v, list | tuple) and all(type(i) is int for i in v)),
    ("int", lambda v: type(v) is int or type(v).__name__ == "dtype"),
    ("float", lambda v: isinstance(v, int | float)),
    ("bool", lambda v: type(v) is bool),
    ("str", lambda v: isinstance(v, str)),
)


def _check_type(name: str, parameter: inspect.Parameter, value: Any) -> None:
    """Of an op's argument, as torch's dispatcher does."""
    wanted = parameter.annotation
    if wanted is inspect.Parameter.empty:
        return
    if wanted.startswith("Optional["):
        if value is None:
            return
        wanted = wanted[len("Optional[") : -1]
    wanted = wanted.replace("SymInt", "int")
    holds = dict(_TYPES).get(wanted)
    if holds is not None and not holds(value):
        raise TypeError(f"{name}: {parameter.name} must be {wanted}, not {type(value).__name__}")


# What calls a stand-in: the last of these. Stand-ins for graphs put theirs here.
around: list[Callable[..., Any]] = [lambda compute, **given: compute(**given)]


def double(name: str, recorded: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    """`compute` behind the recorded signature of "module:function"."""
    signature, models = parsed(recorded), set(inspect.signature(compute).parameters)
    variadic = {p.name: p.kind for p in signature.parameters.values() if p.kind in (2, 4)}
    strange = sorted(models - signature.parameters.keys())
    if strange:
        raise TypeError(f"{name} has no parameter {', '.join(strange)}: {signature}")

    @functools.wraps(compute)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as e:
            raise TypeError(f"{name}: {e}") from None
        for key, value in bound.arguments.items():
            parameter = signature.parameters[key]
            if key in variadic and key not in models:
                raise RefusedError(f"{name}: the stand-in takes no {key}")
            _check_type(name, parameter, value)
            if key not in models and not _same(value, parameter.default):
                raise RefusedError(f"{name}: the stand-in does not compute {key}={value!r}")
        bound.apply_defaults()
        return around[-1](compute, **{k: v for k, v in bound.arguments.items() if k in models})

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _method(cls: type, name: str, recorded: str) -> None:
    attr = name.rpartition(".")[2]
    method: Any = double(name, recorded, cls.__dict__[attr])
    setattr(cls, attr, classmethod(method) if recorded.startswith("(cls,") else method)


def doubles(record: str, *stand_ins: Any, **others: Any) -> dict[str, types.ModuleType]:
    """Modules of stand-ins, by name, with the signatures of signatures/RECORD.json.

    stand_ins: functions and classes, found by their names in the record, an op's overload as
    op_overload; every name of it must be there. others: "module__path" = {attribute: value} for
    what is no function, such as enums.
    """
    calls, made = records(record), dict[str, types.ModuleType]()
    by_name = {s.__name__: s for s in stand_ins}
    left = set(by_name)
    for name, text in calls.items():
        module, _, path = name.partition(":")
        first, _, method = path.partition(".")
        overload = by_name.get(f"{first}_{method}")
        if overload is not None:  # of an op, which is in the record before it
            left.discard(overload.__name__)
            setattr(getattr(made[module], first), method, double(name, text, overload))
            continue
        if first not in by_name:
            raise LookupError(f"{record}.json records {name}, and nothing stands in for it")
        left.discard(first)
        where = _module(made, module)
        if method:
            _method(by_name[first], name, text)
            setattr(where, first, by_name[first])
        else:
            setattr(where, first, double(name, text, by_name[first]))
    if left:
        raise LookupError(f"{record}.json does not record {', '.join(sorted(left))}")
    for module, values in others.items():
        vars(_module(made, module.replace("__", "."))).update(values)
    return made


def _module(made: dict[str, types.ModuleType], name: str) -> types.ModuleType:
    """The module of that name, with its parents, each an attribute of the one before."""
    if name not in made:
        made[name] = types.ModuleType(name)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(_module(made, parent), last, made[name])
    return made[name]


def install(
    monkeypatch: Any, modules: dict[str, types.ModuleType], adapters: Iterable[str]
) -> None:
    """Put stand-ins in the places of modules, for adapters that keep what they imported.

    adapters: modules of the plugin, each with a cached `_library`.
    """
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for adapter in adapters:
        found = importlib.import_module(adapter)
        monkeypatch.setattr(found, "_library", functools.cache(found._library.__wrapped__))
