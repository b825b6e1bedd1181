"""What an op contract is made of. Torch-free, and it knows neither ops nor devices by name.

Used by all that decides: `ops/contracts/`, plugins (their offers), `ops/binding/bind.py`.
Kernels, references and samples are lazy "module:attr" strings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from ds_runtime.ops.declare import Op
from ds_runtime.ops.kernel import Compiles, Footprint, Layout, Promises, RowRange, check_groups

API_VERSION = 1

RANK_REFERENCE = 0
RANK_PORTABLE = 10
RANK_PLATFORM = 20
RANK_SPECIALISED = 30

FP4_KEYS = "float4_e2m1fn_x2"  # of index keys: e2m1, a power of two for every 32 numbers
FP8_GROUPS = "fp8_groups"  # a kv_dtype: e4m3 latents with a scale per 128, keys in bfloat16

DRAFT = "draft"  # the role of the draft layer's places; others have "target"

Phase = Literal["any", "prefill", "decode", "verify", "tree"]
RefusalKind = Literal["absent", "not installed", "unsupported", "not allowed", "broken"]


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
    """One device as a kernel may look at it. Memory in bytes, its bandwidth in bytes per second (0:
    not known).

    `type` is the torch device type string, `arch` a vendor's architecture name, `features` what
    the hardware or the installed software can do, `fast_dtypes` the dtypes with a fast matmul.
    `family` is what people call all devices of its platform: `Platform.device_info` knows. `link`
    joins it to others of its host ("": not known); it receives `link_bandwidth` bytes per second
    (0: not known). `multicast`: one store may reach all of them.
    """

    type: str
    name: str
    arch: str
    features: frozenset[str] = frozenset()
    fast_dtypes: frozenset[str] = frozenset({"float32"})
    memory: int = 0
    cores: int = 1
    bandwidth: int = 0
    family: str = ""
    link: str = ""
    link_bandwidth: int = 0
    multicast: bool = False

    def __post_init__(self) -> None:
        if not self.family:
            object.__setattr__(self, "family", "CPUs" if self.type == "cpu" else self.type)


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
    `shape` is the logical [out, in] of this rank's weight, where the op owns one. `graph_capture`:
    calls are recorded and replayed with other contents of the same tensors. So a call may not wait
    for the device. What it launches may depend on shapes and limits, but on no length. `crowded`:
    ops whose second forms of weights (`Footprint.second_form`) find no room. `quantized`: weights
    of the checkpoint are, or are rounded when they are loaded. `compiled_rows`: rows of a call, at
    most, that torch.compile's functions serve; 0: none. `context`: tokens of a sequence at most; 0:
    not known. `ranks` of each mesh axis, on `hosts` machines; `interconnect`, `multicast`: of the
    device's link. `threads`: see `Platform.threads`. `batch_invariant`: see `own_bits`.
    """

    device: DeviceInfo
    dims: Dims
    dtype: str = "float32"
    kv_dtype: str = "float32"
    page_size: int = 16
    ranks: Dims = field(default=Dims({}))
    hosts: int = 1
    interconnect: str = "none"
    multicast: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    graph_capture: bool = False
    index_dtype: str = "float32"  # of the index cache, where attention is sparse
    crowded: frozenset[str] = frozenset()
    quantized: bool = False
    compiled_rows: int = 0
    context: int = 0
    threads: int = 1

    role: str = "target"
    layer: int = -1
    module: str = ""
    phase: Phase = "any"
    weight_format: str = ""
    shape: tuple[int, ...] = ()

    @property
    def own_bits(self) -> bool:
        """Whether a row has the same bits in any call. Drafts need not: they do not show."""
        return self.batch_invariant and self.role != DRAFT


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the model that needs an op: what the binder decides about.

    group: of the caches that the op reads or writes, where several have the layout of its op.
    captured: False outside the model's forward pass, which is what is captured. count: weights of
    this shape that the place owns. stored: the format of the weight in the checkpoint, where it is
    converted to `weight_format` while it is loaded. weights: names in the model of what the place
    is made from, one as often as all of it is read. Of routed experts at most the first, as each is
    read once. values: how many numbers it holds of all.
    """

    op: str
    layer: int
    module: str
    phase: Phase = "any"
    weight_format: str = ""
    shape: tuple[int, ...] = ()
    role: str = "target"
    group: str = ""
    captured: bool = True
    count: int = 1
    stored: str = ""
    weights: tuple[str, ...] = field(default=(), compare=False)
    values: int = field(default=0, compare=False)

    @property
    def is_captured(self) -> bool:
        """Whether a captured decode step runs the op here."""
        return self.captured and self.phase != "prefill"

    @property
    def path(self) -> str:
        """`layers.3.self_attn.o_proj`, or the bare module name outside the layers."""
        return f"layers.{self.layer}.{self.module}" if self.layer >= 0 else self.module


Gate = Callable[[Facts], "str | None"]


class Fixable(str):
    """A refusal that the user can undo; it reads "SAID: REMEDY".

    `Fixable("page size 16, takes 64", "pass --page-size 64")`.
    """

    __slots__ = ("remedy",)
    remedy: str

    def __new__(cls, said: str, remedy: str) -> Fixable:
        made = super().__new__(cls, f"{said}: {remedy}")
        made.remedy = remedy
        return made

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return self.removesuffix(f": {self.remedy}"), self.remedy


@dataclass(frozen=True, slots=True)
class Gates:
    """A kernel's `refuse` made of several gates: the first that refuses speaks.

    `plan --explain` asks each of them, so none may need that an earlier one accepted.
    """

    checks: tuple[Gate, ...]

    def __call__(self, facts: Facts) -> str | None:
        return next((said for check in self.checks if (said := check(facts)) is not None), None)


def gates(*checks: Gate) -> Gates:
    """One `refuse` of several gates, in this order; Gates among them are opened up."""
    parts = [part for c in checks for part in (c.checks if isinstance(c, Gates) else (c,))]
    return Gates(tuple(dict.fromkeys(parts)))


def _accept(facts: Facts) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of one op, offered by one plugin: `fn`, lazy, `"module:attr"`.

    `refuse(facts)`: None or a sentence; `gates` joins several. `formats` are the weight formats
    that `pack` reads (ops that own weights), `layouts` the tags of the shared layouts that it reads
    or writes. What is not declared is refused. `contract` is the version of the contract that it
    was written for. `numerics` names the row of the op's tolerance that applies where the
    arithmetic is coarser than the compute dtype (e.g. "fp8_w8a8"); empty: the compute dtype's row.
    `promises` says what holds in every call, and `rows` which calls it serves where several
    divide them. `footprint` says what it takes and reads of memory, `compiles` how calls compile.
    """

    op: Op
    fn: str
    provider: str
    rank: int = RANK_PLATFORM
    refuse: Gate = _accept
    formats: frozenset[str] = frozenset()
    layouts: frozenset[str] = frozenset()
    phases: frozenset[str] = frozenset({"prefill", "decode"})
    note: str = ""
    contract: int = 1
    numerics: str = ""
    promises: Promises = field(default_factory=Promises)
    rows: RowRange = field(default_factory=RowRange)
    footprint: Footprint = field(default_factory=Footprint)
    compiles: Compiles = field(default_factory=Compiles)

    def __post_init__(self) -> None:
        check_groups(self.name, promises=self.promises, rows=self.rows)
        check_groups(self.name, footprint=self.footprint, compiles=self.compiles)

    @property
    def name(self) -> str:
        return f"{self.provider}.{self.fn.rsplit(':', 1)[-1]}"

    @property
    def keeps(self) -> frozenset[str]:
        """The weight formats that stay packed in their own encoding (`Footprint.keeps`)."""
        if self.footprint.keeps is not None:
            return self.footprint.keeps
        return frozenset() if "dense" in self.formats else self.formats


@dataclass(frozen=True, slots=True)
class Change:
    """A plugin's wish to change one config field, with the reason that the log shows."""

    field: str
    value: Any
    because: str


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a checkpoint stores one Linear, as its config and the module's name say.

    format: the weight format (`ops/formats.py`, or a plugin's own) that reading it gives. layout:
    how its codes lie in the files; the core reads those of `weights/layouts.py`, any other is for
    the loader's own `read`. tensors: component of `WeightPart` → the tensor's name below the
    module; "../NAME" lies next to it. optional: components that may be missing. unread: tensors
    that may be there and say nothing. block: (rows, columns) that share a scale, 0 for all of
    them, where it is not the format's. divides: the global scales divide instead of multiplying.
    """

    format: str
    layout: str = "rows"
    tensors: Mapping[str, str] = field(default_factory=lambda: {"weight": "weight"})
    optional: frozenset[str] = frozenset()
    unread: tuple[str, ...] = ()
    block: tuple[int, int] | None = None
    divides: bool = False


DENSE = Encoding("dense")


@dataclass(frozen=True, slots=True)
class QuantLoader:
    """Reads one way to quantise checkpoints. Torch-free except through `read`.

    All get the quantization_config of config.json, `{}` when there is none, with the content of
    hf_quant_config.json under that name where there is such a file. `accepts` says whether it is
    this loader's. `encodings` parses it once and gives a function: path of a Linear → Encoding.
    `refuse` says which value it does not read where the format is its own, None where it is
    another's; it is asked once no loader accepts. `read` is a lazy function `(PartRequest) ->
    WeightPart`, by default `read_part`, which knows the core's layouts. `samples` is a lazy
    function `(values, module) -> Iterable[LoaderSample]` for conformance: a Linear of about these
    values [rows, cols] float32 at this path, stored in each way that the loader reads. Nothing for
    a shape or a module that the format does not have.
    """

    name: str
    accepts: Callable[[Mapping[str, Any]], bool]
    encodings: Callable[[Mapping[str, Any]], Callable[[str], Encoding]]
    read: str = "ds_runtime.weights.quant:read_part"
    provider: str = ""
    refuse: Callable[[Mapping[str, Any]], str | None] | None = None
    samples: str = ""

    @property
    def full_name(self) -> str:
        """As conformance and receipts name it: the provider's name in front."""
        return f"{self.provider}.{self.name}"


@dataclass(frozen=True, slots=True)
class Decision:
    """Who won an op at a site, and every refusal. `lost` are acceptable kernels of lower rank.

    converts: in what the weight is held because no kernel reads its own format, or the kernel does
    not keep it, and what that costs. instead: better ones that --batch-invariant alone keeps out.
    """

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
    converts: str = ""
    instead: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens choose experts: the router's constants, from config.json.

    shared: slots of shared experts after the routed ones, which every token takes.
    """

    top_k: int
    num_experts: int
    n_group: int = 1
    topk_group: int = 1
    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    method: Literal["greedy", "group_limited_greedy", "noaux_tc"] = "greedy"
    renormalize: bool = False
    scale: float = 1.0
    shared: int = 0


def load_attr(path: str) -> Any:
    """Import `"module:attr"`."""
    module, _, attr = path.partition(":")
    return getattr(import_module(module), attr)


def load_kernel(kernel: Kernel) -> Any:
    """Import a kernel's `fn`, as the present version of its op's contract has it."""
    made = load_attr(kernel.fn)
    return made if kernel.contract == kernel.op.version else load_attr(kernel.op.adapter)(made)


@dataclass(frozen=True, slots=True)
class Offers:
    """All that the plugins put on the table, in no particular order."""

    kernels: tuple[Kernel, ...] = ()
    layouts: tuple[Layout, ...] = ()
    quant_loaders: tuple[QuantLoader, ...] = ()
    third_party: frozenset[str] = field(default_factory=frozenset)  # providers outside the tree
