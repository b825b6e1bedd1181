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
    formats, layouts, phases: any collection of texts. compiles: functions below the provider's
    package.

    note, contract, numerics, promises, rows, footprint: as in Kernel.
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
    """Makes the offers of one provider, and holds what its kernels share.

    * name: what pins call it.
    * package: the package of its modules, such as "ds_runtime_acme". `fn` begins below it.
    * gate: refuses other devices. It is asked first.
    * layouts: the tag of the layout that its kernels read or write, for each kind of `Op.layout`
      ("kv", "index"). The default has the layouts of the references.
    * phases: of its kernels, as in Kernel.
    * contracts: op → the version of its contract that the kernels are written for, if it is not 1.
    * numerics: weight format → the row of the tolerance for kernels of that format alone.
    * declared: further fields of `Kernel` that all offers have.
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
        """Returns the offer of a kernel for an op.

        * op: its name, as in contracts.
        * fn: "module:attr" of the kernel below the package.
        * rank: orders the kernels of an op. The highest that does not refuse is chosen.
        * each: gates after the provider's own.
        * declared: fields of `Kernel`, in place of what the provider has.

        Raises KeyError for an unknown op, TypeError for an unknown field.
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
