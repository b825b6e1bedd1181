"""The references, one of which breaks its contract, at a place, in a way and once told to.

BREAK: (op, way); ARMED: whether it does yet.
"""

from __future__ import annotations

import torch

from ds_runtime.api import OPS, Facts, Kernel, hookimpl
from ds_runtime.ops.contract import load_attr
from ds_runtime.ops.formats import FORMATS
from ds_runtime_cpu.platform import CpuPlatform

BREAK = ("", "")
ARMED = [True]
LAYOUTS = {"": frozenset(), "kv": frozenset({"latent_pages.v1"}), "index": frozenset()}
OWNING = ("linear", "experts", "mla_absorb", "mla_inputs")


class Stray(BaseException):
    """Of nobody's family."""


def broken(result):
    """What BREAK says becomes of a result."""
    way = BREAK[1]
    if not ARMED[0]:
        return result
    if way == "shape":
        return _first(result, lambda x: x[..., :-1] if x.dim() > 1 else x[:-1])
    if way == "dtype":
        other = {torch.float32: torch.float64, torch.int64: torch.int32, torch.int32: torch.int64}
        return _first(result, lambda x: x.to(other[x.dtype]))
    if way == "count":
        return (result, result) if torch.is_tensor(result) else result[0]
    raise {"raise": ValueError, "leave": SystemExit, "stray": Stray}[way]("no reason")


def _first(result, change):
    if torch.is_tensor(result):
        return change(result)
    return (change(result[0]), *result[1:])


def function(name):
    def call(*args):
        return broken(load_attr(OPS[name].reference)(*args))

    return call


def waits(x, weight, eps):
    """A norm that reads a value on the host."""
    if x.sum().item() > float("inf"):
        return x
    return load_attr(OPS["rms_norm"].reference)(x, weight, eps)


class Object:
    """A reference, of whose methods those that compute are broken."""

    def __init__(self, name, facts):
        self._made = load_attr(OPS[name].reference)(facts)

    def __getattr__(self, name):
        found = getattr(self._made, name)
        if name in ("apply", "expand", "run"):
            return lambda *args: broken(found(*args))
        return found


def __getattr__(name):
    op = name.removeprefix("wrong_")
    if op == name or op not in OPS:
        raise AttributeError(name)
    if OPS[op].kind == "function":
        return function(op)

    return lambda facts: Object(op, facts)


class Wrong(CpuPlatform):
    """Captures at the start, torch's ops."""

    name = "wrong"
    captures, capture_after = True, 0

    def graph_backend(self, rank=0):
        from ds_runtime_kit.checks.replay import ReplayBackend

        return ReplayBackend()


@hookimpl
def ds_platform():
    return Wrong()


@hookimpl
def ds_ops(facts: Facts) -> list[Kernel]:
    op = BREAK[0]
    if not op:
        return []
    fn = "waits" if BREAK[1] == "waits" else f"wrong_{op}"
    formats = frozenset(FORMATS) if op in OWNING else frozenset()
    return [
        Kernel(
            OPS[op], f"{__name__}:{fn}", "provider-of-wrong", 99, formats=formats,
            layouts=LAYOUTS[OPS[op].layout], contract=OPS[op].version,
        )
    ]  # fmt: skip
