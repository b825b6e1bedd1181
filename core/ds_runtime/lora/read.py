"""The tensors of a PEFT folder: one low-rank pair per Linear, checked before any is read."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.checkpoint.tensors import read_header
from ds_runtime.description.adapter import PREFIX, WEIGHTS, PeftConfig, check_weights
from ds_runtime.description.tree import EXPERTS, Stored
from ds_runtime.errors import CheckpointError
from ds_runtime.weights.layouts import FLOATS

_A, _B = ".lora_A.weight", ".lora_B.weight"
_UNSERVED = {
    ".lora_magnitude_vector": "DoRA",
    ".lora_embedding_A": "LoRA of embeddings",
    ".lora_embedding_B": "LoRA of embeddings",
    ".modules_to_save.": "a module trained whole (modules_to_save)",
    ".bias": "a bias",
}


@dataclass(frozen=True, slots=True)
class Pair:
    """Where the pair of one Linear lies. a: [rank, in], b: [out, rank] of the tensors named.

    expert: (index, experts) where the tensors hold those of a whole layer, as PEFT stacks them. A
    [experts · rank, in] expert by expert, B [out, rank · experts] with the expert last. rows: of B,
    where gate and up share it.
    """

    a: str
    b: str
    rank: int
    scaling: float
    expert: tuple[int, int] | None = None
    rows: slice | None = None


class Adapter:
    """A PEFT folder, open. `pairs`: by module of the checkpoint, in its names.

    Raises CheckpointError that names the tensor, what was found and what was expected.
    `modules`: the Linears of the model, whose shapes the pairs must fit.
    """

    def __init__(self, folder: Path, modules: Mapping[str, Stored]) -> None:
        self.config = PeftConfig.load(folder)
        path = folder / WEIGHTS
        check_weights(path)
        self.path = path
        self._modules = modules
        self._files = Checkpoint(folder, read_header(path))
        self._held: dict[str, Tensor] = {}  # what the last pair was made of
        self.pairs: dict[str, Pair] = {}
        found = dict[str, set[str]]()
        for name in self._files.names:
            self._sort(name, found)
        if not found:
            raise CheckpointError(f"{path}: holds no lora_A and lora_B: nothing to add")
        for module, halves in found.items():
            self._check_halves(module, halves)
            self._pair(module)

    def _sort(self, name: str, found: dict[str, set[str]]) -> None:
        """Put one tensor to its module, or refuse it."""
        for mark, what in _UNSERVED.items():
            if mark in name:
                raise CheckpointError(
                    f"{self.path}: tensor {name} is {what}, which is not supported; serve a "
                    "merged checkpoint (merge_and_unload) instead"
                )
        module = name.removeprefix(PREFIX)
        for half in (_A, _B):
            if module.endswith(half):
                halves = found.setdefault(module.removesuffix(half), set())
                if half in halves:
                    raise CheckpointError(
                        f"{self.path}: {module} is there twice, with and without {PREFIX}; remove "
                        "one"
                    )
                halves.add(half)
                return
        if module.endswith(".base_layer.weight"):  # PEFT adds the base's own head and embedding
            self._check_base(name, module.removesuffix(".base_layer.weight"))
            return
        raise CheckpointError(
            f"{self.path}: tensor {name} is not expected; those of an adapter end with {_A} or {_B}"
        )

    def _check_base(self, name: str, module: str) -> None:
        stored, shape = self._modules.get(module), self._files.entry(name).shape
        if stored is None or stored.shape != shape:
            wanted = "none" if stored is None else list(stored.shape)
            raise CheckpointError(
                f"{self.path}: {name}: shape {list(shape)} found, {wanted} in the base: the "
                "vocabulary was resized; serve a merged checkpoint instead"
            )

    def _check_halves(self, module: str, halves: set[str]) -> None:
        for mine, other in ((_A, _B), (_B, _A)):
            if mine not in halves:
                raise CheckpointError(
                    f"{self.path}: {module}{mine} is missing; {module}{other} is there: "
                    "save the adapter again"
                )

    def _pair(self, module: str) -> None:
        """Check the shapes of one module's tensors and note its pair, or its experts' pairs."""
        stack = module.removesuffix(".base_layer")
        if stack.endswith(f".{EXPERTS}"):
            self._stacked(module, stack)
            return
        stored = self._modules.get(module)
        if stored is None:
            near = difflib.get_close_matches(module, self._modules, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise CheckpointError(
                f"{self.path}: {module} is no Linear of this model that takes an adapter{hint}"
            )
        rank = self.config.rank_of(module)
        out, width = stored.shape
        self._expect(module, _A, (rank, width))
        self._expect(module, _B, (out, rank))
        a, b = (self._tensor(module, half) for half in (_A, _B))
        self._add(module, Pair(a, b, rank, self.config.scaling(module)))

    def _add(self, module: str, pair: Pair) -> None:
        """Note a module's only pair."""
        if module in self.pairs:
            other = self.pairs[module].a
            raise CheckpointError(
                f"{self.path}: {pair.a} and {other} are both of {module}; an adapter has one pair "
                "for each Linear"
            )
        self.pairs[module] = pair

    def _tensor(self, module: str, half: str) -> str:
        name = f"{PREFIX}{module}{half}"
        return name if name in self._files else module + half

    def _expect(self, module: str, half: str, shape: tuple[int, int]) -> None:
        name = self._tensor(module, half)
        entry = self._files.entry(name)
        if entry.dtype not in FLOATS:
            raise CheckpointError(
                f"{self.path}: {name}: dtype {entry.dtype} found, {' or '.join(FLOATS)} expected"
            )
        if entry.shape == shape:
            return
        at = 0 if half == _A else 1
        base = len(entry.shape) == 2 and entry.shape[at] == shape[at]
        why = (
            "the adapter is for another base model"
            if base
            else f"r (or rank_pattern) of adapter_config.json says rank {shape[at]}"
        )
        raise CheckpointError(
            f"{self.path}: {name}: shape {list(entry.shape)} found, {list(shape)} expected: {why}"
        )

    def _stacked(self, module: str, stack: str) -> None:
        """Pairs of all experts of a layer that were trained as one parameter each.

        PEFT names both parameters alike, one wrapped in the other: shapes tell them apart.
        """
        a, b = (self._tensor(module, half) for half in (_A, _B))
        gate, down = (self._modules.get(f"{stack}.0.{n}_proj") for n in ("gate", "down"))
        if gate is None or down is None:
            raise CheckpointError(f"{self.path}: {module}: this model has no experts there")
        experts = sum(m.startswith(f"{stack}.") for m in self._modules) // 3
        inter, hidden = gate.shape
        wide, tall = self._files.entry(a).shape[-1:], self._files.entry(b).shape[:1]
        is_down = (*wide, *tall) == (inter, hidden)
        parameter = f"{stack}.{'down' if is_down else 'gate_up'}_proj"
        rank = self.config.rank_of(parameter)
        out, width = (hidden, inter) if is_down else (2 * inter, hidden)
        self._expect(module, _A, (experts * rank, width))
        self._expect(module, _B, (out, rank * experts))
        scaling = self.config.scaling(parameter)
        for e in range(experts):
            for name, rows in (
                (("down", None),)
                if is_down
                else (("gate", slice(0, inter)), ("up", slice(inter, 2 * inter)))
            ):
                pair = Pair(a, b, rank, scaling, (e, experts), rows)
                self._add(f"{stack}.{e}.{name}_proj", pair)

    def read(self, module: str) -> tuple[Tensor, Tensor]:
        """(A [rank, in], B [out, rank] times the scaling) in float32.

        Raises CheckpointError for NaN and infinity.
        """
        pair = self.pairs[module]
        self._held = {n: t for n, t in self._held.items() if n in (pair.a, pair.b)}
        a, b = self._values(pair.a), self._values(pair.b)
        if pair.expert is not None:
            index, experts = pair.expert
            a = a.view(experts, pair.rank, -1)[index]
            b = b.view(-1, pair.rank, experts)[:, :, index]
        if pair.rows is not None:
            b = b[pair.rows]
        return a, b * pair.scaling

    def _values(self, name: str) -> Tensor:
        if name not in self._held:
            values = self._files.read(name).to(torch.float32)
            if not torch.isfinite(values).all():
                raise CheckpointError(
                    f"{self.path}: {name} holds NaN or infinity: the training diverged, or the "
                    "file is damaged"
                )
            self._held[name] = values
        return self._held[name]

    def close(self) -> None:
        """Close the file."""
        self._files.close()
