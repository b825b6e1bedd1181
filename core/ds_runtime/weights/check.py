"""Does the checkpoint hold what the model needs, and nothing that it would silently ignore?"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.description.config import ModelConfig
from ds_runtime.description.hybrid.structure import DRAFTS
from ds_runtime.description.leftover import CACHE_SCALES
from ds_runtime.description.structure import JOIN
from ds_runtime.description.tree import ATTENTION, HEAD, INDEXER, Stored
from ds_runtime.errors import CheckpointError, shown
from ds_runtime.ops.contract import DENSE
from ds_runtime.weights.layouts import FLOATS, WHOLE_NUMBERS, Expected
from ds_runtime.weights.quant import Place, Quant, wrong_component, wrong_components

_SHOWN = 4
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_INDEXER = re.compile(rf"model\.layers\.(\d+)\.{re.escape(INDEXER)}\.")
_DRAFT = re.compile(rf"model\.layers\.(\d+)\.{JOIN}\.")  # only a layer that drafts has it


def check_checkpoint(
    checkpoint: Checkpoint,
    config: ModelConfig,
    quant: Quant,
    modules: Mapping[str, Stored],
    within: str = "",
    shared: Collection[str] = (),
) -> dict[str, Place]:
    """The place of every module. Raises CheckpointError that names missing, unexpected or wrong
    tensors, the first few of each with their number.

    within: only tensors whose names begin so are looked at; of these, the modules `shared` may be
    there although nobody reads them.
    """
    places = {m: quant.place(checkpoint, stored) for m, stored in modules.items()}
    needed = {name for place in places.values() for name in place.names}
    owned = [n for n in checkpoint.names if n.startswith(within)]
    lacking = {m: n for m, p in places.items() for n in p.names if n not in checkpoint}
    if lacking:
        asked = "a draft layer" if within else f"{config.layers} layers"
        instead = _instead(checkpoint, quant, modules, next(iter(lacking)))
        raise CheckpointError(
            f"{checkpoint.folder}: {_some(list(lacking.values()))} missing; config.json asks for "
            f"{asked} and {config.experts} experts{instead}"
            f"{'' if within else _chooses(lacking, checkpoint)}"
        )
    needed |= {n for s in modules.values() if s.format for n in quant.unread(s.module)}
    drafts = {m[1] for n in checkpoint.names if (m := _DRAFT.match(n)) is not None}
    if within:
        drafts = set()
    extra = [n for n in owned if n not in needed and not _ignorable(n, config, drafts)]
    extra = [n for n in extra if n.removeprefix(within).rpartition(".")[0] not in shared]
    if extra:
        behind, hint = f"model.layers.{config.layers}.", ""
        if config.mtp_layers and not within and all(n.startswith(behind) for n in extra):
            hint = f"; were they a draft layer, {behind}{JOIN}.weight would be there, too"
        raise CheckpointError(
            f"{checkpoint.folder}: {_some(extra)} not expected; config.json and "
            f"its quantization_config describe another model than these weights{hint}"
        )
    wrong = [
        w for m, stored in modules.items() for w in _wrong(checkpoint, quant, stored, places[m])
    ]
    if wrong:
        more = f" (and {len(wrong) - _SHOWN} more)" if len(wrong) > _SHOWN else ""
        raise CheckpointError(f"{checkpoint.folder}: {'; '.join(wrong[:_SHOWN])}{more}")
    return places


def unread_indexers(checkpoint: Checkpoint, config: ModelConfig) -> str:
    """A sentence on the indexers that are there although their layers share an earlier choice, as
    in a model that was trained without sharing; empty if there are none. Nobody reads them.
    """
    found = [n for n in checkpoint.names if _shares(n, config)]
    if config.indexing is None or not found:
        return ""
    because = config.indexing.because
    return (
        f"{checkpoint.folder}: {_some(found)} not read: {because} in config.json lets "
        f"{_layers(found)} attend what an earlier one chose; in a config without indexer_types, "
        "index_topk_pattern and index_topk_freq each chooses"
    )


def _chooses(lacking: Mapping[str, str], checkpoint: Checkpoint) -> str:
    """What says that a layer has an indexer, where all that is missing are whole indexers."""
    found = {m.partition("indexer.")[0] for m in lacking if _INDEXER.match(m)}
    whole = not any(n.startswith(f"{at}indexer.") for at in found for n in checkpoint.names)
    if not whole or not all(_INDEXER.match(m) for m in lacking):
        return ""
    if f"model.layers.0.{ATTENTION}." in found:  # nobody chose before
        return ""
    return (
        f". If {_layers(found)} attended what an earlier one chose, indexer_types, "
        "index_topk_pattern or index_topk_freq would say so"
    )


def _layers(names: Iterable[str]) -> str:
    """Of tensors or modules, whose layers: `layer 2`, `layers 2, 4, 6, 7, …`."""
    numbers = sorted({int(n.split(".")[2]) for n in names})
    more = ", …" if len(numbers) > _SHOWN else ""
    said = ", ".join(map(str, numbers[:_SHOWN])) + more
    return f"layer{'s' if len(numbers) > 1 else ''} {said}"


def _shares(name: str, config: ModelConfig) -> bool:
    """Whether a tensor belongs to an indexer of a layer that shares the choice of another."""
    layer = _INDEXER.match(name)
    return (
        layer is not None and config.indexing is not None and not config.has_indexer(int(layer[1]))
    )


def _instead(
    checkpoint: Checkpoint, quant: Quant, modules: Mapping[str, Stored], module: str
) -> str:
    """What is there of a quantised module that lacks a tensor, if anything is, and the remedy."""
    stored = modules[module]
    there = [n for n in checkpoint.names if n.startswith(f"{stored.module}.")]
    if not stored.format or not there:
        return "; take config.json and the weights from the same checkpoint"
    method = quant.quantization.get("quant_method", "none")
    dense = there == [f"{stored.module}.weight"] and checkpoint.entry(there[0]).dtype in FLOATS
    remedy = (
        f"{stored.module} is dense: list it where quantization_config names what is not quantised"
        if dense and quant.encoding(stored.module) != DENSE
        else f"quantization_config (quant_method {shown(method)}) describes other weights: take "
        "config.json and the weights from the same checkpoint"
    )
    return (
        f", and for {quant.format_of(stored.module)} weights of {stored.module}, where "
        f"{_some(there)}; {remedy}"
    )


def _some(names: list[str]) -> str:
    unique = list(dict.fromkeys(names))
    shown = ", ".join(unique[:_SHOWN])
    if len(unique) == 1:
        return f"tensor {shown} is"
    more = ", …" if len(unique) > _SHOWN else ""
    return f"{len(unique)} tensors ({shown}{more}) are"


def ignorable(name: str) -> bool:
    """Rotation tables, and scales of a cache of keys and values."""
    return name.endswith("rotary_emb.inv_freq") or name.endswith(CACHE_SCALES)


def _ignorable(name: str, config: ModelConfig, drafts: set[str]) -> bool:
    """What says nothing, a head that ties to the embedding, indexers of layers that share, and
    draft layers behind the last."""
    if ignorable(name) or _shares(name, config):
        return True
    if config.hybrid is not None and name.startswith(DRAFTS):
        return True
    if config.tie_embeddings and name == f"{HEAD}.weight":
        return True
    layer = _LAYER.match(name)
    return layer is not None and layer[1] in drafts and int(layer[1]) >= config.layers


def _wrong(checkpoint: Checkpoint, quant: Quant, stored: Stored, place: Place) -> list[str]:
    """Complaints about the components of one module, where their shapes are known."""
    shape = None if stored.format else stored.shape
    if stored.kind == "ids":
        name, want = place.names[0], Expected((stored.shape,), WHOLE_NUMBERS)
        complaint = wrong_component(checkpoint, name, want, False)
        return [] if complaint is None else [complaint]
    said = wrong_components(checkpoint, quant.encoding_of(stored), place, shape)
    stacked = checkpoint.entry(place.names[0]).shape
    if not said and place.index is not None and place.index >= stacked[0]:
        said.append(f"{place.names[0]}: {stacked[0]} experts found, more expected")
    return said
