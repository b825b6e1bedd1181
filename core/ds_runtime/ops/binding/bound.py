"""Decisions → functions: imports the chosen kernels and gives each place its own `Ops` view."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ds_runtime.errors import DsRuntimeError, PluginError, named
from ds_runtime.ops.binding.bind import Binding
from ds_runtime.ops.binding.by_rows import Shares
from ds_runtime.ops.binding.checked import Bound, checking, suspect
from ds_runtime.ops.binding.facts import site_facts
from ds_runtime.ops.contract import Facts, Kernel, Site, load_attr, load_kernel
from ds_runtime.ops.declare import Op, parameters_of
from ds_runtime.ops.table import OPS, Ops

if TYPE_CHECKING:
    from ds_runtime.ops.weight import Packed


_log = logging.getLogger(__name__)


@functools.cache
def _say_plain(kernel: str, shape: tuple[int, ...]) -> None:
    """Once for all weights alike."""
    size = " × ".join(map(str, shape))
    _log.warning("%s has no form for a weight of %s: others serve its calls", kernel, size)


class ByRows:
    """Kernels of one packing behind one contract: by the rows of a method's first argument, where
    the weight could be packed so that all of them read it. loaded: those of `shares.kernels`, in
    this order.
    """

    def __init__(self, shares: Shares, loaded: Sequence[Any]) -> None:
        op = shares.rest.op
        made = list(zip(shares.kernels, loaded, strict=True))
        self._rest = next(one for kernel, one in made if kernel is shares.rest)
        self._some = [(kernel, one) for kernel, one in made if kernel in shares.some]
        self._packing = shares.rest.rows.packing
        # `rest` holds its own form when it packs.
        beside = [(k, one) for k, one in self._some if k.footprint.second_form]
        self._holding = [(k, one) for k, one in beside if k is not shares.rest]
        for method, parameters in op.parameters.items():
            if method != "pack":
                at = parameters.index("packed")
                setattr(self, method, functools.partial(self._call, method, method, at))
        for protocol in map(load_attr, op.beside):
            for method, parameters in parameters_of(protocol).items():
                at = parameters.index("packed")
                setattr(self, method, functools.partial(self._call, method, "apply", at))

    def pack(self, *source: Any) -> Packed:
        """(weight or ExpertSource, facts)."""
        packed: Packed = self._rest.pack(*source)
        if packed.tag == self._packing:
            for kernel, one in self._holding:
                plain, packed = packed, one.hold_second_form(packed)
                if packed is plain:
                    _say_plain(kernel.name, tuple(packed.shape))
        return packed

    def _call(self, method: str, bounds: str, at: int, *args: Any) -> Any:
        """Of the kernel that serves so many rows, by the bounds of a method; None, of what a kernel
        need not have. at: which argument is the Packed."""
        rows = args[0] if isinstance(args[0], int) else args[0].shape[0]
        call = getattr(self._of(rows, args[at], bounds), method, None)
        return None if call is None else call(*args)

    def _of(self, rows: int, packed: Packed, method: str) -> Any:
        if packed.tag == self._packing:
            for kernel, loaded in self._some:
                asked = kernel.rows.holds(rows) and method in (kernel.rows.methods or (method,))
                if asked and (not kernel.footprint.second_form or loaded.serves(rows, packed)):
                    return loaded
        return self._rest


class _CallsByRows:
    """Functions behind one contract: by the rows of the first argument. places: of each of
    `shares.kernels`, in this order, what has its function under the op's name."""

    def __init__(self, op: str, shares: Shares, places: Sequence[Any]) -> None:
        made = list(zip(shares.kernels, places, strict=True))
        self._op = op
        self._rest = next(place for kernel, place in made if kernel is shares.rest)
        self._some = [(kernel, place) for kernel, place in made if kernel in shares.some]

    def __call__(self, *args: Any) -> Any:
        rows = args[0].shape[0]
        found = (place for kernel, place in self._some if kernel.rows.holds(rows))
        return getattr(next(found, self._rest), self._op)(*args)


class BoundOps:
    """The chosen kernels, imported: one frozen `Ops` view per (layer, module)."""

    def __init__(self, binding: Binding) -> None:
        self.binding = binding
        self.base = binding.base
        self.stateful: dict[str, Any] = {}  # state key → one object of that kernel
        self._state_keys: dict[tuple[str, int, str], str] = {}
        self._facts: dict[tuple[str, int, str], Facts] = {}
        self._bound: list[Bound] = []
        views: dict[tuple[int, str], list[Ops]] = {}
        bound: dict[tuple[int, str], dict[str, object]] = {}
        composed: list[tuple[Site, Op]] = []
        for site, kernel in binding.choices:
            if kernel is None and OPS[site.op].optional:
                continue
            key = (site.op, site.layer, site.module)
            self._facts[key] = site_facts(self.base, site, binding.entries)
            if kernel is None:
                composed.append((site, OPS[site.op]))
                continue
            place = bound.setdefault((site.layer, site.module), {})
            seen = views.setdefault((site.layer, site.module), [])
            if (shares := binding.shares.get(key)) is None:
                place[site.op] = made = self._load(kernel, key)
                self._bound.append(Bound(kernel, site, self._facts[key], made, seen))
            elif OPS[site.op].kind == "function":
                held = [SimpleNamespace(**{site.op: self._load(k, key)}) for k in shares.kernels]
                place[site.op] = _CallsByRows(site.op, shares, held)
                for each, where in zip(shares.kernels, held, strict=True):
                    made = getattr(where, site.op)
                    self._bound.append(Bound(each, site, self._facts[key], made, [where]))
            else:
                loaded = [self._load(each, key) for each in shares.kernels]
                place[site.op] = ByRows(shares, loaded)
                for each, made in zip(shares.kernels, loaded, strict=True):
                    self._bound.append(Bound(each, site, self._facts[key], made, seen))
        for site, op in reversed(composed):  # parts of a fusion come after it: bind them first
            place = bound.setdefault((site.layer, site.module), {})
            parts = Ops.of(place, site.path)
            views.setdefault((site.layer, site.module), []).append(parts)
            place[op.name] = functools.partial(load_attr(op.composition), parts)
        self._views = {
            (layer, module): Ops.of(place, f"layer {layer} {module}")
            for (layer, module), place in bound.items()
        }
        for at, view in self._views.items():
            views.setdefault(at, []).append(view)

    def _load(self, kernel: Kernel, key: tuple[str, int, str]) -> object:
        try:
            fn = load_kernel(kernel)
            if kernel.op.kind == "function":
                return fn
            made = fn(self._facts[key])  # an adapter imports its library here
        except (DsRuntimeError, KeyboardInterrupt):
            raise
        except BaseException as e:
            raise PluginError(
                f"kernel {kernel.name} ({kernel.fn}) cannot be loaded: {named(e)}; "
                f"--pin {kernel.op.name}=KERNEL selects another"
            ) from e
        if hasattr(made, "prepare"):
            state_key = f"{kernel.op.name}:{kernel.name}"
            self._state_keys[key] = state_key
            self.stateful.setdefault(state_key, made)
        return made

    def checking(self, owners: Mapping[str, str]) -> AbstractContextManager[None]:
        """Within, a kernel that fails, or gives back something else than its contract says, is
        named by a KernelError. owners: provider → plugin.
        """
        return checking(self._owned(owners))

    def suspect(self, owners: Mapping[str, str], error: BaseException) -> str:
        """The kernel in whose code an error arose, with its plugin; "" if in none's."""
        return suspect(self._owned(owners), error)

    def _owned(self, owners: Mapping[str, str]) -> Iterator[Bound]:
        return (b._replace(plugin=owners.get(p := b.kernel.provider, p)) for b in self._bound)

    def places(self) -> Iterator[tuple[Site, tuple[Kernel, ...], Facts]]:
        """Every place that has kernels, with these and its facts."""
        for site, kernel in self.binding.choices:
            key = (site.op, site.layer, site.module)
            shares = self.binding.shares.get(key)
            every = (kernel,) if shares is None else shares.kernels
            if bound := tuple(each for each in every if each is not None):
                yield site, bound, self._facts[key]

    def kernels(self) -> Iterator[tuple[Kernel, Facts]]:
        """Every kernel that is bound, with the facts of its place."""
        for _, every, facts in self.places():
            for kernel in every:
                yield kernel, facts

    def served(self, most: int) -> Iterator[tuple[Kernel, Facts, list[range]]]:
        """The same, with the rows, from 1 to `most`, of the calls that may be the kernel's there:
        of each range all, or none."""
        for site, every, facts in self.places():
            shares = self.binding.shares.get((site.op, site.layer, site.module))
            for kernel in every:
                alone = [range(1, most + 1)]
                yield kernel, facts, alone if shares is None else shares.rows_of(kernel, most)

    def at(self, layer: int, module: str) -> Ops:
        """The view of one place; layer −1 outside the layers."""
        return self._views[(layer, module)]

    def has(self, op: str, layer: int, module: str) -> bool:
        """Whether the model's sites include this one."""
        return (op, layer, module) in self._facts

    def facts(self, op: str, layer: int, module: str) -> Facts:
        """The facts of one site, for `pack`."""
        return self._facts[(op, layer, module)]

    def state_key(self, op: str, layer: int, module: str) -> str:
        """Which entry of `Batch.states` the kernel at this site reads."""
        return self._state_keys[(op, layer, module)]
