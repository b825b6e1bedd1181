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
    """One device as a kernel may look at it. A number of bytes per second that is not known is 0.

    type: the torch device type. name: what plans print. arch: the vendor's name of the
    architecture. features: what the hardware or the installed software can do. fast_dtypes: those
    with a fast matmul. memory: bytes. cores: those of a CPU, or a GPU's multiprocessors. bandwidth:
    of its memory, in bytes per second. family: what people call devices of its platform. link:
    joins it to others of its host; "": not known. link_bandwidth: bytes per second that it receives
    by the link. multicast: one store may reach all devices of the link.
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
    """Why something cannot run here: a kind, a reason and, if there is one, a traceback.

    `absent`: no such hardware. `not installed`: a package is missing. `unsupported`: too old, too
    new, not implemented. `not allowed`: the plugin may not be loaded here. `broken`: installed and
    there, but failing; only this kind stops a start.
    """

    kind: RefusalKind
    reason: str
    traceback: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything static that a kernel may look at; never a request. All dtypes are texts.

    The first block describes the process. dims: see below. dtype: the compute dtype. kv_dtype: of
    the KV cache. index_dtype: of the index cache, if attention is sparse. page_size: entries of a
    block of the site's cache. ranks: the size of each mesh axis. hosts: machines that have them.
    threads: of the host, as `Platform.threads` returns them. interconnect, multicast: as
    DeviceInfo's link and multicast. deterministic: results need the same bits in every run.
    batch_invariant: the user wants rows with bits of their own; kernels look at `own_bits`.
    graph_capture: calls are recorded and replayed with other contents of the same tensors. So a
    call may not wait for the device. What it launches may depend on shapes and limits, but on no
    length. crowded: ops whose second forms of weights (`Footprint.second_form`) find no room.
    quantized: weights of the checkpoint are, or are rounded when they are loaded. compiled_rows:
    rows of a call, at most, that torch.compile's functions serve; 0: none. context: tokens of a
    sequence at most; 0: not known.

    The second block describes a site. role: "target", or "draft" for the layer that drafts. layer:
    its number, −1 outside the layers. module: its path in the layer, such as "mlp.down_proj".
    phase: the kind of step, "any" if all run it. weight_format: that of the weight, if the op owns
    one. shape: of this rank's weight, [out, in], or (experts, width, hidden) of `experts`.

    Names in dims: hidden, layers, heads, q_lora (0: none), kv_lora, qk_nope, qk_rope, v,
    intermediate, moe_intermediate, experts, top_k, vocab. Sparse attention adds index_heads,
    index_dim, index_topk; DeepSeek-V4 adds window, o_groups, o_lora, streams. Heads, o_groups and
    intermediate widths are one rank's, all else is the model's.
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
    """A refusal that the user can undo. `Fixable("page size 16, takes 64", "pass --page-size 64")`
    reads "page size 16, takes 64: pass --page-size 64"; `remedy` is the second text.
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
    """A kernel's `refuse` made of several gates, `checks`: the first that refuses speaks. `plan
    --explain` asks each of them, so none may need that an earlier one accepted.
    """

    checks: tuple[Gate, ...]

    def __call__(self, facts: Facts) -> str | None:
        return next((said for check in self.checks if (said := check(facts)) is not None), None)


def gates(*checks: Gate) -> Gates:
    """Returns one `refuse` of these gates, in their order. Gates among `checks` are opened up."""
    parts = [part for c in checks for part in (c.checks if isinstance(c, Gates) else (c,))]
    return Gates(tuple(dict.fromkeys(parts)))


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of one op. What it does not declare is refused.

    op: the contract. fn: lazy "module:attr" of the function, or of what makes the object from
    Facts. provider: who offers it. rank: the highest that does not refuse is chosen. refuse:
    `(facts) -> str | None`, a sentence or None. formats: weight formats that `pack` reads, if the
    op owns weights. layouts: tags of the shared layouts that it reads or writes. phases: those that
    it serves; sites of all phases do not ask. note: a remark for the plan. contract: the version of
    the contract that it was written for. numerics: the row of the op's tolerance, such as
    "fp8_w8a8", if the arithmetic is coarser than the compute dtype; empty: the compute dtype's row.
    promises: what holds in every call. rows: the calls that it serves, if several divide them.
    footprint: what it takes and reads of memory. compiles: how calls compile.
    """

    op: Op
    fn: str
    provider: str
    rank: int = RANK_PLATFORM
    refuse: Gate = Gates(())
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
        """PROVIDER.ATTR, as pins and plans name it."""
        return f"{self.provider}.{self.fn.rsplit(':', 1)[-1]}"

    @property
    def keeps(self) -> frozenset[str]:
        """The weight formats that stay packed in their own encoding (`Footprint.keeps`)."""
        if self.footprint.keeps is not None:
            return self.footprint.keeps
        return frozenset() if "dense" in self.formats else self.formats


@dataclass(frozen=True, slots=True)
class Change:
    """A plugin's wish. field: of EngineConfig. value: its new value. because: shown by the log."""

    field: str
    value: Any
    because: str


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a checkpoint stores one Linear, as its config and the module's name say.

    format: the canonical weight format that reading returns (docs/formats.md), or a plugin's own.
    layout: how its codes lie in the files. The core reads those of `weights/layouts.py`; any other
    is for the loader's own `read`. tensors: component of `WeightPart` → the tensor's name below the
    module; "../NAME" lies next to it. optional: components that may be missing. unread: tensors
    that may be there and say nothing. block: (rows, columns) that share a scale, 0 for all of them,
    if it is not the format's. divides: the global scales divide instead of multiplying.
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
    """Reads one way to quantise checkpoints. Torch-free except through `read` and `samples`.

    Its functions get the quantization_config of config.json, `{}` if there is none. It has the
    content of hf_quant_config.json under that name, if there is such a file.

    name: of the format. accepts: whether the config is this loader's. encodings: parses it once and
    returns a function, path of a Linear → Encoding. read: lazy `(PartRequest) -> WeightPart`; the
    default knows the core's layouts. provider: as Kernel's. refuse: which value it does not read,
    if the format is its own, else None. It is asked if no loader accepts. samples: lazy `(values,
    module) -> Iterable[LoaderSample]` for conformance: a Linear of about these values [rows, cols]
    float32 at this path, in each way that the loader reads. It yields nothing for a shape or module
    that the format does not have.
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
class Routing:
    """How tokens choose experts: the router's constants, from config.json. `route` says what they
    do.

    top_k: experts of a token. num_experts: of a layer, those of all ranks. n_group: groups of
    experts. topk_group: groups that a token may choose from. scoring: logits → scores. method: how
    the best are found. renormalize: weights of a token sum to 1 before `scale`. scale: weights are
    multiplied by it. shared: slots of shared experts after the routed ones, which every token
    takes.
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
    """Returns what the lazy `path`, "module:attr", names; imports the module."""
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
