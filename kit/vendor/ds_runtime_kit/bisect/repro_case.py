"""A case as one file: inputs, facts, versions and what was found, to be replayed anywhere.

Only tensors, numbers, strings and lists are stored, so that reading a file of another's runs no
code of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_runtime.errors import ConfigError, unreadable, unwritable
from ds_runtime.ops.batch import Batch, DecodePart, Limits, PrefillPart, PrefixChunk, Segments
from ds_runtime.ops.contract import DeviceInfo, Dims, Facts, Routing
from ds_runtime.ops.reference.cases import Call, Case, PagedCache, SampleExperts, Saved
from ds_runtime.ops.weight import Weight, WeightPart

FORMAT = 1
_CLASSES: Mapping[str, type] = {
    c.__name__: c
    for c in (
        *(Batch, DecodePart, Limits, PrefillPart, PrefixChunk, Segments),
        *(Call, Case, PagedCache, Saved, DeviceInfo, Facts, Routing, Weight, WeightPart),
    )
}


@dataclass(frozen=True)
class Capsule:
    """One case of one kernel. said: what was wrong with it where it was recorded."""

    op: str
    kernel: str
    case: Case
    said: str = ""
    where: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)


def save(capsule: Capsule, path: Path) -> None:
    """Write it. Raises ConfigError if that fails."""
    data = {
        "format": FORMAT,
        "op": capsule.op,
        "kernel": capsule.kernel,
        "said": capsule.said,
        "where": capsule.where,
        "versions": dict(capsule.versions),
        "case": _plain(capsule.case),
    }
    try:
        torch.save(data, path)
    except (OSError, RuntimeError) as e:
        raise unwritable(f"case {path}", e, "a file in a folder that is yours") from e


def load(path: Path) -> Capsule:
    """Read it. Raises ConfigError for a file that is none."""
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
        if data["format"] != FORMAT:
            raise ConfigError(
                f"--case {path}: has format {_shown(data['format'])}, and this runtime reads "
                f"{FORMAT}: record it again with ds-runtime bisect"
            )
        names = {f.name for f in fields(Capsule)}
        values = {name: data[name] for name in names}
        return Capsule(**{**values, "case": _restored(data["case"])})
    except ConfigError:
        raise
    except OSError as e:
        raise unreadable(f"--case {path}", e, "a case that ds-runtime bisect wrote") from e
    except Exception as e:  # whatever the bytes are; torch's words advise to trust the file
        raise ConfigError(
            f"--case {path}: is no case that ds-runtime bisect wrote ({type(e).__name__})"
        ) from e


def _shown(value: Any) -> str:
    """A value of a file that may hold anything."""
    return repr(value) if isinstance(value, int | str) and len(repr(value)) < 40 else "unknown"


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"is": "tensor", **_tensor(value)}
    if isinstance(value, SampleExperts):
        return {"is": "experts", "experts": [_plain(e) for e in value.experts]}
    if isinstance(value, torch.dtype):
        return {"is": "dtype", "name": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"is": "device", "name": value.type}
    if isinstance(value, type):
        raise TypeError(f"{value} cannot be stored: record no call that must raise")
    if isinstance(value, Dims):
        return {"is": "dims", "items": dict(value)}
    if is_dataclass(value):
        kind = type(value).__name__
        assert kind in _CLASSES, kind
        held = {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
        return {"is": kind, "fields": held}
    if isinstance(value, Mapping):
        return {"is": "dict", "items": {k: _plain(v) for k, v in value.items()}}
    if isinstance(value, frozenset):
        return {"is": "set", "items": sorted(value)}
    if isinstance(value, tuple | list):
        return {"is": "tuple", "items": [_plain(v) for v in value]}
    assert value is None or isinstance(value, bool | int | float | str), type(value)
    return value


def _tensor(value: Tensor) -> dict[str, Any]:
    """Values with shape and strides; what lies outside is left behind, gaps within are kept."""
    value = value.detach().cpu()
    if value.is_contiguous() or not value.numel():
        return {"data": value.contiguous().clone(), "shape": None}
    steps = zip(value.shape, value.stride(), strict=True)
    extent = 1 + sum((n - 1) * stride for n, stride in steps)
    flat = value.as_strided((extent,), (1,)).clone()
    return {"data": flat, "shape": list(value.shape), "stride": list(value.stride())}


def _restored(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kind = value["is"]
    if kind == "tensor":
        data: Tensor = value["data"]
        plain = value["shape"] is None
        return data if plain else data.as_strided(value["shape"], value["stride"])
    if kind == "experts":
        return SampleExperts([_restored(e) for e in value["experts"]])
    if kind == "dtype":
        return getattr(torch, value["name"])
    if kind == "device":
        return torch.device(value["name"])
    if kind == "dims":
        return Dims(value["items"])
    if kind == "dict":
        return {k: _restored(v) for k, v in value["items"].items()}
    if kind == "set":
        return frozenset(value["items"])
    if kind == "tuple":
        return tuple(_restored(v) for v in value["items"])
    return _CLASSES[kind](**{k: _restored(v) for k, v in value["fields"].items()})
