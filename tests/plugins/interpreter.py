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
from dataclasses import replace
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
    """Within, Triton's language is the interpreter's throughout, and costs less.

    The interpreter looks through the whole language for what to replace at each launch, and again
    at each call of a device function, where nothing is left to do. It computes integers a second
    time, for an assertion that only its debug mode makes. All this is most of a kernel's time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, scopes, patched = interpreter._patch_lang, {}, {}
    np_dtype = interpreter._get_np_dtype  # it builds a table of all dtypes at each call
    known = cache(np_dtype)

    def once(fn: Any) -> Any:
        if fn not in patched:  # a function's module has its language from the start
            seen = {id(value) for value in fn.__globals__.values()}
            key = id(tl) in seen, id(tl.core) in seen
            if key not in scopes:
                scopes[key] = patch(fn)
            patched[fn] = interpreter._LangPatchScope()  # with nothing to restore
        return patched[fn]

    def looked_up(kind: Any) -> np.dtype:
        kind = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return known(kind) if type(kind) is tl.dtype else np_dtype(kind)  # pointers have no hash

    def attribute(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        def called(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
            return member(*args, **kwargs, _semantic=semantic)

        scope.set_attr(obj, name, called)

    tensor, block = tl.tensor.__init__, tl.block_type.__init__
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}  # of tensors, which never change theirs
    blocks: dict[tuple[int, ...], tuple[Any, int, dict[str, str]]] = {}
    keys: dict[int, tuple[int, ...]] = {}  # of the shapes in `blocks`, by their identity

    def tensor_init(self: Any, handle: Any, kind: Any) -> None:
        key = tuple(kind.shape.values) if kind.is_block() else ()
        if key not in shapes:
            tensor(self, handle, kind)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = shapes[key]

    def block_init(self: Any, element: Any, shape: Any) -> None:
        key = keys.get(id(shape))
        if key is None:
            key = tuple(int(getattr(n, "value", n)) for n in shape)
            if key not in blocks:
                block(self, element, shape)
                blocks[key] = self.shape, self.numel, {}
                keys[id(self.shape)] = key
        self.element_ty, (self.shape, self.numel, names) = element, blocks[key]
        if element.name not in names:
            names[element.name] = f"<{key}, {element}>"
        self.name = names[element.name]

    semantic = interpreter.interpreter_semantic
    kinds = frozenset((*tl.dtype.SINT_TYPES, *tl.dtype.UINT_TYPES))
    checked, settled = semantic.binary_op_type_checking_impl, kinds | {"fp32"}

    def operands(lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        """Two of one shape and one dtype that no operation widens stay as they are."""
        if type(lhs) is tl.tensor and type(rhs) is tl.tensor and lhs.shape is rhs.shape:
            name = lhs.dtype.name
            if name == rhs.dtype.name and name in settled:
                return lhs, rhs
        return checked(lhs, rhs, *args, **kwargs)

    broadcast = semantic.broadcast_impl_value

    def alike(lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(lhs, rhs)

    with pytest.MonkeyPatch.context() as at:
        at.setattr(interpreter, "_patch_lang", once)
        at.setattr(interpreter, "_patch_attr", attribute)
        at.setattr(interpreter, "_get_np_dtype", looked_up)
        at.setattr(tl.tensor, "__init__", tensor_init)
        at.setattr(tl.block_type, "__init__", block_init)
        at.setattr(tl.dtype, "is_int", lambda self: self.name in kinds)
        at.setattr(semantic, "binary_op_type_checking_impl", operands)
        at.setattr(semantic, "broadcast_impl_value", alike)
        options = semantic.builder.options
        asserts = replace(options, sanitize_overflow=options.sanitize_overflow and options.debug)
        at.setattr(semantic.builder, "options", asserts)
        try:
            yield
        finally:
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
