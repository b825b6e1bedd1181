"""The surface for plugins: everything that one may import; the rest of `ds_runtime` is private.

Importing this module imports no torch. What holds tensors is imported on first use, so that only
the modules of kernels pay for it. Contracts are named by `OPS`: read their Protocols, and the
executable form, the reference, in docs/contracts.md. For tests there is `ds_runtime.testing`.
A name in here stays for two versions of the plugin interface (`API_VERSION`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ds_runtime.assembly.plan import read_plan
from ds_runtime.common.hookimpl import hookimpl
from ds_runtime.config import EngineConfig
from ds_runtime.config.spelling import GIVEN, Spelling, nothing, refused
from ds_runtime.errors import CheckpointError, ConfigError, PluginError, UnsupportedError
from ds_runtime.ops import checks
from ds_runtime.ops.binding.branch import branch
from ds_runtime.ops.contract import (
    API_VERSION,
    FP4_KEYS,
    FP8_GROUPS,
    RANK_PLATFORM,
    RANK_PORTABLE,
    RANK_REFERENCE,
    RANK_SPECIALISED,
    Change,
    DeviceInfo,
    Dims,
    Encoding,
    Facts,
    Fixable,
    Gate,
    Gates,
    Kernel,
    Phase,
    QuantLoader,
    Refusal,
    Routing,
    gates,
    load_attr,
)
from ds_runtime.ops.contracts.caches import CacheGroup, Caches, HistoryGroup, StateGroup
from ds_runtime.ops.contracts.linear import Groups
from ds_runtime.ops.declare import Op
from ds_runtime.ops.kernel import (
    DENSE_EXPERTS,
    DENSE_ROWS,
    FP8_EXPERTS,
    FP8_ROWS,
    Compiles,
    Footprint,
    Layout,
    Promises,
    RowRange,
)
from ds_runtime.ops.provider import Declared, Provider
from ds_runtime.ops.table import OPS
from ds_runtime.parallel.torch_platform import TorchPlatform
from ds_runtime.platform import exports
from ds_runtime.platform.contract import (
    Ceilings,
    Communicator,
    GraphBackend,
    MemoryInfo,
    NormedSum,
    Platform,
)
from ds_runtime.platform.kv_transfer import (
    CacheBlocks,
    KvTransfer,
    Polled,
    Ticket,
    Transfer,
    TransferError,
)
from ds_runtime.platform.library import Library
from ds_runtime.platform.page_copies import Copying, LayerBlocks, PageCopies, TorchPageCopies
from ds_runtime.platform.probe import (
    DeviceError,
    device_nodes,
    exported_names,
    has_library,
    install_command,
    installed,
    package_folder,
    pci_devices,
    read_file,
    torch_built_for,
    visible,
)
from ds_runtime.plugins.hooks import plugin

if TYPE_CHECKING:
    from ds_runtime.ops.batch import (
        Batch,
        DecodePart,
        Limits,
        PrefillPart,
        PrefixChunk,
        RowOwners,
        Segments,
    )
    from ds_runtime.ops.dtypes import decode_scale, torch_dtype
    from ds_runtime.ops.reference.activation import silu_mul
    from ds_runtime.ops.reference.attention.dense import mha_joined, rows_of, seen_of, with_rope
    from ds_runtime.ops.reference.attention.rope import rotated
    from ds_runtime.ops.reference.matrices import fp8_blocks
    from ds_runtime.ops.reference.matrices.linear import (
        ReferenceLinear,
        float32_product,
        sums_in_float32,
    )
    from ds_runtime.ops.reference.matrices.moe import ReferenceExperts, route, with_shared_slots
    from ds_runtime.ops.weight import ExpertSource, MlaWeights, Packed, Weight, WeightPart
    from ds_runtime.parallel.group import TorchCommunicator
    from ds_runtime.platform import ceilings
    from ds_runtime.platform.compilations import compiled, kept_in
    from ds_runtime.platform.cores import cores_per_device
    from ds_runtime.platform.recording import CaptureError, Recorded, Recording
    from ds_runtime.plugins.routes import Generated, RoutedEngine
    from ds_runtime.sampling_params import SamplingParams
    from ds_runtime.weights.place import LoaderSample, PartRequest, Place
    from ds_runtime.weights.quant import read_part

_LAZY = {  # where what needs torch comes from, and what routes alone need
    "Batch": "ds_runtime.ops.batch",
    "CaptureError": "ds_runtime.platform.recording",
    "DecodePart": "ds_runtime.ops.batch",
    "ExpertSource": "ds_runtime.ops.weight",
    "Generated": "ds_runtime.plugins.routes",
    "Limits": "ds_runtime.ops.batch",
    "LoaderSample": "ds_runtime.weights.place",
    "MlaWeights": "ds_runtime.ops.weight",
    "Packed": "ds_runtime.ops.weight",
    "PartRequest": "ds_runtime.weights.place",
    "Place": "ds_runtime.weights.place",
    "PrefillPart": "ds_runtime.ops.batch",
    "PrefixChunk": "ds_runtime.ops.batch",
    "RowOwners": "ds_runtime.ops.batch",
    "Recorded": "ds_runtime.platform.recording",
    "Recording": "ds_runtime.platform.recording",
    "ReferenceExperts": "ds_runtime.ops.reference.matrices.moe",
    "ReferenceLinear": "ds_runtime.ops.reference.matrices.linear",
    "RoutedEngine": "ds_runtime.plugins.routes",
    "SamplingParams": "ds_runtime.sampling_params",
    "Segments": "ds_runtime.ops.batch",
    "TorchCommunicator": "ds_runtime.parallel.group",
    "Weight": "ds_runtime.ops.weight",
    "WeightPart": "ds_runtime.ops.weight",
    "ceilings": "ds_runtime.platform.ceilings",
    "compiled": "ds_runtime.platform.compilations",
    "cores_per_device": "ds_runtime.platform.cores",
    "decode_scale": "ds_runtime.ops.dtypes",
    "float32_product": "ds_runtime.ops.reference.matrices.linear",
    "fp8_blocks": "ds_runtime.ops.reference.matrices.fp8_blocks",
    "kept_in": "ds_runtime.platform.compilations",
    "mha_joined": "ds_runtime.ops.reference.attention.dense",
    "read_part": "ds_runtime.weights.quant",
    "rotated": "ds_runtime.ops.reference.attention.rope",
    "route": "ds_runtime.ops.reference.matrices.moe",
    "rows_of": "ds_runtime.ops.reference.attention.dense",
    "seen_of": "ds_runtime.ops.reference.attention.dense",
    "silu_mul": "ds_runtime.ops.reference.activation",
    "sums_in_float32": "ds_runtime.ops.reference.matrices.linear",
    "torch_dtype": "ds_runtime.ops.dtypes",
    "with_rope": "ds_runtime.ops.reference.attention.dense",
    "with_shared_slots": "ds_runtime.ops.reference.matrices.moe",
}
_MODULES = ("ceilings", "fp8_blocks")  # those that are modules themselves

__all__ = [
    "API_VERSION",
    "DENSE_EXPERTS",
    "DENSE_ROWS",
    "FP4_KEYS",
    "FP8_EXPERTS",
    "FP8_GROUPS",
    "FP8_ROWS",
    "GIVEN",
    "OPS",
    "RANK_PLATFORM",
    "RANK_PORTABLE",
    "RANK_REFERENCE",
    "RANK_SPECIALISED",
    "Batch",
    "CacheBlocks",
    "CacheGroup",
    "Caches",
    "CaptureError",
    "Ceilings",
    "Change",
    "CheckpointError",
    "Communicator",
    "Compiles",
    "ConfigError",
    "Copying",
    "Declared",
    "DecodePart",
    "DeviceError",
    "DeviceInfo",
    "Dims",
    "Encoding",
    "EngineConfig",
    "ExpertSource",
    "Facts",
    "Fixable",
    "Footprint",
    "Gate",
    "Gates",
    "Generated",
    "GraphBackend",
    "Groups",
    "HistoryGroup",
    "Kernel",
    "KvTransfer",
    "LayerBlocks",
    "Layout",
    "Library",
    "Limits",
    "LoaderSample",
    "MemoryInfo",
    "MlaWeights",
    "NormedSum",
    "Op",
    "Packed",
    "PageCopies",
    "PartRequest",
    "Phase",
    "Place",
    "Platform",
    "PluginError",
    "Polled",
    "PrefillPart",
    "PrefixChunk",
    "Promises",
    "Provider",
    "QuantLoader",
    "Recorded",
    "Recording",
    "ReferenceExperts",
    "ReferenceLinear",
    "Refusal",
    "RoutedEngine",
    "Routing",
    "RowOwners",
    "RowRange",
    "SamplingParams",
    "Segments",
    "Spelling",
    "StateGroup",
    "Ticket",
    "TorchCommunicator",
    "TorchPageCopies",
    "TorchPlatform",
    "Transfer",
    "TransferError",
    "UnsupportedError",
    "Weight",
    "WeightPart",
    "branch",
    "ceilings",
    "checks",
    "compiled",
    "cores_per_device",
    "decode_scale",
    "device_nodes",
    "exported_names",
    "exports",
    "float32_product",
    "fp8_blocks",
    "gates",
    "has_library",
    "hookimpl",
    "install_command",
    "installed",
    "kept_in",
    "load_attr",
    "mha_joined",
    "nothing",
    "package_folder",
    "pci_devices",
    "plugin",
    "read_file",
    "read_part",
    "read_plan",
    "refused",
    "rotated",
    "route",
    "rows_of",
    "seen_of",
    "silu_mul",
    "sums_in_float32",
    "torch_built_for",
    "torch_dtype",
    "visible",
    "with_rope",
    "with_shared_slots",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_LAZY[name])
    found = module if name in _MODULES else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
