"""What a call did besides its results: what it wrote, kept, returned views of, or raised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ds_runtime.ops.reference.cases import Call
from ds_runtime_kit.checks.numerics import disagreement, storage_bytes


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """New tensors begin as NaN, so that what a kernel forgets to write is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)


def flat(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in shape, dtype and every bit."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def bits(tensor: Tensor) -> Tensor:
    if not tensor.numel():
        return torch.empty(tensor.shape)
    # dims of size 1 may have any stride, and be contiguous all the same
    whole = tensor.detach().clone(memory_format=torch.contiguous_format)
    return whole.view(torch.uint8)


def must_raise(function: Any, args: tuple[Any, ...], kind: type[Exception]) -> str:
    try:
        function(*args)
    except kind:
        return ""
    except Exception as e:
        return f"must raise {kind.__name__}, raises {type(e).__name__}: {e}"
    return f"must raise {kind.__name__}, and does not"


def watched(call: Call, args: tuple[Any, ...]) -> dict[int, Tensor]:
    allowed = {*call.written, *call.free}
    return {
        i: storage_bytes(a)
        for i, a in enumerate(args)
        if isinstance(a, Tensor) and i not in allowed
    }


def touched(before: dict[int, Tensor], args: tuple[Any, ...]) -> str:
    for i, content in before.items():
        if not torch.equal(content, storage_bytes(args[i])):
            return f"modifies its argument {i}"
    return ""


def plain_written(call: Call, args: tuple[Any, ...]) -> list[Tensor]:
    """The arguments written in place that are no caches; none of a call that was left out."""
    return [args[i] for i in call.written if args and isinstance(call.args[i], Tensor)]


def strayed(written: list[tuple[Tensor, Tensor, Tensor]]) -> str:
    """Whether more than the argument itself changed: each with the bytes around it and a copy from
    before.
    """
    for tensor, around, old in written:
        got = tensor.clone()
        tensor.copy_(old)
        same = torch.equal(storage_bytes(tensor), around)
        tensor.copy_(got)
        if not same:
            return "writes outside the argument that it was to write"
    return ""


def aliases(call: Call, args: tuple[Any, ...], results: list[Tensor]) -> str:
    own = {i for i in call.written if isinstance(call.args[i], Tensor)}  # that may be returned
    held = {
        a.untyped_storage().data_ptr(): i
        for i, a in enumerate(args)
        if isinstance(a, Tensor) and a.numel() and i not in call.free and i not in own
    }
    for r in results:
        if r.numel() and r.untyped_storage().data_ptr() in held:
            return f"returns a view of argument {held[r.untyped_storage().data_ptr()]}"
    return ""


def form_differs(got: Tensor, want: Tensor, contiguous: bool) -> str:
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)}, not {tuple(want.shape)}"
    if got.dtype != want.dtype:
        return f"dtype {got.dtype}, not {want.dtype}"
    return "not contiguous" if contiguous and not got.is_contiguous() else ""


def written_differs(
    before: Tensor, got: Tensor, want: Tensor, tolerance: float, what: str = "cache"
) -> str:
    """Rows that the oracle left alone must be bitwise as before, the others right."""
    old = before.to(torch.float64)
    kept = ((want == old) | (want.isnan() & old.isnan())).all(-1)
    if not torch.equal(bits(got[kept]), bits(before[kept])):
        return f"changes {what} rows that it was not asked to write"
    _, failure = disagreement(got[~kept], want[~kept], tolerance)
    return f"{what}: result 0: {failure}" if failure else ""
