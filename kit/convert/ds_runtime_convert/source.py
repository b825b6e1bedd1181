"""The checkpoint that is converted: its Linears, draft layers included, and all else it holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ds_runtime.assembly.assemble import find_loader
from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.description.config import ModelConfig
from ds_runtime.description.hf import load_config
from ds_runtime.description.structure import JOIN, SHARED, draft_of, stored_modules
from ds_runtime.description.tree import Stored, weights
from ds_runtime.ops.contract import DeviceInfo, Facts, Offers
from ds_runtime.ops.weight import WeightPart
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.weights.check import check_checkpoint, ignorable
from ds_runtime.weights.load import entries_of
from ds_runtime.weights.quant import PartRequest, Place, Quant


def quant_of(config: ModelConfig, where: str, offers: Offers | None = None) -> Quant:
    """The loader of a config's quantisation, opened."""
    if offers is None:
        offers = load_plugins(()).offers(Facts(DeviceInfo("cpu", "", ""), config.dims()))
    return Quant.open(find_loader(offers, config, where), config.quantization)


class Source:
    """A folder that is read Linear by Linear. Raises CheckpointError at once if it is damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = load_config(folder)
        self.checkpoint = Checkpoint(folder, entries_of(folder, config))
        self.config = _with_indexers(config, self.checkpoint)
        self.quant = quant_of(self.config, str(folder / "config.json"))
        self.modules = stored_modules(self.config, self.quant.format_of)
        self.places = check_checkpoint(self.checkpoint, self.config, self.quant, self.modules)
        for layer in self._draft_layers():
            at = f"model.layers.{layer}."
            draft = draft_of(self.config, layer, self.quant.format_of)
            drafts = {stored.module: stored for stored in weights(draft)}
            self.places |= check_checkpoint(
                self.checkpoint, self.config, self.quant, drafts, at, SHARED
            )
            self.modules |= drafts

    def _draft_layers(self) -> list[int]:
        first = self.config.layers
        layers = range(first, first + self.config.mtp_layers)
        names = self.checkpoint.names
        return [n for n in layers if any(x.startswith(f"model.layers.{n}.{JOIN}.") for x in names)]

    @property
    def linears(self) -> dict[str, Stored]:
        """Every Linear."""
        return {m: s for m, s in self.modules.items() if s.format}

    def others(self) -> Iterator[str]:
        """Tensors of no Linear, by name: embeddings, norms, routers, copies of them. Scales that
        belong to another cache or to nobody are left out."""
        linear = self.linears
        taken = {n for m in linear for n in self.places[m].names}
        taken |= {n for m in linear for n in self.quant.unread(m)}
        keep = {n for m, p in self.places.items() if m not in linear for n in p.names}
        for name in self.checkpoint.names:
            shared = name.rpartition(".")[0].endswith(SHARED)
            if name in keep or (name not in taken and (shared or not ignorable(name))):
                yield name

    def part(self, module: str) -> WeightPart:
        """A whole Linear, as the checkpoint has it."""
        stored = self.modules[module]
        return read_whole(self.quant, self.checkpoint, module, self.places[module], stored.shape)

    def tensor(self, name: str) -> Tensor:
        """A whole tensor."""
        return self.checkpoint.read(name)


def _with_indexers(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """With every indexer that is there, also of layers that share an earlier choice: it stays of
    use to whoever lets them choose."""
    if (indexing := config.indexing) is None:
        return config
    parts = [n.partition(".self_attn.indexer.") for n in checkpoint.names]
    found = {at for at, dot, _ in parts if dot}
    computes = tuple(
        own or f"model.layers.{layer}" in found for layer, own in enumerate(indexing.computes)
    )
    return replace(config, indexing=replace(indexing, computes=computes))


def read_whole(
    quant: Quant, checkpoint: Checkpoint, module: str, place: Place, shape: tuple[int, ...]
) -> WeightPart:
    """All rows and columns of a Linear."""
    rows, cols = shape
    whole = (slice(0, rows), slice(0, cols))
    request = PartRequest(
        checkpoint, quant.quantization, module, quant.encoding(module), place, *whole
    )
    with torch.no_grad():
        return quant.read(request)
