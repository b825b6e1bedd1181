"""Does the checkpoint hold what the model needs, and nothing that it would silently ignore?"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ds_runtime.errors import CheckpointError
from ds_runtime.model.checkpoint import Checkpoint
from ds_runtime.model.config import ModelConfig
from ds_runtime.model.manifest import Stored
from ds_runtime.model.quant import Place, Quant, check_component, expected

_SHOWN = 4
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_DRAFT = re.compile(r"model\.layers\.(\d+)\.eh_proj\.")  # only a layer that drafts has it


def check_checkpoint(
    checkpoint: Checkpoint, config: ModelConfig, quant: Quant, modules: Mapping[str, Stored]
) -> dict[str, Place]:
    """The place of every module. Raises CheckpointError that names missing, unexpected or wrong
    tensors, the first few of each with their number.
    """
    places = {m: quant.place(checkpoint, stored) for m, stored in modules.items()}
    needed = {name for place in places.values() for name in place.names}
    missing = [n for p in places.values() for n in p.names if n not in checkpoint]
    if missing:
        raise CheckpointError(
            f"{checkpoint.folder}: {_some(missing)} missing; config.json asks for "
            f"{config.layers} layers and {config.experts} experts: is the download complete?"
        )
    drafts = {m[1] for n in checkpoint.names if (m := _DRAFT.match(n)) is not None}
    extra = [n for n in checkpoint.names if n not in needed and not _ignorable(n, config, drafts)]
    if extra:
        raise CheckpointError(
            f"{checkpoint.folder}: {_some(extra)} not expected; config.json and "
            "its quantization_config describe another model than these weights"
        )
    wrong = [
        w for m, stored in modules.items() for w in _wrong(checkpoint, quant, stored, places[m])
    ]
    if wrong:
        more = f" (and {len(wrong) - _SHOWN} more)" if len(wrong) > _SHOWN else ""
        raise CheckpointError(f"{checkpoint.folder}: {'; '.join(wrong[:_SHOWN])}{more}")
    return places


def _some(names: list[str]) -> str:
    unique = list(dict.fromkeys(names))
    shown = ", ".join(unique[:_SHOWN])
    if len(unique) == 1:
        return f"tensor {shown} is"
    more = ", …" if len(unique) > _SHOWN else ""
    return f"{len(unique)} tensors ({shown}{more}) are"


def _ignorable(name: str, config: ModelConfig, drafts: set[str]) -> bool:
    """Rotation tables, a head that ties to the embedding, and draft layers behind the last one."""
    if name.endswith("rotary_emb.inv_freq"):
        return True
    if config.tie_embeddings and name == "lm_head.weight":
        return True
    layer = _LAYER.match(name)
    return layer is not None and layer[1] in drafts and int(layer[1]) >= config.layers


def _wrong(checkpoint: Checkpoint, quant: Quant, stored: Stored, place: Place) -> list[str]:
    """Complaints about the components of one module, where their shapes are known."""
    shape = place.shape if len(stored.shape) == 2 else stored.shape
    wanted = expected(stored.format, shape, quant.quantization)
    if wanted is None:
        return []
    found = (
        check_component(checkpoint, name, form, dtypes, place.index is not None)
        for name, (form, dtypes) in zip(place.names, wanted, strict=True)
    )
    said = [complaint for complaint in found if complaint is not None]
    stacked = checkpoint.entry(place.names[0]).shape
    if not said and place.index is not None and place.index >= stacked[0]:
        said.append(f"{place.names[0]}: {stacked[0]} experts found, more expected")
    return said
