"""Quantised weights of a checkpoint: which tensors make up a Linear, and how a part is cut out.

`read_part` serves the layouts that the core knows. A plugin's `QuantLoader.read` is a function of
the same signature, `(PartRequest) -> WeightPart`, which may call it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ds_runtime.checkpoint.gguf.blocks import BLOCKS
from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.description.tree import Stored
from ds_runtime.errors import CheckpointError, blaming
from ds_runtime.ops.contract import DENSE, Encoding, QuantLoader, load_attr
from ds_runtime.ops.weight import WeightPart
from ds_runtime.weights.layouts import FLOATS, Expected, expected, read_layout
from ds_runtime.weights.place import PartRequest as PartRequest
from ds_runtime.weights.place import Place as Place


def _blaming(loader: QuantLoader, what: str) -> AbstractContextManager[None]:
    who = f"loader {loader.name} of plugin {loader.provider or 'unknown'} ({loader.read}), {what},"
    return blaming(who, "ds-runtime plan --explain linear lists how each weight is stored")


@dataclass(frozen=True, slots=True)
class Quant:
    """A loader with the quantization_config of the checkpoint that it accepted.

    encoding: path of a Linear → how the checkpoint stores it.
    """

    loader: QuantLoader
    quantization: Mapping[str, Any]
    encoding: Callable[[str], Encoding]
    read: Callable[[PartRequest], WeightPart]

    @staticmethod
    def open(loader: QuantLoader, quantization: Mapping[str, Any]) -> Quant:
        """The loader with its read function imported."""
        encoding = functools.cache(loader.encodings(quantization))
        with _blaming(loader, "its function read"):
            read = load_attr(loader.read)

        def named(request: PartRequest) -> WeightPart:
            with _blaming(loader, f"reading {request.module}"):
                part: WeightPart = read(request)
            return part

        return Quant(loader, quantization, encoding, named)

    def format_of(self, module: str) -> str:
        """The weight format of one Linear in the checkpoint."""
        return self.encoding(module).format

    def encoding_of(self, stored: Stored) -> Encoding:
        """How the checkpoint stores a weight."""
        return self.encoding(stored.module) if stored.format else DENSE

    def place(self, checkpoint: Checkpoint, stored: Stored) -> Place:
        """The tensors that hold `stored`, whether or not they exist; optional ones if they do."""
        encoding = self.encoding_of(stored)
        rows, cols = (*stored.shape, 1)[:2]
        if stored.bare:
            return Place({"weight": stored.module}, (rows, cols))
        if (stack := stored.stack) is not None:
            stacked = {
                c: stack.module + n.removeprefix("weight")
                for c, n in encoding.tensors.items()
                if c not in encoding.optional  # static scales of activations: they go by expert
            }
            if stacked["weight"] in checkpoint:
                shape = (stack.parts * rows, cols)
                return Place(stacked, shape, stack.number, stack.part * rows)
        tensors = {
            component: name
            for component, name in self.named(stored.module, encoding).items()
            if component not in encoding.optional or name in checkpoint
        }
        return Place(tensors, (rows, cols))

    def unread(self, module: str) -> list[str]:
        """Tensors of a Linear that may be in the checkpoint and say nothing."""
        return [f"{module}.{name}" for name in self.encoding(module).unread]

    @staticmethod
    def named(module: str, encoding: Encoding) -> dict[str, str]:
        """Component → tensor of one Linear."""
        above = module.rpartition(".")[0]
        return {
            component: f"{above}.{name[3:]}" if name.startswith("../") else f"{module}.{name}"
            for component, name in encoding.tensors.items()
        }


def wrong_component(checkpoint: Checkpoint, name: str, want: Expected, stack: bool) -> str | None:
    """What is wrong with one tensor, as a sentence. `stack`: it has a leading dimension more."""
    entry = checkpoint.entry(name)
    found = entry.shape[1:] if stack else entry.shape
    if found not in want.shapes:
        wanted = want.shapes[0]
        said = ["experts", *wanted] if stack else list(wanted)
        return f"{name}: shape {list(entry.shape)} found, {said} expected from config.json"
    blocks = want.dtypes == FLOATS and entry.dtype in BLOCKS  # read as numbers
    if entry.dtype not in want.dtypes and not blocks:
        return f"{name}: dtype {entry.dtype} found, {' or '.join(want.dtypes)} expected"
    return None


def wrong_components(
    checkpoint: Checkpoint, encoding: Encoding, place: Place, shape: tuple[int, ...] | None = None
) -> list[str]:
    """Complaints about the tensors of one module, where their shapes are known. shape: of the
    module, where that is no matrix."""
    if (wanted := expected(encoding, place.shape if shape is None else shape)) is None:
        return []
    found = (
        wrong_component(checkpoint, name, wanted[component], place.index is not None)
        for component, name in place.tensors.items()
    )
    return [complaint for complaint in found if complaint is not None]


def read_part(request: PartRequest) -> WeightPart:
    """Returns a WeightPart with exactly the rows and columns of `request`, in its format's
    canonical form.

    It holds the rows and columns of scales that cover the part. `offset` says where the part begins
    inside its first block. Raises CheckpointError for tensors of wrong shape or dtype, and for
    scales that are no numbers.
    """
    for wrong in wrong_components(request.checkpoint, request.encoding, request.place):
        raise CheckpointError(wrong)
    return read_layout(request)
