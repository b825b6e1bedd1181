"""Weight formats of a checkpoint: which tensors make up a Linear, and how a part is cut out.

`read_part` serves the built-in loaders. A plugin's `QuantLoader.read` is a function of the same
signature, `(PartRequest) -> WeightPart`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_runtime.errors import CheckpointError
from ds_runtime.model.checkpoint import Checkpoint
from ds_runtime.model.manifest import Stored
from ds_runtime.ops.spec import QuantLoader, load_attr
from ds_runtime.ops.weight import WeightPart

if TYPE_CHECKING:
    from ds_runtime.assemble import Assembly

FLOATS = ("BF16", "F16", "F32", "F64")
_SCALES = ("F32", "BF16", "F16", "F8_E8M0", "U8")


@dataclass(frozen=True, slots=True)
class Place:
    """Where one Linear lies. names: tensors by component, the weight first.

    shape: of the matrix that the names hold. index: which matrix of a stack, or None.
    first_row: where the Linear begins in that matrix (gate and up of fused experts share one).
    """

    names: tuple[str, ...]
    shape: tuple[int, int]
    index: int | None = None
    first_row: int = 0


@dataclass(frozen=True, slots=True)
class PartRequest:
    """Read these rows and columns of one Linear. rows and cols count within the Linear."""

    checkpoint: Checkpoint
    quantization: Mapping[str, Any]
    module: str
    format: str
    place: Place
    rows: slice
    cols: slice


@dataclass(frozen=True, slots=True)
class Quant:
    """A loader with the quantization_config of the checkpoint that it accepted."""

    loader: QuantLoader
    quantization: Mapping[str, Any]
    read: Callable[[PartRequest], WeightPart]

    @staticmethod
    def of(assembly: Assembly) -> Quant:
        """The loader that assembly chose, its read function imported."""
        loader = assembly.loader
        return Quant(loader, assembly.model.quantization, load_attr(loader.read))

    def format_of(self, module: str) -> str:
        """The weight format of one Linear."""
        return self.loader.format_of(self.quantization, module)

    def components(self, stored: Stored) -> tuple[str, ...]:
        """Tensor suffixes of a module: ("weight",) for everything that no kernel packs."""
        if not stored.format:
            return ("weight",)
        try:
            return self.loader.components[stored.format]
        except KeyError:
            raise CheckpointError(
                f"{stored.module}: loader {self.loader.name} says format {stored.format!r} but "
                f"names no tensors for it; it knows {', '.join(self.loader.components)}"
            ) from None

    def place(self, checkpoint: Checkpoint, stored: Stored) -> Place:
        """The tensors that hold `stored`, whether or not they exist."""
        components = self.components(stored)
        rows, cols = (*stored.shape, 1)[:2]
        if stored.expert is not None:
            layer, index = stored.expert
            name = stored.module.rpartition(".")[2]
            fused = "down_proj" if name == "down_proj" else "gate_up_proj"
            base = f"model.layers.{layer}.mlp.experts.{fused}"
            if base in checkpoint:
                names = tuple(base + c.removeprefix("weight") for c in components)
                total = rows if fused == "down_proj" else 2 * rows
                return Place(names, (total, cols), index, rows if name == "up_proj" else 0)
        if stored.module.endswith("e_score_correction_bias"):
            return Place((stored.module,), (rows, cols))
        return Place(tuple(f"{stored.module}.{c}" for c in components), (rows, cols))


def block_of(quantization: Mapping[str, Any]) -> tuple[int, int]:
    """(rows, columns) that one scale covers."""
    rows, cols = quantization["weight_block_size"]
    return int(rows), int(cols)


def expected(
    format: str, shape: tuple[int, ...], quantization: Mapping[str, Any]
) -> list[tuple[tuple[int, ...], tuple[str, ...]]] | None:
    """(shape, allowed dtypes) of each component; None for a format that only its loader knows."""
    if format in ("", "dense"):
        return [(shape, FLOATS)]
    if format == "fp8_block":
        block = block_of(quantization)
        grid = tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
        return [(shape, ("F8_E4M3",)), (grid, _SCALES)]
    return None


def check_component(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...], stack: bool
) -> str | None:
    """What is wrong with one tensor, as a sentence. `stack`: it has a leading dimension more."""
    entry = checkpoint.entry(name)
    found = entry.shape[1:] if stack else entry.shape
    if found != shape:
        wanted = ["experts", *shape] if stack else list(shape)
        return f"{name}: shape {list(entry.shape)} found, {wanted} expected from config.json"
    if entry.dtype not in dtypes:
        return f"{name}: dtype {entry.dtype} found, {' or '.join(dtypes)} expected"
    return None


def read_part(request: PartRequest) -> WeightPart:
    """A WeightPart of format "dense" or "fp8_block" with exactly the rows and columns asked.

    Of the scales it holds the rows and columns that cover the part; `offset` says where the part
    begins inside its first block. Raises CheckpointError for components of wrong shape or dtype.
    """
    place, ckpt = request.place, request.checkpoint
    wanted = expected(request.format, place.shape, request.quantization)
    assert wanted is not None, f"{request.module}: no built-in loader reads {request.format!r}"
    for name, (shape, dtypes) in zip(place.names, wanted, strict=True):
        if wrong := check_component(ckpt, name, shape, dtypes, place.index is not None):
            raise CheckpointError(wrong)
    rows = slice(request.rows.start + place.first_row, request.rows.stop + place.first_row)
    cols = request.cols
    size = (rows.stop - rows.start, cols.stop - cols.start)
    whole = None if size[1] == place.shape[1] else cols
    tensors = {"weight": ckpt.read(place.names[0], rows, whole, place.index)}
    if request.format == "dense":
        return WeightPart(request.module, "dense", size, tensors)
    block = block_of(request.quantization)
    down, across = _covering(rows, block[0]), _covering(cols, block[1])
    tensors["scale"] = ckpt.read(place.names[1], down, across, place.index)
    offset = (rows.start - down.start * block[0], cols.start - across.start * block[1])
    return WeightPart(request.module, request.format, size, tensors, block, offset)


def _covering(part: slice, block: int) -> slice:
    """The blocks that hold [start, stop)."""
    first = part.start // block
    return slice(first, max(first, -(-part.stop // block)))
