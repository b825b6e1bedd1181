"""A quantization_config that was left next to weights that are not quantised. Torch-free.

Who converts a checkpoint back to 16 bits often keeps its config.json. Names and dtypes of the
tensors tell: they are all floats then, and none is a scale, a zero point or a code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ds_runtime.checkpoint.base import base_of
from ds_runtime.checkpoint.files import HEADER, LISTS, open_plain, read_object
from ds_runtime.errors import CheckpointError, shown

CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".prob_output_scale")  # of keys and values
# The names that `checkpoint/tensors.py` opens, which would load torch.
_INDEX = "model.safetensors.index.json"
_WHOLE = ("model.safetensors", "nextn_layer_parameters.safetensors")
_METHODS = ("fp8", "w8a8_int8", "blockwise_int8", "awq", "gptq", "compressed-tensors", "quark")
_KINDS = re.compile("modelopt|mxfp8|w4afp8")
_FLOATS = {"BF16", "F16", "F32", "F64"}
_SIGN = re.compile(r"scale|zero|qweight|g_idx|packed|shape|absmax|quant")
_UNREADABLE = (
    CheckpointError,
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
)


def left_over(folder: Path, quantization: Mapping[str, Any], beside: str) -> str:
    """A sentence on a config that describes no tensor of the folder; empty if it does, or if there
    are no tensors or none that can be read. beside: the key of the config of another file.
    """
    method = str(quantization.get("quant_method", "")).lower()
    known = method in _METHODS or _KINDS.search(method) is not None
    if not known and beside not in quantization and "quant_algo" not in quantization:
        return ""
    try:
        dtypes = _dtypes(folder)
    except _UNREADABLE:  # whoever opens the checkpoint complains
        return ""
    if not dtypes or not dtypes <= _FLOATS:
        return ""
    said = f"quant_method {shown(method)}" if method else beside
    return (
        f"{folder}: the quantization_config ({said}) is not used: all tensors are "
        f"{' or '.join(sorted(dtypes))} and none is a scale, so they are read as dense; remove it "
        "from config.json"
    )


def _dtypes(folder: Path) -> set[str]:
    """The dtypes of all tensors of a folder and of its base; none if one's name says that it is a
    part of a quantised weight."""
    base = base_of(folder)
    found: set[str] = set()
    for each in (folder,) if base is None else (folder, base):
        names, files = _listed(each)
        if not _plain(names):  # most often: no header is read twice
            return set()
        for file in files:
            tensors = {n: t for n, t in _header(file).items() if n != "__metadata__"}
            if not _plain(tensors):
                return set()
            found |= {str(t["dtype"]) for t in tensors.values()}
    return found


def _plain(names: Iterable[str]) -> bool:
    """Whether no name is that of a quantised weight's part."""
    own = (name for name in names if not name.endswith(CACHE_SCALES))
    return not any(_SIGN.search(name.rpartition(".")[2]) for name in own)


def _listed(folder: Path) -> tuple[Iterable[str], list[Path]]:
    """The names of tensors that an index lists, and the files of a folder."""
    index = folder / _INDEX
    if index.exists():
        where = read_object(index, LISTS)["weight_map"]
        return where, [folder / name for name in sorted(set(where.values()))]
    return (), [folder / name for name in _WHOLE if (folder / name).is_file()][:1]


def _header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file, unchecked."""
    with open_plain(file) as data:
        length = int.from_bytes(data.read(8), "little")
        found: dict[str, Any] = json.loads(data.read(min(length, HEADER)))
    return found
