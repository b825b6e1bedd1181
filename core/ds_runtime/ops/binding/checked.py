"""Calls of bound kernels, each held against its contract's shapes and dtypes while somebody asks.

It costs a microsecond a call, so only first steps and captures run like this, and a step that has
failed does once more. The kernel that is at fault is named, not the one that meets its results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from traceback import walk_tb
from typing import Any, NamedTuple

from ds_runtime.errors import KernelError, blaming
from ds_runtime.ops.contract import Facts, Kernel, Site
from ds_runtime.ops.contracts.results import forms, said
from ds_runtime.ops.table import RESULTS

# Of kernels that are objects: those that RESULTS knows, and those that make something ready.
_METHODS = sorted({n.partition(".")[2] for n in RESULTS if "." in n} | {"pack", "state", "prepare"})


class Bound(NamedTuple):
    """A kernel at a site: `made` is the function, or the object; views: those that hold it."""

    kernel: Kernel
    site: Site
    facts: Facts
    made: Any
    views: Sequence[Any]
    plugin: str = ""

    def __str__(self) -> str:
        at = f"{self.kernel.op.name} at {self.site.path}"
        return f"kernel {self.kernel.name} of plugin {self.plugin}, {at}"

    def further(self) -> str:
        """The commands that look further, and that do without."""
        op, name = self.kernel.op.name, self.kernel.name
        return (
            f"ds-runtime conform {self.plugin} --op {op} --kernel {name} holds it against its "
            f"contract, ds-runtime plan --explain {op} lists others for --pin {op}=KERNEL"
        )


def checked(bound: Bound, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call with its results looked at. name: of the op, and of the method if it has any.

    Raises KernelError where the kernel fails, or gives back something else than it owes.
    """
    expects, further = RESULTS.get(name), bound.further()

    def run(*args: Any) -> Any:
        with blaming(lambda: f"{bound}, given {said(forms(args))},", further, KernelError):
            result = call(*args)
        if expects is not None:
            results = result if isinstance(result, tuple) else (result,)
            found = forms(results)
            expected = expects(bound.facts, *args)
            if found != expected:
                raise KernelError(
                    f"{bound}, gave {said(found)}, expected {said(expected)}; {further}"
                )
        return result

    return run


def suspect(kernels: Iterable[Bound], error: BaseException) -> str:
    """The kernel in whose code an error arose, by its traceback; "" if in none's."""
    objects, functions = dict[int, Bound](), dict[Any, Bound]()
    for bound in kernels:
        if bound.kernel.op.kind == "object":
            objects.setdefault(id(bound.made), bound)
        elif code := getattr(bound.made, "__code__", None):
            functions.setdefault(code, bound)
    found = ""
    for frame, _ in walk_tb(error.__traceback__):
        if (at := objects.get(id(frame.f_locals.get("self")))) is not None:
            found = f"in {at}; {at.further()}"
        elif (at := functions.get(frame.f_code)) is not None:  # at any place
            found = f"in {str(at).partition(' at ')[0]}; {at.further()}"
    return found


@contextmanager
def checking(kernels: Iterable[Bound]) -> Iterator[None]:
    """Within, calls of these kernels are checked."""
    undo: list[Callable[[], None]] = []
    try:
        for bound in kernels:
            kind = bound.kernel.op.kind
            undo += _functions(bound) if kind == "function" else _methods(bound)
        yield
    finally:
        for each in reversed(undo):
            each()


def _functions(bound: Bound) -> Iterator[Callable[[], None]]:
    name = bound.kernel.op.name
    for view in bound.views:
        plain = getattr(view, name)
        object.__setattr__(view, name, checked(bound, name, plain))
        yield partial(object.__setattr__, view, name, plain)


def _methods(bound: Bound) -> Iterator[Callable[[], None]]:
    """One object may be that of several places: it is then named at the first."""
    op, made = bound.kernel.op.name, bound.made
    for method in _METHODS:
        name = f"{op}.{method}"
        if method not in getattr(made, "__dict__", {method: None}) and hasattr(made, method):
            setattr(made, method, checked(bound, name, getattr(made, method)))
            yield partial(delattr, made, method)
