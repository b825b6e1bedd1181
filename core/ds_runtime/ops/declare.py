"""How an op is declared: once, next to its Protocol, as a typed field of its area. Torch-free.

A contract file ends in a class of its ops:

    class ActivationOps(Area):
        silu_mul: SiluMul = op(f"{_REF}:silu_mul", ...)

The field's name is the op's, its annotation the Protocol. `ops/table.py` joins the areas. Null
kernels, what `bench ops` measures and the cases of conformance follow from what is said here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from inspect import Signature, isfunction, signature
from typing import Any, Literal

Form = tuple[tuple[int, ...], str]  # a result's shape and dtype
Results = Callable[..., tuple[Form, ...]]


@dataclass(frozen=True, slots=True)
class OpWork:
    """Bytes and FLOPs of one call. weights, cached: bytes read of these; reads: of all else."""

    weights: float = 0.0
    reads: float = 0.0
    writes: float = 0.0
    flops: float = 0.0
    cached: float = 0.0

    @property
    def nbytes(self) -> float:
        """All bytes moved."""
        return self.weights + self.reads + self.writes + self.cached

    def __add__(self, other: OpWork) -> OpWork:
        return OpWork(
            self.weights + other.weights,
            self.reads + other.reads,
            self.writes + other.writes,
            self.flops + other.flops,
            self.cached + other.cached,
        )


@dataclass(frozen=True, slots=True)
class Cost:
    """How an op is timed, and what a call must move and compute.

    calls: by method, "" for a function: the arguments but for `packed` and `state`, made by a
    `TrueInputs` for a number of tokens. Also the work, of `Sizes`, for that number. step: the
    methods whose weights or cached tokens a decode step must read. source: what `pack` gets, where
    that is not one weight or a layer's experts. size: in words, what a token is where sites do not
    say it. by_width: rows have one width, which `Sizes` says. float32: computes in it whatever the
    dtype. chooses: of what a row sees; rows of a prompt are timed apart, as they see ever more.
    """

    calls: Mapping[str, tuple[Callable[..., tuple[Any, ...]], Callable[..., OpWork]]]
    step: tuple[str, ...] = ()
    source: Callable[..., Any] | None = None
    size: Callable[..., str] = field(default=lambda sizes: "")
    by_width: bool = False
    float32: bool = False
    chooses: bool = False

    def of_step(self, sizes: Any, tokens: int) -> OpWork:
        """Weights and cached tokens that a decode step must read. Activations are left out: they
        stay in caches between the ops of a step."""
        whole = [self.calls[method][1](sizes, tokens) for method in self.step]
        return OpWork(
            sum(w.weights for w in whole),
            flops=sum(w.flops for w in whole),
            cached=sum(w.cached for w in whole),
        )


class _Later:
    """A module that is imported when something of it is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


def later(name: str) -> Any:
    """Stands for the module in a contract file: what decides imports these without torch."""
    return _Later(name)


@dataclass(frozen=True, slots=True)
class Op:
    """A contract: semantics (reference), evidence (samples) and slack (tolerance). A plugin reads
    these fields. It never makes an Op.

    Of every op:

    * name: what offers and pins call it. summary: a line for plans.
    * protocol: names the typing.Protocol whose docstring is the contract.
    * kind: "function": a kernel's `fn` is the callable. "object": `fn` is called with the site's
      Facts and returns the object.
    * parameters: method → names of its arguments, "" for a function. The same keys are in the
      mappings below.
    * version: of the contract. adapter: names a function that makes a kernel of the version before
      serve this one. Empty: that version is not served.
    * heavy: on its reference it costs much of a step.
    * owns_weights: it has `pack`. beside: Protocols of methods that an object may have in addition.
    * layout: the kind of layout that its kernels must agree on. chooses: the best of them that
      agrees with all others chooses it.

    For conformance:

    * reference: names the torch form. samples: names a generator `(facts) -> Iterator[Case]`, by
      default `NAME_samples` next to the Protocol.
    * tolerance: dtype → relative error bound, ‖out − oracle‖ / ‖oracle‖.
    * judge: `(args, got, want, tolerance) -> (error, what is wrong or "")`, if the contract leaves
      more freedom than that.
    * defined: `(args, result) -> result` without what the contract leaves undefined.
    * results: shapes and dtypes of what comes back, from the facts of the place and the arguments.
      Without an entry nothing does. contiguous: what comes back is. writes: arguments that are
      written in place.
    * rows: which arguments have a row per token. among: the one whose rows others read, too. A call
      which has it is not taken apart. by_sequence: calls are taken apart by sequences. own_rows:
      equal rows give equal results whatever else is in the batch.
    * absent: ids may be −1, of experts that other ranks have. sized: samples have the widths of the
      model's heads and latent.
    * cost: what a call moves and computes, and how it is timed.

    Of a fusion:

    * uses: the smaller ops. composition: names a function `(ops, *args)` over these, which runs if
      no fused kernel is bound.
    * optional: without an offer the model itself computes it by `uses`, at their own sites, and has
      no site for it.

    Of the reference:

    * waits: it reads the device to decide what to do. plain: it sums no rows, so that a row's bits
      are its own. compiles: it is worth torch.compile for few rows.
    """

    reference: str
    tolerance: Mapping[str, float]
    summary: str
    results: Mapping[str, Results] = field(default_factory=dict)
    rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    samples: str = ""
    judge: Callable[..., tuple[float, str]] | None = None
    defined: Callable[..., Any] | None = None
    by_sequence: bool = False
    among: int = -1
    own_rows: bool = False
    cost: Cost | None = None
    writes: tuple[str, ...] = ()
    contiguous: bool = False
    version: int = 1
    adapter: str = ""
    heavy: bool = False
    composition: str = ""
    optional: bool = False
    uses: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    layout: str = ""
    chooses: bool = False
    sized: bool = False
    waits: bool = False
    plain: bool = False
    absent: bool = False
    compiles: bool = False
    name: str = ""
    protocol: str = ""
    kind: Literal["function", "object"] = "function"
    owns_weights: bool = False
    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def served(self) -> tuple[int, ...]:
        """The versions of the contract whose kernels can serve, newest first."""
        return (self.version, self.version - 1) if self.adapter else (self.version,)

    def place(self, parameter: str) -> int | None:
        """Which argument of a function has this name, if one does."""
        names = self.parameters.get("", ())
        return names.index(parameter) if parameter in names else None


op: Callable[..., Any] = Op  # what a field's value is; its type is the Protocol


class Area:
    """The ops of a contract file, each a field: `name: Protocol = op(...)`."""

    def __init_subclass__(cls) -> None:
        for name, protocol in vars(cls).get("__annotations__", {}).items():
            module = sys.modules[cls.__module__]
            setattr(cls, name, _named(vars(cls)[name], name, vars(module)[protocol]))


def _named(said: Op, name: str, protocol: type) -> Op:
    at, parameters = protocol.__module__, parameters_of(protocol)
    return replace(
        said,
        name=name,
        protocol=f"{at}:{protocol.__name__}",
        kind="function" if "" in parameters else "object",
        samples=said.samples or f"{at}:{name}_samples",
        owns_weights="pack" in parameters,
        parameters=parameters,
    )


def parameters_of(protocol: type) -> dict[str, tuple[str, ...]]:
    """Names of the parameters of its methods, without self; "" stands for a call of itself."""
    methods = {n: m for n, m in vars(protocol).items() if isfunction(m)}
    calls = {n: m for n, m in methods.items() if n == "__call__" or n[0] != "_"}
    return {n.replace("__call__", ""): tuple(called_as(m).parameters) for n, m in calls.items()}


def called_as(method: Callable[..., Any]) -> Signature:
    """The signature of a Protocol's method as its caller sees it, without self."""
    whole = signature(method)
    return whole.replace(parameters=tuple(whole.parameters.values())[1:])
