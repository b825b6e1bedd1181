"""Load a checkpoint into a model: check it, check memory, then read and pack layer by layer."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from ds_runtime.assembly.estimate import (
    needed_bytes,
    page_table_bytes,
    positions_of,
    rotation_bytes,
    second_form_of,
)
from ds_runtime.assembly.result import Assembly
from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.checkpoint.tensors import StoredTensor, tensors_of
from ds_runtime.common.progress import Progress, amount
from ds_runtime.config import EngineConfig
from ds_runtime.description.config import ModelConfig
from ds_runtime.description.hybrid.structure import native_name
from ds_runtime.description.nextn import NextN
from ds_runtime.description.structure import draft_of, model_of
from ds_runtime.description.tree import by_name
from ds_runtime.errors import ConfigError
from ds_runtime.model.base import LanguageModel
from ds_runtime.model.deepseek import DeepSeekModel
from ds_runtime.model.draft import DraftModel
from ds_runtime.model.expert_counts import ExpertCounts
from ds_runtime.model.hybrid.model import HybridModel
from ds_runtime.ops.binding.bound import BoundOps
from ds_runtime.ops.dtypes import torch_dtype
from ds_runtime.parallel.world import World
from ds_runtime.platform.contract import Communicator
from ds_runtime.weights.check import unread_indexers
from ds_runtime.weights.dummy import DummyCheckpoint
from ds_runtime.weights.loader import Loader
from ds_runtime.weights.quant import Quant

__all__ = ["Checkpoint", "check_memory", "load_draft", "load_model", "needed_bytes"]


def load_model(
    assembly: Assembly,
    bound: BoundOps,
    world: World,
    device: Any,
    progress: bool = False,
    local_rank: int = 0,
) -> LanguageModel:
    """The model of this rank, packed on `device`. `progress` shows a bar, and what is not read.
    local_rank: the platform's number for the device.

    Raises CheckpointError for missing, damaged, unexpected or wrong tensors, and ConfigError when
    the packed weights would not fit, both before any weight is read.
    """
    counts, model = None, assembly.model
    if assembly.config.expert_metrics and model.experts and world.rank == 0:
        counts = ExpertCounts(model.experts, device)
    with _loader(assembly, bound, world, device, counts=counts) as load:
        check_memory(assembly, world.everyone, device, local_rank)
        unread = (*assembly.left_over(), unread_indexers(load.checkpoint, assembly.model))
        for said in filter(None, unread) if progress else ():
            print(f"warning: {said}", file=sys.stderr, flush=True)
        with _shown(load, "loading weights", progress):
            kind = DeepSeekModel if assembly.model.hybrid is None else HybridModel
            return kind(assembly.model, load, positions_of(assembly))


def load_draft(
    assembly: Assembly, model: LanguageModel, bound: BoundOps, device: Any, progress: bool
) -> DraftModel | None:
    """The draft layer after `model`, if the assembly has one. CheckpointError as in load_model."""
    if assembly.nextn is None:
        return None
    with (
        _loader(assembly, bound, model.world, device, assembly.nextn) as load,
        _shown(load, "loading the draft layer", progress),
    ):
        assert isinstance(model, DeepSeekModel), "drafts of other models were refused"
        return DraftModel(model, load)


@contextmanager
def _loader(
    assembly: Assembly,
    bound: BoundOps,
    world: World,
    device: Any,
    nextn: NextN | None = None,
    counts: ExpertCounts | None = None,
) -> Iterator[Loader]:
    """What reads the model, or its draft layer, from its checkpoint, which is open within."""
    quant, lora = quant_of(assembly, nextn), None if nextn else assembly.lora
    checkpoint = _opened(assembly, quant, nextn)
    own = (bound, world, device, torch_dtype(assembly.config.dtype))
    try:
        load = Loader(assembly.model, quant, checkpoint, *own, lora, nextn, counts)
        with closing(load):
            yield load
    finally:
        checkpoint.close()


@contextmanager
def _shown(load: Loader, what: str, progress: bool) -> Iterator[None]:
    """Within, a bar shows what is read; CheckpointError at the end for NaN on the device."""
    with Progress(what, load.total_bytes(), enabled=progress) as bar:
        load.checkpoint.on_read = bar.advance
        yield
        load.checkpoint.finish()


def quant_of(assembly: Assembly, nextn: NextN | None = None) -> Quant:
    """The loader that assembly chose; nextn: for that layer."""
    if nextn is None:
        return Quant.open(assembly.loader, assembly.model.quantization)
    assert assembly.nextn_loader is not None
    return Quant.open(assembly.nextn_loader, nextn.config.quantization)


def entries_of(folder: Path, model: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors of a folder, under the names that the model's structure has."""
    entries = tensors_of(folder)
    if model.hybrid is None:
        return entries
    return {native_name(name): entry for name, entry in entries.items()}


def _opened(assembly: Assembly, quant: Quant, nextn: NextN | None = None) -> Checkpoint:
    """The checkpoint of the model or of its draft layer, or random tensors in its place."""
    folder = assembly.folder if nextn is None else nextn.folder
    if assembly.config.load_format != "dummy":
        entries = entries_of(folder, assembly.model)
        return Checkpoint(folder, entries, allow_nan=assembly.config.allow_nan_weights)
    model, of = assembly.model, quant.format_of
    tree = model_of(model, of) if nextn is None else draft_of(model, nextn.layer, of)
    return DummyCheckpoint(folder, model, quant, by_name(tree).values())


def check_memory(assembly: Assembly, comm: Communicator, device: Any, local_rank: int) -> None:
    """ConfigError, on every rank alike, if the ranks of some device do not fit in its memory."""
    needed, tables = needed_bytes(assembly), page_table_bytes(assembly)
    free = assembly.platform.memory(local_rank).free
    ranks = comm.gather_objects((socket.gethostname(), str(device), free))
    for host, place, _ in ranks:
        together = [f for h, d, f in ranks if (h, d) == (host, place)]
        count, have = len(together), min(together)
        if needed * count > have:
            each = f"{count} ranks of {amount(needed)}" if count > 1 else ""
            raise ConfigError(
                f"the weights need {amount(needed * count)} in {assembly.config.dtype}"
                f"{f' ({each})' if each else ''}, and {amount(have)} are free on {place}: "
                f"{_remedy(assembly, needed)}"
            )
        if (needed + tables) * count > have:
            raise ConfigError(
                f"{_sequences(assembly.config)} of {positions_of(assembly)} tokens need "
                f"{amount(tables * count)}, and {amount(have - needed * count)} are free on "
                f"{place} after the weights: give less, or lower --context-length"
            )


def _sequences(config: EngineConfig) -> str:
    if config.batch_invariant:
        tokens = config.max_step_tokens
        flags = f"--max-step-tokens {tokens} with --batch-invariant"
        return f"{flags}: page tables for {tokens} sequences"
    many = config.max_running_requests
    return f"--max-running-requests {many}: page tables for {many} requests"


def _remedy(assembly: Assembly, needed: int) -> str:
    config, positions = assembly.config, positions_of(assembly)
    table = rotation_bytes(assembly.model, positions)
    if 2 * table > needed:  # no weight is as large: config.json claims an enormous context
        return (
            f"{amount(table)} of that is the rotation table of {positions} positions "
            "(max_position_embeddings): give a smaller --context-length"
        )
    shorter = "" if config.dtype != "float32" else "--dtype bfloat16 halves that, "
    if config.enable_dp_attention:
        shorter += "without --enable-dp-attention weights of attention are divided, too, "
    binding = assembly.binding
    twice = sorted({site.op for site, k in binding.choices if second_form_of(binding, site, k)})
    if twice:
        shorter += f"--memory-for-speed off leaves second forms of {', '.join(twice)} out, "
    if more := _wider(assembly):
        shorter += f"--tp {more} divides it where every rank has memory of its own "
    else:
        shorter += "a model of fewer or smaller weights fits "
    return f"{shorter}(--kv-memory comes on top and does not help)"


def _wider(assembly: Assembly) -> int:
    """The next number of ranks that divides the model, 0 if none does."""
    config, model = assembly.config, assembly.model
    for tp in range(2 * config.tp, model.heads + 1, config.tp):
        attention = (
            tp // (config.attn_dp if config.dp else tp) if config.enable_dp_attention else tp
        )
        try:
            model.check_tp(tp, attention)
        except ConfigError:
            continue
        return tp
    return 0
