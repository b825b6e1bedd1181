"""What all kernels of one provider have in common, said once. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypedDict, Unpack

from ds_runtime.ops.contract import Gate, Kernel, gates
from ds_runtime.ops.kernel import Compiles, Footprint, Promises, RowRange
from ds_runtime.ops.table import OPS

PHASES = frozenset({"prefill", "decode", "verify"})
LAYOUTS = {"kv": "latent_pages.v1", "index": "index_pages.v1"}


class Declared(TypedDict, total=False):
    """Fields of `Kernel` that an offer may set in addition to op, function, rank and gates.

    The functions that `compiles` names lie below the provider's package.
    """

    formats: Collection[str]
    layouts: Collection[str]
    phases: Collection[str]
    note: str
    contract: int
    numerics: str
    promises: Promises
    rows: RowRange
    footprint: Footprint
    compiles: Compiles


_SETS = frozenset({"formats", "layouts", "phases"})


@dataclass(frozen=True, slots=True)
class Provider:
    """Makes the offers of one provider: a name that pins may use, and what its kernels share.

    `package`: of its modules, such as "ds_runtime_acme"; `fn` begins below it. `gate`: refuses
    other devices, and is asked first. `layouts`: the tag of the layout that kernels read or write,
    for each kind of `Op.layout` ("kv", "index"). `contracts`: the version of the contract that the
    kernels of an op are written for, where it is not 1. `numerics`: the row of the tolerance that
    applies to kernels made for one weight format alone, by that format. `declared`: further fields
    of `Kernel` that all of its offers have.
    """

    name: str
    package: str
    gate: Gate | None = None
    layouts: Mapping[str, str] = field(default_factory=lambda: LAYOUTS)
    phases: Collection[str] = PHASES
    contracts: Mapping[str, int] = field(default_factory=dict)
    numerics: Mapping[str, str] = field(default_factory=dict)
    declared: Declared = field(default_factory=Declared)

    def offer(
        self, op: str, fn: str, rank: int, *each: Gate, **declared: Unpack[Declared]
    ) -> Kernel:
        """Returns the offer of the kernel `fn`, "module:attr" below the package, for an op.

        `each`: gates after the provider's own. `declared`: fields of `Kernel`, instead of what the
        provider has. Raises KeyError for an unknown op, TypeError for an unknown field.
        """
        says: dict[str, Any] = {**self.declared, **declared}
        formats = frozenset(says.get("formats", ()))
        says.setdefault("phases", self.phases)
        says.setdefault("contract", self.contracts.get(op, 1))
        says.setdefault("layouts", {self.layouts[kind]} if (kind := OPS[op].layout) else ())
        if len(formats) == 1:
            says.setdefault("numerics", self.numerics.get(next(iter(formats)), ""))
        for name in says.keys() & _SETS:
            says[name] = frozenset(says[name])
        if isinstance(compiles := says.get("compiles"), Compiles):
            below = {n: f"{self.package}.{path}" for n, path in asdict(compiles).items() if path}
            says["compiles"] = Compiles(**below)
        refuse = gates(*((self.gate,) if self.gate else ()), *each)
        return Kernel(OPS[op], f"{self.package}.{fn}", self.name, rank, refuse, **says)
