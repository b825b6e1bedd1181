"""What an op contract is made of. Torch-free, and it knows neither ops nor devices by name.

Used by everything that decides: `ops/<area>.py` (the contracts), plugins (their offers),
`ops/bind.py` (the decision). Kernels, references and samples are lazy `"module:attr"` strings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

API_VERSION = 1

RANK_REFERENCE = 0
RANK_PORTABLE = 10
RANK_PLATFORM = 20
RANK_SPECIALISED = 30

Phase = Literal["any", "prefill", "decode", "verify"]
RefusalKind = Literal["absent", "not installed", "unsupported", "broken"]


class Dims(Mapping[str, int]):
    """An immutable, hashable mapping of names to integers (model geometry)."""

    __slots__ = ("_items", "_map")

    def __init__(self, values: Mapping[str, int]) -> None:
        self._map = dict(sorted(values.items()))
        self._items = tuple(self._map.items())

    def __getitem__(self, key: str) -> int:
        return self._map[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._map)

    def __len__(self) -> int:
        return len(self._map)

    def __hash__(self) -> int:
        return hash(self._items)

    def __repr__(self) -> str:
        return f"Dims({self._map})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (Dims, (self._map,))


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device as a kernel may look at it. Memory in bytes.

    `type` is the torch device type string, `arch` a vendor's architecture name, `features` what
    the hardware or the installed software can do, `fast_dtypes` the dtypes with a fast matmul.
    """

    type: str
    name: str
    arch: str
    features: frozenset[str] = frozenset()
    fast_dtypes: frozenset[str] = frozenset({"float32"})
    memory: int = 0
    cores: int = 1


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why something cannot run here: a kind and a sentence, with the traceback if there is one.

    Only `broken` (installed, hardware there, but failing) stops a start.
    """

    kind: RefusalKind
    reason: str
    traceback: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything static that a kernel may look at; never a request. All dtypes are strings.

    The first block describes the process, the second one site (an op at a place in the model).
    `shape` is the logical [out, in] of this rank's weight, where the op owns one.
    """

    device: DeviceInfo
    dims: Dims
    dtype: str = "float32"
    kv_dtype: str = "float32"
    page_size: int = 16
    tp: int = 1
    deterministic: bool = False
    graph_capture: bool = False

    role: str = "target"
    layer: int = -1
    module: str = ""
    phase: Phase = "any"
    weight_format: str = ""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the model that needs an op: what the binder decides about."""

    op: str
    layer: int
    module: str
    phase: Phase = "any"
    weight_format: str = ""
    shape: tuple[int, ...] = ()
    role: str = "target"

    @property
    def path(self) -> str:
        """`layers.3.self_attn.o_proj`, or the bare module name outside the layers."""
        return f"layers.{self.layer}.{self.module}" if self.layer >= 0 else self.module


@dataclass(frozen=True, slots=True)
class Layout:
    """A byte layout that several kernels must agree on (e.g. of the KV cache).

    `allocate` is a lazy function; for the cache: `(num_pages, facts, device) -> Tensor`, for one
    layer. `bytes_per_token(facts)` is per layer.
    """

    name: str
    version: int
    allocate: str
    bytes_per_token: Callable[[Facts], int]
    page_sizes: tuple[int, ...] = ()  # empty: any

    @property
    def tag(self) -> str:
        return f"{self.name}.v{self.version}"


@dataclass(frozen=True, slots=True)
class Op:
    """A contract: semantics (reference), evidence (samples) and slack (tolerance).

    `protocol` names the typing.Protocol whose docstring is the contract. `kind` is "function"
    (`fn` is the callable) or "object" (`fn` is called with the site's Facts and returns the
    object). `composition` (fusions only) names a function `(ops, *args)` over smaller ops, which
    runs where no fused kernel is bound. `layout` names the shared layout that kernels of this op
    must agree on. `tolerance` is dtype → relative error bound: ‖out − oracle‖ / ‖oracle‖.
    """

    name: str
    protocol: str
    reference: str
    samples: str
    tolerance: Mapping[str, float]
    kind: Literal["function", "object"] = "function"
    version: int = 1
    heavy: bool = False
    composition: str = ""
    uses: tuple[str, ...] = ()
    taps: tuple[str, ...] = ()
    layout: str = ""
    summary: str = ""


def _accept(facts: Facts) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of one op, offered by one plugin.

    `fn` is lazy, `"module:attr"`. `refuse(facts)` returns None or a sentence. `formats` are the
    weight formats that `pack` reads (ops that own weights). `layouts` are the tags of the shared
    layouts that it reads or writes. What is not declared is refused (closed world).
    `numerics` names the row of the op's tolerance that applies where the arithmetic is coarser
    than the compute dtype (e.g. "fp8_w8a8"); empty: the compute dtype's row. `keeps` are the
    formats that stay packed in their own encoding (others are held in the compute dtype), and
    `copies` says how often `pack` keeps the weight (laid out for several uses): both are for the
    estimate of memory.
    """

    op: Op
    fn: str
    provider: str
    rank: int = RANK_PLATFORM
    refuse: Callable[[Facts], str | None] = _accept
    formats: frozenset[str] = frozenset()
    layouts: frozenset[str] = frozenset()
    phases: frozenset[str] = frozenset({"prefill", "decode"})
    deterministic: bool = True
    graph_safe: bool = True
    taps: frozenset[str] = frozenset()
    note: str = ""
    contract: int = 1
    source: str = ""
    numerics: str = ""
    keeps: frozenset[str] = frozenset()
    copies: int = 1

    @property
    def name(self) -> str:
        return f"{self.provider}.{self.fn.rsplit(':', 1)[-1]}"


@dataclass(frozen=True, slots=True)
class Change:
    """A plugin's wish to change one config field, with the reason that the log shows."""

    field: str
    value: Any
    because: str


@dataclass(frozen=True, slots=True)
class QuantLoader:
    """Reads one checkpoint quantisation format. Torch-free except through `read`.

    `accepts(quantization_config)` gets the dict of config.json, `{}` when there is none.
    `format_of(quantization_config, module)` gives the weight format string of one Linear.
    `refuse(quantization_config)` says which value it does not read where the format is its own,
    None where it is another's; it is asked once no loader accepts.
    `components` maps a weight format to the tensor suffixes that it reads from the checkpoint.
    `read` is a lazy function: see `ds_runtime.model.quant`.
    """

    name: str
    accepts: Callable[[Mapping[str, Any]], bool]
    format_of: Callable[[Mapping[str, Any], str], str]
    components: Mapping[str, tuple[str, ...]]
    read: str
    provider: str = ""
    refuse: Callable[[Mapping[str, Any]], str | None] | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """Who won an op at a site, and every refusal. `lost` are acceptable kernels of lower rank."""

    op: str
    site: Site
    kernel: str
    provider: str
    rank: int
    refused: tuple[tuple[str, str], ...] = ()
    lost: tuple[tuple[str, int], ...] = ()
    note: str = ""
    layout: str = ""
    contract: int = 1


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens choose experts: the router's constants, from config.json."""

    top_k: int
    num_experts: int
    n_group: int = 1
    topk_group: int = 1
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    method: Literal["greedy", "group_limited_greedy", "noaux_tc"] = "greedy"
    renormalize: bool = False
    scale: float = 1.0


def load_attr(path: str) -> Any:
    """Import `"module:attr"`."""
    module, _, attr = path.partition(":")
    return getattr(import_module(module), attr)


@dataclass(frozen=True, slots=True)
class Offers:
    """All that the plugins put on the table, in no particular order."""

    kernels: tuple[Kernel, ...] = ()
    layouts: tuple[Layout, ...] = ()
    quant_loaders: tuple[QuantLoader, ...] = ()
    third_party: frozenset[str] = field(default_factory=frozenset)  # providers outside the tree
