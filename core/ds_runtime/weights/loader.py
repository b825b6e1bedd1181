"""From checkpoint to layers: reads this rank's part of each weight and packs it, one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from hashlib import sha256
from typing import Any, TypeVar

import torch
from torch import Tensor

from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.checkpoint.staging import shares_memory
from ds_runtime.description.adapter import LoraPlan, adaptable_modules
from ds_runtime.description.config import ModelConfig
from ds_runtime.description.nextn import NextN
from ds_runtime.description.sites import DRAFT_HEAD, INPUTS
from ds_runtime.description.structure import (
    JOINED_INPUTS,
    SHARED,
    draft_of,
    model_of,
)
from ds_runtime.description.tree import (
    EMBEDDING,
    EXPERTS,
    HEAD,
    AttentionNode,
    DraftTree,
    LinearNode,
    MixNode,
    ModelTree,
    MoeNode,
    Stored,
    by_name,
)
from ds_runtime.errors import CheckpointError
from ds_runtime.lora.experts import AdaptedExperts
from ds_runtime.lora.slots import Delta, LoraSlots
from ds_runtime.model.expert_counts import ExpertCounts
from ds_runtime.model.layers import (
    Absorb,
    Codes,
    Embedding,
    ExpertsLayer,
    GroupedLayer,
    LinearLayer,
    MlaInputsLayer,
)
from ds_runtime.model.rope import paired_rows
from ds_runtime.ops.binding.bound import BoundOps
from ds_runtime.ops.contract import Site
from ds_runtime.ops.reference.matrices.rounding import convert_part
from ds_runtime.ops.table import Ops
from ds_runtime.ops.weight import MlaWeights, Weight, WeightPart
from ds_runtime.parallel.exchange import exchange_of
from ds_runtime.parallel.layout import Shards
from ds_runtime.parallel.placement import Placement
from ds_runtime.parallel.world import World
from ds_runtime.weights.check import check_checkpoint
from ds_runtime.weights.layer_experts import AHEAD, LayerExperts
from ds_runtime.weights.quant import PartRequest, Place, Quant
from ds_runtime.weights.rows import with_order, with_rows

_Layer = TypeVar("_Layer", LinearLayer, GroupedLayer, Absorb, MlaInputsLayer, ExpertsLayer)
# Rows of calls that ranks compare their codes for. Where weights decide which kernel serves, as in
# Footprint.second_form, ranks may differ: of a call all must have codes, or none.
_PROBED = (*range(1, 65), *(1 << n for n in range(7, 16)))
_ROUNDED = 8192  # rows of a head that are rounded together: whole blocks of any format


class Loader:
    """What model classes build themselves from: bound ops, the groups of ranks, packed weights.

    Construction checks every tensor's name, shape and dtype; nothing is read before a layer asks.
    Weights are those of `tree`, which describes the model, or with `nextn` the draft layer of that
    checkpoint.
    """

    def __init__(
        self,
        config: ModelConfig,
        quant: Quant,
        checkpoint: Checkpoint,
        bound: BoundOps,
        world: World,
        device: Any,
        dtype: torch.dtype,
        lora: LoraPlan | None = None,
        nextn: NextN | None = None,
        counts: ExpertCounts | None = None,
    ) -> None:
        """counts: where layers count the choices of experts."""
        self.config, self.counts = config, counts
        self.quant = quant
        self.checkpoint = checkpoint
        self.bound = bound
        self.world = world
        self.comm, self.head_comm = world.group("tp"), world.group("attn_tp")
        self.exchange = exchange_of(world)
        self.device = device
        self.dtype = dtype
        self.shards = Shards.at(world.mesh, world.rank)
        self.lora: LoraSlots | None = None
        if lora is not None:
            modules = adaptable_modules(config)
            self.lora = LoraSlots(lora, config, modules, self.shards, device, dtype)
        self.readers: ThreadPoolExecutor | None = None  # where the device computes beside the host
        if not shares_memory(device):
            self.readers = ThreadPoolExecutor(AHEAD, "experts", self._reads)
        self.held_bytes = 0  # of all that was made so far: packed weights and plain tensors
        self.placement = Placement.even(config.experts, world.mesh.ep)
        here = self.shards.experts
        held = self.placement.held(here.rank) if here.size > 1 else None
        self.tree: ModelTree | DraftTree
        whole: ModelTree | DraftTree
        within, shared = "", tuple[str, ...]()
        if nextn is None:
            whole = model_of(config, quant.format_of)
            self.tree = model_of(config, quant.format_of, experts=held) if held else whole
        else:
            whole = draft_of(config, nextn.layer, quant.format_of)
            self.tree = draft_of(config, nextn.layer, quant.format_of, held) if held else whole
            within, shared = f"model.layers.{nextn.layer}.", SHARED
        self.modules: Mapping[str, Stored] = by_name(self.tree)
        self.places: Mapping[str, Place] = check_checkpoint(
            checkpoint, config, quant, by_name(whole), within, shared
        )
        if isinstance(self.tree, ModelTree) and self.tree.head is not None:
            (head,) = self.tree.head.parts  # where it is tied, it lies where the embedding does
            self.modules = {**self.modules, head.name: head}
            self.places = {**self.places, head.name: self.places[head.module]}
        self._sites: Mapping[tuple[str, int, str], Site] = {
            key: site
            for site, _ in bound.binding.choices
            if bound.has(*(key := (site.op, site.layer, site.module)))
        }

    def _reads(self) -> None:
        """At the beginning of one of the readers."""
        self.checkpoint.files.undivided()
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
        reads = Counter(name for site in self._sites.values() for name in site.weights)
        for name, stored in self.modules.items():
            place, cut = self.places[name], stored.cut
            share = stored.shape[0] / place.shape[0]  # gate and up may lie in one tensor
            parts = self.shards.of(cut).size if cut is not None and cut.dim == 0 else 1
            for tensor in place.names:
                entry = self.checkpoint.entry(tensor)
                stack = entry.shape[0] if place.index is not None else 1
                size = entry.nbytes * share / stack
                total += int(max(1, reads[name]) * size / parts)
        return total

    def _read(self, stored: Stored, rows: slice | None = None) -> Tensor:
        """A plain tensor, or rows of it, on the device."""
        (name,) = self.places[stored.name].names
        return self.checkpoint.read(name, rows, device=self.device)

    def _held(self, tensor: Tensor) -> Tensor:
        """The same, counted."""
        self.held_bytes += tensor.nbytes
        return tensor

    def _packed(self, layer: _Layer) -> _Layer:
        """The same, counted."""
        self.held_bytes += layer.packed.nbytes
        return layer

    def vector(self, stored: Stored) -> Tensor:
        """A norm weight in the compute dtype: [n]."""
        return self._held(self._read(stored).to(self.dtype))

    def wide(self, stored: Stored) -> Tensor:
        """This rank's part of a plain tensor in float32: routers, their biases, what no kernel
        packs."""
        rows = None
        if stored.cut is not None:
            rows = self.shards.of(stored.cut).slice(stored.shape[0], f"size of {stored.name}")
        return self._held(self._read(stored, rows).to(torch.float32))

    def ids(self, stored: Stored) -> Tensor:
        """A table of whole numbers: int64."""
        table = self._read(stored).to(torch.int64)
        if table.numel() and not 0 <= int(table.min()) <= int(table.max()) < self.config.experts:
            raise CheckpointError(
                f"{self.checkpoint.folder}: {stored.module}: names experts that are not there; "
                f"there are {self.config.experts}: the file is damaged, or of another model"
            )
        return self._held(table)

    def mix(self, node: MixNode) -> tuple[Tensor, Tensor, Tensor]:
        """How residual streams are read: (fn, base, scale), float32."""
        return self.wide(node.fn), self.wide(node.base), self.wide(node.scale)

    def embedding(self, stored: Stored) -> Embedding:
        """This rank's rows of the vocabulary, in the compute dtype."""
        rows, _ = self.shards.part(stored)
        table = self._held(self._read(stored, rows).to(self.dtype))
        return Embedding(self.ops(-1, EMBEDDING), table, rows.start)

    def head(self, head: LinearNode) -> LinearLayer:
        """This rank's rows of the head, filled up with zero rows so that all ranks have as many."""
        facts = self.bound.facts("linear", -1, HEAD)
        rows, _ = self.shards.part(head.parts[0])
        part = with_rows(self._head_rows(head, rows), head.shape(self.shards.ranks)[0])
        part = convert_part(part, facts.weight_format, self.dtype)
        kernel = self.ops(-1, HEAD).linear
        return self._packed(LinearLayer(kernel, Weight((part,)), facts, self._deltas(head)))

    def draft_head(self, head: LinearNode) -> LinearLayer | None:
        """The copy of the head that drafts are drawn by, if one is bound; without adapters."""
        layer = self.config.layers
        if not self.bound.has("linear", layer, DRAFT_HEAD):
            return None
        facts = self.bound.facts("linear", layer, DRAFT_HEAD)
        rows, _ = self.shards.part(head.parts[0])
        left, parts = head.shape(self.shards.ranks)[0], list[WeightPart]()
        while left:  # rounding takes several times the bytes
            count = min(_ROUNDED, left)
            own = slice(rows.start, min(rows.start + count, rows.stop))
            part = with_rows(self._head_rows(head, own), count)
            parts.append(convert_part(part, facts.weight_format, self.dtype))
            left, rows = left - count, slice(own.stop, rows.stop)
        kernel = self.ops(layer, DRAFT_HEAD).linear
        return self._packed(LinearLayer(kernel, Weight(tuple(parts)), facts))

    def _head_rows(self, head: LinearNode, rows: slice) -> WeightPart:
        """Rows of the head, on the device, as the checkpoint has them."""
        (stored,) = head.parts
        if stored.kind == "head":
            return self._cut(stored, rows, slice(0, stored.shape[1]))
        values = self._read(stored, rows)
        return WeightPart(HEAD, "dense", (values.shape[0], stored.shape[1]), {"weight": values})

    def part(self, stored: Stored, target: str, piece: int = 0, pieces: int = 1) -> WeightPart:
        """This rank's part of one Linear, on the device, in the format that it is packed from.

        piece: of the `pieces` equal ones, along what ranks divide, that the Linear is taken as.
        """
        part = self._cut(stored, *self.shards.part(stored, piece, pieces))
        # Rows of rotated dims may be stored as all first halves before all second ones.
        order = paired_rows(self.config, stored, part.shape[0])
        part = part if order is None else with_order(part, order)
        return convert_part(part, target, self.dtype)

    def whole(self, linears: Iterable[Stored]) -> AbstractContextManager[None]:
        """Within, this thread reads all of these Linears: in few reads, where this rank needs all
        and the device computes in parallel with the host."""
        places = [self.places[stored.name] for stored in linears]
        stacked = any(place.index is not None for place in places)
        if self.comm.size > 1 or stacked or shares_memory(self.device):
            return nullcontext()
        names = [name for place in places for name in place.names]
        return self.checkpoint.together(names, self.device)

    def _cut(self, stored: Stored, rows: slice, cols: slice) -> WeightPart:
        """These rows and columns of one Linear, on the device, as the checkpoint has them."""
        quant, name = self.quant, stored.module
        request = PartRequest(
            self.checkpoint,
            quant.quantization,
            name,
            quant.encoding(name),
            self.places[stored.name],
            rows,
            cols,
            self.device,
        )
        part = quant.read(request)
        tensors = {name: t.to(self.device) for name, t in part.tensors.items()}
        return replace(part, tensors=tensors)

    def weight(self, linear: LinearNode, target: str) -> Weight:
        """The parts of a product, one below the other."""
        return Weight(tuple(self.part(stored, target) for stored in linear.parts))

    def inputs(self, attention: AttentionNode) -> tuple[LinearNode, ...]:
        """The products of hidden states in a layer's attention, joined as they are bound."""
        site = self._sites.get(("linear", attention.layer, JOINED_INPUTS))
        if site is None:
            return attention.inputs
        both = LinearNode(
            site.layer, site.module, tuple(map(self.modules.__getitem__, site.weights))
        )
        return (both, *(p for p in attention.inputs if p.parts[0] not in both.parts))

    def linear(self, linear: LinearNode) -> LinearLayer:
        """A product, packed."""
        at = (linear.layer, linear.module)
        kernel, facts = self.ops(*at).linear, self.bound.facts("linear", *at)
        weight = self.weight(linear, facts.weight_format)
        return self._packed(LinearLayer(kernel, weight, facts, self._deltas(linear)))

    def grouped(self, linear: LinearNode) -> GroupedLayer:
        """A product of groups of columns, each with rows of its own."""
        at = (linear.layer, linear.module)
        kernel, facts = self.ops(*at).grouped_linear, self.bound.facts("grouped_linear", *at)
        weight = self.weight(linear, facts.weight_format)
        return self._packed(GroupedLayer(kernel, weight, facts))

    def _deltas(self, linear: LinearNode) -> tuple[Delta, ...]:
        """What adapters add to a product, if any may."""
        if self.lora is None:
            return ()
        op = self.ops(linear.layer, linear.module).lora_delta
        return self.lora.deltas(op, [stored.name for stored in linear.parts])

    def mla_inputs(self, attention: AttentionNode, eps: float) -> MlaInputsLayer | None:
        """All before attention in one kernel, from its own copy of the weights, if one is bound."""
        layer = attention.layer
        if not self.bound.has("mla_inputs", layer, INPUTS):
            return None
        facts = self.bound.facts("mla_inputs", layer, INPUTS)
        assert attention.up is not None and attention.norm is not None
        products = (attention.query, attention.up, attention.latent, attention.kv_b)
        q_a, q_b, kv_a, kv_b = (self.weight(p, facts.weight_format) for p in products)
        q_norm, kv_norm = self.vector(attention.norm), self.vector(attention.latent_norm)
        weights = MlaWeights(q_a, q_b, kv_a, kv_b, q_norm, kv_norm)
        kernel = self.ops(layer, INPUTS).mla_inputs
        return self._packed(MlaInputsLayer(kernel, weights, facts, eps))

    def absorb(self, linear: LinearNode) -> Absorb:
        """kv_b, packed for expansion and absorption."""
        at = (linear.layer, linear.module)
        kernel, facts = self.ops(*at).mla_absorb, self.bound.facts("mla_absorb", *at)
        weight = self.weight(linear, facts.weight_format)
        delta = None
        if self.lora is not None:
            delta = self.lora.absorb(self.ops(*at).lora_delta, linear.parts[0].name)
        return self._packed(Absorb(kernel, weight, facts, delta))

    def shared_slots(self, moe: MoeNode) -> int:
        """How many slots after the routed experts of a layer hold its shared experts."""
        if not self.bound.has("experts", moe.layer, EXPERTS):
            return 0
        return self.bound.facts("experts", moe.layer, EXPERTS).shape[0] - len(moe.experts)

    def agree_on_codes(self, experts: ExpertsLayer | AdaptedExperts) -> bool:
        """Whether all ranks make the same codes of rows for the experts of a layer: collective."""
        said = list[str]()
        if isinstance(experts, ExpertsLayer):
            row = torch.linspace(-1, 1, self.config.hidden, device=self.device, dtype=self.dtype)
            every = (experts.quantized(rows, row.unsqueeze(0)) for rows in _PROBED)
            said = ["" if one is None else _digest(one) for one in every]
        alike = all(one == said for one in self.comm.gather_objects(said))
        return alike and any(said)

    def expert_slots(self, moe: MoeNode) -> Tensor | None:
        """[experts + shared slots] int32: of each its slot on this rank, −1 where another has it;
        None where this rank has all."""
        here, held = self.shards.experts, len(moe.experts)
        if here.size == 1:
            return None
        local = self.placement.local(here.rank)
        local += range(held, held + self.shared_slots(moe))
        return torch.tensor(local, dtype=torch.int32, device=self.device)

    def experts(self, moe: MoeNode) -> ExpertsLayer | AdaptedExperts:
        """The routed experts of a layer, and the shared ones where they are slots after them."""
        at = (moe.layer, EXPERTS)
        if self.config.hybrid is not None:
            limited, facts = self.ops(*at).experts_limited, self.bound.facts("experts_limited", *at)
            source = LayerExperts(self, moe, facts.weight_format)
            return self._packed(ExpertsLayer(limited, source, facts, self.config.hybrid.limit))
        if not self.bound.has("experts", *at):  # they are products of their own
            pairs = [(self.linear(e.gate_up), self.linear(e.down)) for e in moe.experts]
            return AdaptedExperts(self.ops(*at), *zip(*pairs, strict=True))
        kernel, facts = self.ops(*at).experts, self.bound.facts("experts", *at)
        source = LayerExperts(self, moe, facts.weight_format)
        return self._packed(ExpertsLayer(kernel, source, facts))


def _digest(codes: Codes) -> str:
    """Of their bits."""
    parts = (t.contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes() for t in codes)
    return sha256(b"".join(parts)).hexdigest()
