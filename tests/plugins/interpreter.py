"""Triton's interpreter with the conversions of hardware, and the device that it stands for.

The interpreter holds bfloat16 and fp8 as raw bits: it truncates where hardware rounds to nearest,
and `dot` multiplies the bits of bfloat16 as integers. `faithful` puts torch's conversions there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_runtime.ops.contract import DeviceInfo

WHY_NOT = ""
if not find_spec("triton"):
    WHY_NOT = "no Triton is installed; the dev extra brings it on Linux"
elif os.environ.get("TRITON_INTERPRET") != "1":
    WHY_NOT = "an accelerator is here: kernels are compiled for it (pytest -m gpu)"
needs_triton = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

# Tensors lie on the CPU; the features are those that the kernels ask for.
DEVICE = DeviceInfo(
    "cpu",
    "Triton's interpreter",
    "interpreter",
    features=frozenset({"triton"}),
    fast_dtypes=frozenset({"float32", "bfloat16", "float16", "float8_e4m3fn"}),
    cores=4,
)


def run_apart(checks: str) -> None:
    """Checks in a process of their own: with the interpreter, or compiled where a GPU is here."""
    done = subprocess.run(
        [sys.executable, "-c", checks],
        env={
            **os.environ,
            "TRITON_INTERPRET": "0" if torch.cuda.is_available() else "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def _torch_dtypes(tl: Any) -> dict[Any, torch.dtype]:
    return {
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float32: torch.float32,
        tl.float64: torch.float64,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
        tl.int8: torch.int8,
    }


@contextmanager
def patched_once() -> Iterator[None]:
    """Within, Triton's language is the interpreter's throughout.

    The interpreter looks through the whole language for what to replace at each launch, and again
    at each call of a device function, where nothing is left to do: a third of a kernel's time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, scopes = interpreter._patch_lang, {}
    np_dtype = interpreter._get_np_dtype  # it builds a table of all dtypes at each call
    known = cache(np_dtype)

    def once(fn: Any) -> Any:
        seen = {id(value) for value in fn.__globals__.values()}
        key = id(tl) in seen, id(tl.core) in seen
        if key not in scopes:
            scopes[key] = patch(fn)
        return interpreter._LangPatchScope()  # with nothing to restore

    def looked_up(kind: Any) -> np.dtype:
        kind = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return known(kind) if type(kind) is tl.dtype else np_dtype(kind)  # pointers have no hash

    tensor, block = tl.tensor.__init__, tl.block_type.__init__
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}  # of tensors, which never change theirs
    blocks: dict[tuple[int, ...], tuple[Any, int]] = {}

    def tensor_init(self: Any, handle: Any, kind: Any) -> None:
        key = tuple(kind.shape.values) if kind.is_block() else ()
        if key not in shapes:
            tensor(self, handle, kind)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = shapes[key]

    def block_init(self: Any, element: Any, shape: Any) -> None:
        key = tuple(int(getattr(n, "value", n)) for n in shape)
        if key not in blocks:
            block(self, element, shape)
            blocks[key] = self.shape, self.numel
        self.element_ty, (self.shape, self.numel) = element, blocks[key]
        self.name = f"<{key}, {element}>"

    interpreter._patch_lang, interpreter._get_np_dtype = once, looked_up
    tl.tensor.__init__, tl.block_type.__init__ = tensor_init, block_init
    try:
        yield
    finally:
        interpreter._patch_lang, interpreter._get_np_dtype = patch, np_dtype
        tl.tensor.__init__, tl.block_type.__init__ = tensor, block
        for scope in reversed(scopes.values()):
            scope.restore()


@contextmanager
def faithful() -> Iterator[None]:
    """Within, casts between floats round to nearest even, and `dot` reads bfloat16 as numbers."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    dtypes = _torch_dtypes(tl)
    cast = builder.cast_impl

    def as_torch(data: np.ndarray, dtype: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(data)).view(dtypes[dtype])

    def convert(self: Any, src: Any, dst_type: Any, *_: Any) -> Any:
        old, new = src.dtype.scalar, dst_type.scalar
        if old not in dtypes or new not in dtypes:
            return cast(self, src, dst_type)
        made = as_torch(src.data, old).reshape(np.shape(src.data)).to(dtypes[new])
        raw = {1: torch.uint8, 2: torch.uint16}.get(made.element_size())
        if new not in (tl.float16, tl.float32, tl.float64):
            made = made.view(raw)
        return handle(made.numpy(), new)

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right = (as_torch(t.data, t.dtype.scalar).to(torch.float32) for t in (a, b))
        product = torch.matmul(left, right).numpy().astype(d.data.dtype)
        return handle(product + d.data, d.dtype.scalar)

    names = ("create_fp_to_fp", "create_fp_ext", "create_fp_trunc", "create_dot")
    before = {name: getattr(builder, name) for name in names}
    for name in names[:3]:
        setattr(builder, name, convert)
    builder.create_dot = dot
    try:
        # Infinities are part of the contracts.
        with np.errstate(all="ignore"), patched_once():
            yield
    finally:
        for name, method in before.items():
            setattr(builder, name, method)
