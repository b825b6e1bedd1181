"""What comes back from a call, by shape and dtype. Torch-free: dtypes are names."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from ds_runtime.ops.declare import Form

if TYPE_CHECKING:
    from torch import Tensor

    from ds_runtime.ops.contract import Facts


def form(x: Tensor) -> Form:
    """Of a tensor."""
    return tuple(x.shape), name_of(x)


def forms(values: Iterable[Any]) -> tuple[Form, ...]:
    """Of the tensors among these."""
    return tuple(form(value) for value in values if hasattr(value, "data_ptr"))


def said(forms: tuple[Form, ...]) -> str:
    """`[32, 512] bfloat16 and [32, 4] float32`."""
    each = (f"{list(shape)} {dtype}" for shape, dtype in forms)
    return " and ".join(each) or "nothing"


def name_of(x: Tensor) -> str:
    """Of its dtype."""
    return _name(x.dtype)


@cache
def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def codes(shape: tuple[int, ...], group: int) -> tuple[Form, Form]:
    """FP8 values and a scale for each group of a row."""
    return (shape, "float8_e4m3fn"), ((shape[0], shape[1] // group), "float32")


def half(x: Tensor) -> tuple[int, int]:
    """The shape of each half of all rows."""
    return x.shape[0], x.shape[1] // 2


def of_weight(facts: Facts, x: Tensor, dtype: str) -> tuple[Form]:
    """Of the weight of a place, by the rows of x."""
    return (((x.shape[0], facts.shape[0]), dtype),)


def of_heads(q: Tensor, width: int) -> tuple[Form]:
    """This many values per head of q."""
    return (((q.shape[0], q.shape[1], width), name_of(q)),)


def attended(q: Tensor, width: int) -> tuple[Form, Form]:
    """The same with log-sum-exp."""
    return *of_heads(q, width), (tuple(q.shape[:2]), "float32")


def gathered(segs: Any, rope: int, latent: int, dtype: Any) -> tuple[Form, Form]:
    """Latents and rotated keys of the tokens of segments."""
    rows, name = sum(segs.lens), _name(dtype)
    return ((rows, latent), name), ((rows, rope), name)
