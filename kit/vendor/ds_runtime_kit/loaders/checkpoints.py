"""Whole checkpoints in a plugin's own format, for tests that serve one."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from ds_runtime.checkpoint.hub import resolve_model
from ds_runtime.checkpoint.tensors import SINGLE
from ds_runtime.errors import UnsupportedError
from ds_runtime.ops.contract import QuantLoader, load_attr
from ds_runtime.ops.dtypes import torch_dtype
from ds_runtime.weights.quant import Quant
from ds_runtime_convert.run import copy_beside
from ds_runtime_convert.source import Source

_CONFIG = "config.json"


def write_checkpoint(loader: QuantLoader, folder: Path, source: str = "demo") -> Path:
    """Write a checkpoint (default: the demo model's) again, every Linear as its first sample is.

    Linears that the loader's encoding leaves dense are copied. Returns `folder`, for `--model`.
    Raises UnsupportedError if the loader gives no sample of a Linear that is to be stored.
    """
    held = Source(resolve_model(source))
    make = load_attr(loader.samples)
    values = {m: held.part(m).dequantise() for m in held.linears}
    first = next((s for m in values for s in make(values[m], m)), None)
    if first is None:
        raise UnsupportedError(f"loader {loader.full_name}: samples gives none for {source}")
    encoding_of = loader.encodings(first.quantization)
    tensors = {name: held.tensor(name) for name in held.others()}
    for module in held.linears:
        encoding = encoding_of(module)
        if encoding.format == "dense":
            dense = values[module].to(torch_dtype(held.config.dtype))
            tensors[f"{module}.weight"] = dense
            continue
        sample = next(iter(make(values[module], module)), None)
        if sample is None or sample.quantization != first.quantization:
            raise UnsupportedError(
                f"loader {loader.full_name}: samples gives none for {module}, which encodings "
                f"stores as {encoding.format}; let encodings leave it dense"
            )
        names = Quant.named(module, encoding)
        tensors |= {names[c]: t for c, t in sample.tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / SINGLE)
    copy_beside(held.folder, folder)
    raw = json.loads((held.folder / _CONFIG).read_text(encoding="utf-8"))
    raw["quantization_config"] = dict(first.quantization)
    (folder / _CONFIG).write_text(json.dumps(raw, indent=1), encoding="utf-8")
    held.checkpoint.close()
    return folder
