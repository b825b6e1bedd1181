"""From checkpoint to layers: reads this rank's part of each weight and packs it, one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.checkpoint.staging import shares_memory
from ds_runtime.description.adapter import LoraPlan
from ds_runtime.description.config import ModelConfig
from ds_runtime.description.manifest import (
    COLS,
    ROWS,
    VOCAB,
    Stored,
    adaptable_modules,
    is_attention,
    stored_modules,
)
from ds_runtime.description.nextn import HEAD, SHARED, NextN, nextn_modules
from ds_runtime.description.sites import INPUTS, MLA_INPUTS, vocab_rows
from ds_runtime.lora.experts import AdaptedExperts
from ds_runtime.lora.slots import Delta, LoraSlots
from ds_runtime.model.layers import Absorb, Embedding, ExpertsLayer, LinearLayer, MlaInputsLayer
from ds_runtime.model.rope import paired_rows
from ds_runtime.ops.binding.bound import BoundOps
from ds_runtime.ops.reference.matrices.rounding import convert_part
from ds_runtime.ops.table import Ops
from ds_runtime.ops.weight import MlaWeights, Weight, WeightPart
from ds_runtime.parallel.layout import Shard
from ds_runtime.platform.contract import Communicator
from ds_runtime.weights.check import check_checkpoint
from ds_runtime.weights.layouts import with_order, with_rows
from ds_runtime.weights.quant import PartRequest, Place, Quant

_Layer = TypeVar("_Layer", LinearLayer, Absorb, MlaInputsLayer, ExpertsLayer)
_AHEAD = 6  # experts that are read side by side before they are asked for
_ROUNDED = 8192  # rows of a head that are rounded together: whole blocks of any format


class Loader:
    """What model classes build themselves from: bound ops, the communicator, packed weights.

    Modules are named as in the checkpoint, below `model.layers.N.`. Construction checks every
    tensor's name, shape and dtype; nothing is read before a layer asks. nextn: load the draft
    layer, from that checkpoint. head_comm: of the ranks that divide the heads of attention
    (default: all).
    """

    def __init__(
        self,
        config: ModelConfig,
        quant: Quant,
        checkpoint: Checkpoint,
        bound: BoundOps,
        comm: Communicator,
        device: Any,
        dtype: torch.dtype,
        lora: LoraPlan | None = None,
        nextn: NextN | None = None,
        head_comm: Communicator | None = None,
    ) -> None:
        self.config = config
        self.quant = quant
        self.checkpoint = checkpoint
        self.bound = bound
        self.comm = comm
        self.device = device
        self.dtype = dtype
        self.head_comm = head_comm or comm
        self.shard = Shard(comm.rank, comm.size)
        self.heads = Shard(self.head_comm.rank, self.head_comm.size)
        self.lora: LoraSlots | None = None
        if lora is not None:
            modules = adaptable_modules(config)
            self.lora = LoraSlots(lora, config, modules, self.shard_of, device, dtype)
        self.readers: ThreadPoolExecutor | None = None  # where the device computes beside the host
        if not shares_memory(device):
            self.readers = ThreadPoolExecutor(_AHEAD, "experts", self._reads)
        self.held_bytes = 0  # of all that was made so far: packed weights and plain tensors
        self.modules: Mapping[str, Stored]
        within, shared = "", tuple[str, ...]()
        if nextn is None:
            self.modules = stored_modules(config, quant.format_of)
        else:
            self.modules = nextn_modules(config, nextn, quant.format_of)
            within, shared = f"model.layers.{nextn.layer}.", SHARED
        self.places: Mapping[str, Place] = check_checkpoint(
            checkpoint, config, quant, self.modules, within, shared
        )

    def shard_of(self, module: str) -> Shard:
        """Which share of a Linear that is cut this rank holds."""
        return self.heads if is_attention(module) else self.shard

    def _reads(self) -> None:
        """At the beginning of one of the readers."""
        self.checkpoint.undivided()
        if (index := torch.device(self.device).index) is not None:
            torch.accelerator.set_device_index(index)

    def close(self) -> None:
        """Let the readers go."""
        if self.readers is not None:
            self.readers.shutdown(cancel_futures=True)

    def ops(self, layer: int, module: str) -> Ops:
        """The bound ops of one place."""
        return self.bound.at(layer, module)

    def total_bytes(self) -> int:
        """Bytes of the checkpoint that this rank reads, within a few rows.

        Of a weight cut by columns every rank reads all: a row's columns are not worth a seek.
        """
        total = 0
        for name, stored in self.modules.items():
            place = self.places[name]
            share = stored.shape[0] / place.shape[0]  # gate and up may lie in one tensor
            for tensor in place.names:
                entry = self.checkpoint.entry(tensor)
                stack = entry.shape[0] if place.index is not None else 1
                size = entry.nbytes * share / stack
                reads = self._reads_of(name)
                parts = self.shard_of(name).size if stored.cut in (ROWS, VOCAB) else 1
                total += int(reads * size / parts)
        return total

    def _reads_of(self, module: str) -> int:
        """How often a weight is read: twice where two packed ones are made of it (a tied embedding,
        inputs that have a fused form), and whole for each slot of it that is cut by columns.
        """
        heads = 1 + self.bound.has("linear", self.config.layers, HEAD)
        if module == "model.embed_tokens":
            return 1 + heads * self.config.tie_embeddings
        if module == "lm_head":
            return heads
        at, _, name = module.rpartition(".")
        parts = at.split(".")
        if module.endswith("mlp.shared_experts.down_proj"):
            return max(1, self.shared_slots(int(parts[2])))
        if name not in MLA_INPUTS or len(parts) != 4:
            return 1
        return 1 + self.bound.has("mla_inputs", int(parts[2]), INPUTS)

    def _read(self, module: str, rows: slice | None = None) -> Tensor:
        """A plain tensor, or rows of it, on the device."""
        (name,) = self.places[module].names
        return self.checkpoint.read(name, rows, device=self.device)

    def _held(self, tensor: Tensor) -> Tensor:
        """The same, counted."""
        self.held_bytes += tensor.nbytes
        return tensor

    def _packed(self, layer: _Layer) -> _Layer:
        """The same, counted."""
        self.held_bytes += layer.packed.nbytes
        return layer

    def vector(self, layer: int, name: str) -> Tensor:
        """A norm weight in the compute dtype: [n]; layer −1 outside the layers."""
        at = f"model.layers.{layer}.{name}" if layer >= 0 else f"model.{name}"
        return self._held(self._read(at).to(self.dtype))

    def wide(self, layer: int, name: str) -> Tensor:
        """A plain tensor in float32: routers, their biases, what the indexer does not pack."""
        weight = self._read(f"model.layers.{layer}.{name}")
        return self._held(weight.to(torch.float32))

    def embedding(self) -> Embedding:
        """This rank's rows of the vocabulary, in the compute dtype."""
        rows = self.shard.padded_slice(self.config.vocab_size)
        table = self._held(self._read("model.embed_tokens", rows).to(self.dtype))
        return Embedding(self.ops(-1, "embed_tokens"), table, rows.start)

    def head(self) -> LinearLayer:
        """This rank's rows of the head, filled up with zero rows so that all ranks have as many."""
        facts = self.bound.facts("linear", -1, "lm_head")
        rows = self.shard.padded_slice(self.config.vocab_size)
        part = with_rows(self._head_rows(rows), vocab_rows(self.config, self.shard.size))
        part = convert_part(part, facts.weight_format, self.dtype)
        kernel = self.ops(-1, "lm_head").linear
        return self._packed(
            LinearLayer(kernel, Weight((part,)), facts, self._deltas(-1, "lm_head"))
        )

    def draft_head(self) -> LinearLayer | None:
        """The copy of the head that drafts are drawn by, if one is bound; without adapters."""
        layer = self.config.layers
        if not self.bound.has("linear", layer, HEAD):
            return None
        facts = self.bound.facts("linear", layer, HEAD)
        rows = self.shard.padded_slice(self.config.vocab_size)
        left, parts = vocab_rows(self.config, self.shard.size), list[WeightPart]()
        while left:  # rounding takes several times the bytes
            count = min(_ROUNDED, left)
            own = slice(rows.start, min(rows.start + count, rows.stop))
            part = with_rows(self._head_rows(own), count)
            parts.append(convert_part(part, facts.weight_format, self.dtype))
            left, rows = left - count, slice(own.stop, rows.stop)
        kernel = self.ops(layer, HEAD).linear
        return self._packed(LinearLayer(kernel, Weight(tuple(parts)), facts))

    def _head_rows(self, rows: slice) -> WeightPart:
        """Rows of the head, on the device, as the checkpoint has them."""
        if not self.config.tie_embeddings:
            return self._cut("lm_head", rows, slice(0, self.config.hidden))
        values = self._read("model.embed_tokens", rows)
        shape = (values.shape[0], self.config.hidden)
        return WeightPart("lm_head", "dense", shape, {"weight": values})

    def part(self, module: str, target: str, piece: int = 0, pieces: int = 1) -> WeightPart:
        """This rank's part of one Linear, on the device, in the format that it is packed from.

        piece: of the `pieces` equal ones, along what ranks divide, that the Linear is taken as.
        """
        stored, shard = self.modules[module], self.shard_of(module)
        rows, cols = (slice(0, n) for n in stored.shape)
        if stored.cut == ROWS:
            rows = _share(shard, stored.shape[0], piece, pieces, f"rows of {module}")
        elif stored.cut == COLS:
            cols = _share(shard, stored.shape[1], piece, pieces, f"columns of {module}")
        assert stored.cut != VOCAB
        part = self._interleaved(self._cut(module, rows, cols))
        return convert_part(part, target, self.dtype)

    def whole(self, modules: Sequence[str]) -> AbstractContextManager[None]:
        """Within, this thread reads all of these Linears: in few reads, where this rank needs all
        and the device computes beside the host."""
        places = [self.places[module] for module in modules]
        stacked = any(place.index is not None for place in places)
        if self.shard.size > 1 or stacked or shares_memory(self.device):
            return nullcontext()
        names = [name for place in places for name in place.names]
        return self.checkpoint.together(names, self.device)

    def _cut(self, module: str, rows: slice, cols: slice) -> WeightPart:
        """These rows and columns of one Linear, on the device, as the checkpoint has them."""
        quant, name = self.quant, self.modules[module].module
        request = PartRequest(
            self.checkpoint,
            quant.quantization,
            name,
            quant.encoding(name),
            self.places[module],
            rows,
            cols,
            self.device,
        )
        part = quant.read(request)
        tensors = {name: t.to(self.device) for name, t in part.tensors.items()}
        return replace(part, tensors=tensors)

    def weight(self, layer: int, modules: Sequence[str], target: str) -> Weight:
        """The parts of several Linears, one below the other."""
        return Weight(tuple(self.part(f"model.layers.{layer}.{m}", target) for m in modules))

    def linear(
        self, layer: int, module: str, parts: Sequence[str] = (), site: str | None = None
    ) -> LinearLayer:
        """A packed Linear; `parts` are the checkpoint's modules if it joins several.

        site: the place that its ops are bound at, where it is one of many.
        """
        at, parts = site or module, parts or (module,)
        kernel = self.ops(layer, at).linear
        facts = self.bound.facts("linear", layer, at)
        deltas = self._deltas(layer, at, parts)
        return self._packed(
            LinearLayer(kernel, self.weight(layer, parts, facts.weight_format), facts, deltas)
        )

    def _deltas(self, layer: int, site: str, parts: Sequence[str] = ()) -> tuple[Delta, ...]:
        """What adapters add to the Linear at a site, if any may."""
        if self.lora is None:
            return ()
        names = [f"model.layers.{layer}.{part}" for part in parts] or [site]
        return self.lora.deltas(self.ops(layer, site).lora_delta, names)

    def mla_inputs(self, layer: int, at: str, eps: float) -> MlaInputsLayer | None:
        """All before attention in one kernel, from its own copy of the weights, if one is bound."""
        if not self.bound.has("mla_inputs", layer, INPUTS):
            return None
        facts = self.bound.facts("mla_inputs", layer, INPUTS)
        q_a, q_b, kv_a, kv_b = (
            self.weight(layer, (f"{at}.{n}",), facts.weight_format) for n in MLA_INPUTS
        )
        q_norm, kv_norm = (self.vector(layer, f"{at}.{n}_a_layernorm") for n in ("q", "kv"))
        weights = MlaWeights(q_a, q_b, kv_a, kv_b, q_norm, kv_norm)
        kernel = self.ops(layer, INPUTS).mla_inputs
        return self._packed(MlaInputsLayer(kernel, weights, facts, eps))

    def absorb(self, layer: int, module: str) -> Absorb:
        """kv_b_proj, packed for expansion and absorption."""
        kernel = self.ops(layer, module).mla_absorb
        facts = self.bound.facts("mla_absorb", layer, module)
        weight = self.weight(layer, (module,), facts.weight_format)
        delta = None
        if self.lora is not None:
            op = self.ops(layer, module).lora_delta
            delta = self.lora.absorb(op, f"model.layers.{layer}.{module}")
        return self._packed(Absorb(kernel, weight, facts, delta))

    def shared_slots(self, layer: int) -> int:
        """How many slots behind the routed experts of a layer hold its shared experts."""
        if not self.bound.has("experts", layer, "mlp.experts"):
            return 0
        return self.bound.facts("experts", layer, "mlp.experts").shape[0] - self.config.experts

    def experts(self, layer: int) -> ExpertsLayer | AdaptedExperts:
        """The routed experts of a layer, and the shared ones where they are slots behind them."""
        if self.bound.has("linear", layer, "mlp.experts.down_proj"):
            return self._adapted_experts(layer)
        kernel = self.ops(layer, "mlp.experts").experts
        facts = self.bound.facts("experts", layer, "mlp.experts")
        return self._packed(
            ExpertsLayer(kernel, LayerExperts(self, layer, facts.weight_format), facts)
        )

    def _adapted_experts(self, layer: int) -> AdaptedExperts:
        """The routed experts of a layer, one by one."""
        at, gate_up, down = "mlp.experts", [], []
        for e in range(self.config.experts):
            parts = (f"{at}.{e}.gate_proj", f"{at}.{e}.up_proj")
            gate_up.append(self.linear(layer, f"{at}.{e}", parts, f"{at}.gate_up_proj"))
            down.append(self.linear(layer, f"{at}.{e}.down_proj", site=f"{at}.down_proj"))
        return AdaptedExperts(self.ops(layer, at), gate_up, down)

    def _interleaved(self, part: WeightPart) -> WeightPart:
        """Rows of rotated dims reordered from (all first halves, all second halves) to pairs."""
        rows = paired_rows(self.config, part.name, part.shape[0])
        if rows is None:
            return part
        return with_order(part, rows)


class LayerExperts:
    """ExpertSource over a checkpoint: reads an expert when asked, keeps nothing.

    Where the device computes beside the host, the next ones are read while one is packed.
    """

    def __init__(self, loader: Loader, layer: int, target: str) -> None:
        config = loader.config
        self.slots = loader.shared_slots(layer)
        self.num_experts = config.experts + self.slots
        self.hidden = config.hidden
        self.intermediate = config.moe_intermediate // loader.shard.size
        self._at = f"model.layers.{layer}.mlp"
        self.format = target
        self._loader = loader
        self._coming: dict[int, Future[tuple[Weight, Weight, Weight]]] = {}

    def expert(self, index: int) -> tuple[Weight, Weight, Weight]:
        """(gate, up, down) of one expert, this rank's width. Behind the routed experts come equal
        pieces of the shared ones."""
        readers = self._loader.readers
        if readers is None:
            return self._read(index)
        for number in range(index, min(index + _AHEAD + 1, self.num_experts)):
            if number not in self._coming:
                self._coming[number] = readers.submit(self._read, number)
        return self._coming.pop(index).result()

    def _read(self, index: int) -> tuple[Weight, Weight, Weight]:
        routed = self.num_experts - self.slots
        at, piece, pieces = f"{self._at}.experts.{index}", 0, 1
        if index >= routed:
            at, piece, pieces = f"{self._at}.shared_experts", index - routed, self.slots
        modules = [f"{at}.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
        with self._loader.whole(modules) if pieces == 1 else nullcontext():
            gate, up, down = (
                Weight((self._loader.part(module, self.format, piece, pieces),))
                for module in modules
            )
        return gate, up, down


def _share(shard: Shard, size: int, piece: int, pieces: int, what: str) -> slice:
    """A rank's share of one of the equal pieces of `size`."""
    width = size // pieces
    share = shard.slice(width, what)
    return slice(piece * width + share.start, piece * width + share.stop)
