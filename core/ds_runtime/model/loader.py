"""From checkpoint to layers: reads this rank's part of each weight and packs it, one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ds_runtime.errors import UnsupportedError
from ds_runtime.model.checkpoint import Checkpoint
from ds_runtime.model.config import ModelConfig
from ds_runtime.model.layers import Absorb, Embedding, Experts, Linear
from ds_runtime.model.manifest import COLS, ROWS, VOCAB, Stored, stored_modules
from ds_runtime.model.quant import PartRequest, Place, Quant
from ds_runtime.model.sites import vocab_rows
from ds_runtime.model.verify import check_checkpoint
from ds_runtime.ops.bound import BoundOps
from ds_runtime.ops.table import Ops
from ds_runtime.ops.weight import Weight, WeightPart
from ds_runtime.parallel.layout import Shard
from ds_runtime.platform.spec import Communicator

_Layer = TypeVar("_Layer", Linear, Absorb, Experts)


class Loader:
    """What model classes build themselves from: bound ops, the communicator, packed weights.

    Modules are named as in the checkpoint, below `model.layers.N.`. Construction checks every
    tensor's name, shape and dtype; nothing is read before a layer asks.
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
    ) -> None:
        self.config = config
        self.quant = quant
        self.checkpoint = checkpoint
        self.bound = bound
        self.comm = comm
        self.device = device
        self.dtype = dtype
        self.shard = Shard(comm.rank, comm.size)
        self.held_bytes = 0  # of all that was made so far: packed weights and plain tensors
        self.modules: Mapping[str, Stored] = stored_modules(config, quant.format_of)
        self.places: Mapping[str, Place] = check_checkpoint(checkpoint, config, quant, self.modules)

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
                reads = 2 if self.config.tie_embeddings and name == "model.embed_tokens" else 1
                total += int(reads * size / (self.shard.size if stored.cut in (ROWS, VOCAB) else 1))
        return total

    def _read(self, module: str, rows: slice | None = None) -> Tensor:
        """A plain tensor, or rows of it."""
        (name,) = self.places[module].names
        return self.checkpoint.read(name, rows)

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
        return self._held(self._read(at).to(self.device, self.dtype))

    def router(self, layer: int) -> Tensor:
        """[experts, hidden] float32."""
        weight = self._read(f"model.layers.{layer}.mlp.gate")
        return self._held(weight.to(self.device, torch.float32))

    def router_bias(self, layer: int) -> Tensor:
        """[experts] float32."""
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        return self._held(self._read(name).to(self.device, torch.float32))

    def embedding(self) -> Embedding:
        """This rank's rows of the vocabulary, in the compute dtype."""
        rows = self.shard.padded_slice(self.config.vocab_size)
        table = self._held(self._read("model.embed_tokens", rows).to(self.device, self.dtype))
        return Embedding(self.ops(-1, "embed_tokens"), table, rows.start)

    def head(self) -> Linear:
        """This rank's rows of the head, filled up with zero rows so that all ranks have as many."""
        config = self.config
        rows = self.shard.padded_slice(config.vocab_size)
        name = "model.embed_tokens" if config.tie_embeddings else "lm_head"
        values = self._read(name, rows).to(self.device)
        short = vocab_rows(config, self.shard.size) - values.shape[0]
        if short:
            values = torch.cat((values, values.new_zeros(short, config.hidden)))
        part = WeightPart("lm_head", "dense", (values.shape[0], config.hidden), {"weight": values})
        kernel = self.ops(-1, "lm_head").linear
        head = Linear(kernel, Weight((part,)), self.bound.facts("linear", -1, "lm_head"))
        return self._packed(head)

    def part(self, module: str) -> WeightPart:
        """This rank's part of one Linear, on the device."""
        stored = self.modules[module]
        rows, cols = (slice(0, n) for n in stored.shape)
        if stored.cut == ROWS:
            rows = self.shard.slice(stored.shape[0], f"rows of {module}")
        elif stored.cut == COLS:
            cols = self.shard.slice(stored.shape[1], f"columns of {module}")
        assert stored.cut != VOCAB
        request = PartRequest(
            self.checkpoint,
            self.quant.quantization,
            module,
            stored.format,
            self.places[module],
            rows,
            cols,
        )
        part = self.quant.read(request)
        if not self.config.rope_interleave:
            part = self._interleaved(part)
        tensors = {name: t.to(self.device) for name, t in part.tensors.items()}
        return replace(part, tensors=tensors)

    def weight(self, layer: int, modules: Sequence[str]) -> Weight:
        """The parts of several Linears, one below the other."""
        return Weight(tuple(self.part(f"model.layers.{layer}.{m}") for m in modules))

    def linear(self, layer: int, module: str, parts: Sequence[str] = ()) -> Linear:
        """A packed Linear; `parts` are the checkpoint's modules if it joins several."""
        kernel = self.ops(layer, module).linear
        facts = self.bound.facts("linear", layer, module)
        return self._packed(Linear(kernel, self.weight(layer, parts or (module,)), facts))

    def absorb(self, layer: int, module: str) -> Absorb:
        """kv_b_proj, packed for expansion and absorption."""
        kernel = self.ops(layer, module).mla_absorb
        facts = self.bound.facts("mla_absorb", layer, module)
        return self._packed(Absorb(kernel, self.weight(layer, (module,)), facts))

    def experts(self, layer: int) -> Experts:
        """The routed experts of a layer."""
        kernel = self.ops(layer, "mlp.experts").experts
        facts = self.bound.facts("experts", layer, "mlp.experts")
        return self._packed(Experts(kernel, LayerExperts(self, layer), facts))

    def _interleaved(self, part: WeightPart) -> WeightPart:
        """Rows of rotated dims reordered from (all first halves, all second halves) to pairs."""
        config = self.config
        name = part.name.rpartition(".")[2]
        if name not in ("q_proj", "q_b_proj", "kv_a_proj_with_mqa"):
            return part
        if part.format != "dense":
            raise UnsupportedError(
                f"config.json: rope_interleave false with {part.format} weights is not supported; "
                "convert the checkpoint to bfloat16"
            )
        head = config.latent if name == "kv_a_proj_with_mqa" else config.qk_head
        plain, half = head - config.qk_rope, config.qk_rope // 2
        pairs = plain + torch.arange(config.qk_rope).view(2, half).T.reshape(-1)
        order = torch.cat((torch.arange(plain), pairs))  # new row → old row, within a head
        heads = torch.arange(part.shape[0] // head)
        rows = (heads[:, None] * head + order).reshape(-1)
        return replace(part, tensors={"weight": part.tensors["weight"][rows]})


class LayerExperts:
    """ExpertSource over a checkpoint: reads an expert when asked, keeps nothing."""

    def __init__(self, loader: Loader, layer: int) -> None:
        config = loader.config
        self.num_experts = config.experts
        self.hidden = config.hidden
        self.intermediate = config.moe_intermediate // loader.shard.size
        self._at = f"model.layers.{layer}.mlp.experts"
        self.format = loader.modules[f"{self._at}.0.gate_proj"].format
        self._loader = loader

    def expert(self, index: int) -> tuple[Weight, Weight, Weight]:
        """(gate, up, down) of one expert, this rank's width."""
        gate, up, down = (
            Weight((self._loader.part(f"{self._at}.{index}.{name}"),))
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        return gate, up, down
