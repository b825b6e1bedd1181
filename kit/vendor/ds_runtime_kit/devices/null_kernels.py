"""Kernels of the null platform: what every op gives back, filled with zeros.

Each is named after its op and follows from the op's declaration. Logits are the same junk in every
row; sampled tokens depend on the random number alone, so that they repeat with seed, choice and
position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ds_runtime.ops.contract import Facts, load_attr
from ds_runtime.ops.contracts.results import name_of
from ds_runtime.ops.contracts.work import ITEM_BYTES
from ds_runtime.ops.declare import Form, Op, called_as
from ds_runtime.ops.table import OPS
from ds_runtime.ops.weight import Packed


def allocate_null_pages(num_pages: int, facts: Facts, device: Any) -> Tensor:
    """[num_pages, page_size, 0, rope]: holds nothing, and knows what it would."""
    return torch.zeros(num_pages, facts.page_size, 0, facts.dims["qk_rope"], device=device)


def allocate_null_index(num_pages: int, facts: Facts, device: Any) -> Tensor:
    """[num_pages, page_size, 0] of the keys' dtype."""
    dtype = getattr(torch, facts.index_dtype)
    return torch.zeros(num_pages, facts.page_size, 0, dtype=dtype, device=device)


_DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)}


def _zeros(forms: Iterable[Form]) -> Any:
    made = [torch.zeros(shape, dtype=_DTYPES[dtype]) for shape, dtype in forms]
    return made[0] if len(made) == 1 else tuple(made)


def _seen(cache: Tensor) -> Any:
    """What results of a function may depend on beside its arguments, as a null cache has it."""
    return SimpleNamespace(
        dims={"qk_rope": cache.shape[-1]}, page_size=cache.shape[1], index_dtype=name_of(cache)
    )


def _function(op: Op) -> Callable[..., Any]:
    made, at = op.results.get(""), op.place("cache")
    if made is None:
        return lambda *args: None
    if at is None:
        return lambda *args: _zeros(made(None, *args))
    return lambda *args: _zeros(made(_seen(args[at]), *args))


def drawn(logits: Tensor, *settings: Tensor) -> Tensor:
    """The token at the last setting's, a random number's, way through the vocabulary."""
    return (settings[-1] * logits.shape[1]).to(torch.int64)


class Null:
    """An object: what it packs holds nothing, and it has the methods of its contract alone."""

    def __init__(self, op: Op, facts: Facts) -> None:
        self.tag = f"null.{op.name}"
        for name in op.parameters:
            made = op.results.get(name)
            own = partial(self._gives, made, facts) if made else partial(getattr(self, f"_{name}"))
            setattr(self, name, _signed(op, name, own))
        self._junk = None
        if facts.module == "lm_head":
            columns = torch.arange(facts.shape[0], dtype=torch.int64)
            self._junk = (columns * 2654435761 % 1009).to(torch.float32) / 1009

    def _pack(self, source: Any, facts: Facts) -> Packed:
        parts = ("num_experts", "hidden", "intermediate")
        found = getattr(source, "shape", None) or tuple(getattr(source, name) for name in parts)
        return Packed(self.tag, found, {}, 0)

    def _state(self, limits: Any) -> None: ...

    def _prepare(self, state: Any, batch: Any) -> None: ...

    def _gives(self, made: Callable[..., Iterable[Form]], facts: Facts, *args: Any) -> Any:
        if isinstance(args[-1], Packed):
            args[-1].expect(self.tag)
        if self._junk is not None:
            return self._junk.to(args[0].dtype).repeat(args[0].shape[0], 1)
        return _zeros(made(facts, *args))


def _signed(op: Op, method: str, made: Callable[..., Any]) -> Callable[..., Any]:
    """With the parameters that the contract names."""
    made.__signature__ = called_as(  # type: ignore[attr-defined]
        getattr(load_attr(op.protocol), method)
    )
    return made


_OWN: Mapping[str, Callable[..., Any]] = {"sample": drawn}  # where zeros would not do


def __getattr__(name: str) -> Any:
    """The kernel of the op of this name, made once."""
    if name not in OPS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    op = OPS[name]
    made: Any = partial(Null, op)
    if op.kind == "function":
        made = _signed(op, "__call__", _OWN.get(name) or _function(op))
    globals()[name] = made
    return made
