"""The kit for loaders: a plugin's own samples as files, read back whole and in every cut.

A loader is right if what it reads means what the plugin's reference says, and if any part of a
Linear is that part of the whole. `ds-runtime conform` and the pytest plugin ask these questions.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import Tensor

from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.checkpoint.tensors import SINGLE
from ds_runtime.description.tree import Axis, Stack, Stored
from ds_runtime.errors import CheckpointError, PluginError, UnsupportedError, named
from ds_runtime.ops.contract import DENSE, QuantLoader, load_attr
from ds_runtime.ops.formats import FORMATS
from ds_runtime.ops.weight import WeightPart
from ds_runtime.parallel.layout import Shard
from ds_runtime.weights.place import LoaderSample, PartRequest, Place
from ds_runtime.weights.quant import Quant
from ds_runtime.weights.rows import with_rows
from ds_runtime_kit.checks.conformance import CaseResult
from ds_runtime_kit.loaders.forms import wrong_form

_LINEAR, _EXPERT = "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.experts.1.gate_proj"
_LINEARS = (  # that formats leave dense
    "lm_head",
    *(f"model.layers.0.self_attn.{n}" for n in ("kv_b_proj", "q_a_proj", "kv_a_proj_with_mqa")),
    *(f"model.layers.0.mlp.{n}_proj" for n in ("gate", "up", "down")),
    *(_LINEAR, _EXPERT),
)
_STACK = "model.layers.1.mlp.experts.gate_up_proj"
_SHAPES = ((48, 64), (33, 70), (7, 160), (130, 512), (128, 384))
_SIZES = (2, 3, 4, 8)  # of groups of ranks
_READERS = 6  # threads that read experts side by side
_MOST = 1e-6  # error of float32 arithmetic, of the largest value
_NOBODY = {"quant_method": "a-method-that-no-checkpoint-has"}


class _WrongForm(Exception):
    """A part that kernels could not read."""


@dataclass(frozen=True)
class Written:
    """One sample in a file, and how it is read."""

    label: str
    sample: LoaderSample
    quant: Quant
    stored: Stored
    checkpoint: Checkpoint
    place: Place

    @property
    def shape(self) -> tuple[int, int]:
        """Of the Linear."""
        return (self.stored.shape[0], self.stored.shape[1])

    def read(self, rows: slice, cols: slice) -> WeightPart:
        """A part, as loading asks for it; _WrongForm if it is none of its format."""
        module = self.stored.module
        encoding = self.quant.encoding(module)
        request = PartRequest(
            self.checkpoint, self.quant.quantization, module, encoding, self.place, rows, cols
        )
        part = self.quant.read(request)
        if wrong := wrong_form(part, request):
            raise _WrongForm(f"{_cut(rows, cols)}: {wrong}")
        return part

    def whole(self) -> Tensor:
        """Values of all rows and columns: float32."""
        rows, cols = self.shape
        return self.read(slice(0, rows), slice(0, cols)).dequantise()


def check_loader(loader: QuantLoader, questions: Collection[str] = ()) -> list[CaseResult]:
    """Returns what each question (default: all of `QUESTIONS`) found, sample by sample.

    A loader without samples fails: nothing could be asked.
    """
    with TemporaryDirectory() as folder:
        try:
            written = list(_written(loader, Path(folder)))
        except Exception as e:
            return [_result(loader, "samples", "", "values", _raised(e))]
        if not written:
            return [_result(loader, "samples", "", "values", _no_samples(loader))]
        found = []
        for name, ask in QUESTIONS.items():
            if not questions or name in questions:
                found += [_asked(loader, w, name, ask) for w in _subjects(name, written)]
        for each in written:
            each.checkpoint.close()
        return found


def _no_samples(loader: QuantLoader) -> str:
    if loader.samples:
        shapes = ", ".join(map(str, map(list, _SHAPES)))
        return f"samples {loader.samples} gives none for {_LINEAR} or {_EXPERT} of {shapes}"
    return (
        "brings no samples, so that nothing can be asked: name a function in QuantLoader.samples "
        "(docs/writing-a-plugin.md)"
    )


def _subjects(name: str, written: list[Written]) -> list[Written]:
    """The samples that a question is about: stacks are of experts."""
    return [w for w in written if (w.place.index is not None) == (name == "stacks")]


def _asked(
    loader: QuantLoader, written: Written, name: str, ask: Callable[[Written], str]
) -> CaseResult:
    try:
        said = ask(written)
    except _WrongForm as e:
        said = str(e)
    except Exception as e:
        said = _raised(e)
    return _result(loader, written.label, written.stored.format, name, said)


def _raised(error: Exception) -> str:
    """What was raised, and where in the plugin's own code unless it is meant for people."""
    if isinstance(error, CheckpointError | UnsupportedError):
        return f"raised {named(error)}"
    own = error.__cause__ if isinstance(error, PluginError) and error.__cause__ else error
    return "raised\n" + "".join(traceback.format_exception(own, limit=-3, chain=False))


def _result(loader: QuantLoader, case: str, format: str, check: str, said: str) -> CaseResult:
    return CaseResult(loader.full_name, "loader", case, format or "none", 0, _MOST, said, check)


def _written(loader: QuantLoader, folder: Path) -> Iterator[Written]:
    """Every sample of every shape as a file, and those of experts as stacks of three, too."""
    if not loader.samples:
        return
    make = load_attr(loader.samples)
    for number, shape in enumerate(_SHAPES):
        rows, cols = shape
        for module in (_LINEAR, _EXPERT):
            samples = list(make(draw(rows, cols, number), module))
            for at, sample in enumerate(samples):
                label = f"{module.rpartition('.')[2]} {[rows, cols]}"
                label += f" #{at + 1}" if len(samples) > 1 else ""
                yield _write(loader, sample, module, shape, label, folder)
            if samples and number < 2 and module == _LINEAR:
                yield from _dense(loader, samples[0], shape, folder)
        double = (list(make(draw(2 * rows, cols, 9 + n), _EXPERT)) for n in range(3))
        for trio in zip(*double, strict=False):
            yield from _stack(loader, list(trio), shape, folder)


def _dense(
    loader: QuantLoader, sample: LoaderSample, shape: tuple[int, int], folder: Path
) -> Iterator[Written]:
    """A Linear of the same checkpoint that the loader leaves dense: `read` is asked for it, too."""
    encoding_of = loader.encodings(sample.quantization)
    module = next((m for m in _LINEARS if encoding_of(m) == DENSE), None)
    if module is not None:
        values = draw(*shape, 0).to(torch.bfloat16)
        plain = LoaderSample(sample.quantization, {"weight": values}, values.float())
        label = f"{module.rpartition('.')[2]} {list(shape)}, dense"
        yield _write(loader, plain, module, shape, label, folder)


def draw(rows: int, cols: int, seed: int) -> Tensor:
    """Values of a Linear: rows of several sizes, an outlier: [rows, cols] float32."""
    own = torch.Generator().manual_seed(seed)
    values: Tensor = torch.randn(rows, cols, generator=own) / cols**0.5
    values *= torch.rand(rows, 1, generator=own) + 0.5
    values[-1, 0] *= 8
    return values


def _opened(
    loader: QuantLoader, sample: LoaderSample, module: str, folder: Path
) -> tuple[Quant, Path]:
    """(the loader with the sample's config, a new folder)."""
    quant = Quant.open(loader, json.loads(json.dumps(dict(sample.quantization))))
    encoding = quant.encoding(module)
    needed = encoding.tensors.keys() - encoding.optional
    given = sample.tensors.keys()
    if not needed <= given <= encoding.tensors.keys():
        raise ValueError(
            f"samples gives {sorted(given)} for {module}, its encoding names {sorted(needed)}"
        )
    if sample.values.dtype != torch.float32 or not bool(torch.isfinite(sample.values).all()):
        raise ValueError(f"samples of {module}: values are no finite float32 numbers")
    into = folder / str(len(list(folder.iterdir())))
    into.mkdir()
    return quant, into


def _write(
    loader: QuantLoader,
    sample: LoaderSample,
    module: str,
    shape: tuple[int, int],
    label: str,
    folder: Path,
) -> Written:
    """One Linear in a file of its own."""
    quant, into = _opened(loader, sample, module, folder)
    if tuple(sample.values.shape) != shape:
        raise ValueError(
            f"samples of {module}: values are {list(sample.values.shape)}, expected {list(shape)}"
        )
    names = Quant.named(module, quant.encoding(module))
    save_file({names[c]: t.contiguous() for c, t in sample.tensors.items()}, into / SINGLE)
    stored = Stored(module, shape, quant.format_of(module), Axis(0, "width"))
    checkpoint = Checkpoint(into)
    return Written(label, sample, quant, stored, checkpoint, quant.place(checkpoint, stored))


def _stack(
    loader: QuantLoader, trio: list[LoaderSample], shape: tuple[int, int], folder: Path
) -> Iterator[Written]:
    """Gate over up of three experts in one tensor, of which the second is read: gate, then up."""
    quant, into = _opened(loader, trio[1], _EXPERT, folder)
    encoding = quant.encoding(_EXPERT)
    names = {c: n for c, n in encoding.tensors.items() if c not in encoding.optional}
    if not all(n.startswith("weight") for n in names.values()):
        return  # no checkpoint has such stacks
    tensors = {
        _STACK + n.removeprefix("weight"): _stacked([s.tensors[c] for s in trio])
        for c, n in names.items()
    }
    save_file(tensors, into / SINGLE)
    for first, name in enumerate(("gate_proj", "up_proj")):
        module = _EXPERT.replace("gate_proj", name)
        stack = Stack(_STACK, 1, first, 2)
        stored = Stored(module, shape, quant.format_of(module), Axis(0, "width"), stack=stack)
        rows = slice(first * shape[0], (first + 1) * shape[0])
        half = replace(trio[1], values=trio[1].values[rows])
        checkpoint = Checkpoint(into)
        place = quant.place(checkpoint, stored)
        yield Written(f"{name} {list(shape)}", half, quant, stored, checkpoint, place)


def _stacked(tensors: list[Tensor]) -> Tensor:
    """[n, ...], by their bytes: not every dtype can be joined."""
    shape, dtype = tensors[0].shape, tensors[0].dtype
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in tensors]
    joined: Tensor = torch.stack(flat).view(dtype).reshape(len(tensors), *shape)
    return joined


def _accepts(w: Written) -> str:
    """It knows its own config, gives the same answer twice, and leaves others' alone."""
    loader, quantization, module = w.quant.loader, w.quant.quantization, w.stored.module
    said = json.dumps(quantization)
    if not loader.accepts(quantization):
        return f"accepts denies the sample's quantization_config {said}"
    if loader.accepts(_NOBODY):
        return f"accepts takes every checkpoint, {_NOBODY} too: ask for your quant_method"
    if loader.encodings(quantization)(module) != loader.encodings(quantization)(module):
        return f"encodings gives {module} another Encoding each time"
    if loader.refuse is not None and (refused := loader.refuse(quantization)):
        return f"accepts takes the quantization_config {said}, refuse says: {refused}"
    return ""


def _values(w: Written) -> str:
    """The whole Linear means what the sample says."""
    return _difference(w.whole(), w.sample.values, _MOST * float(w.sample.values.abs().max()))


def _slices(w: Written) -> str:
    """Any rows and columns are those of the whole."""
    whole = w.whole()
    for rows, cols in _cuts(w.shape):
        part = w.read(rows, cols)
        if said := _difference(part.dequantise(), whole[rows, cols]):
            return f"{_cut(rows, cols)} of the whole: {said}"
    return ""


def _cuts(shape: tuple[int, int]) -> Iterator[tuple[slice, slice]]:
    """Halves, edges, nothing, and anything."""
    rows, cols = shape
    every_row, every_col = slice(0, rows), slice(0, cols)
    yield from ((slice(rows // 2, rows), every_col), (every_row, slice(cols // 2, cols)))
    yield from ((slice(rows - 1, rows), slice(cols - 1, cols)), (slice(rows, rows), every_col))
    yield from ((every_row, slice(c, c + 1)) for c in (1, cols // 3))
    own = torch.Generator().manual_seed(rows * cols)
    for _ in range(8):
        r, c = (sorted(torch.randperm(n + 1, generator=own)[:2].tolist()) for n in shape)
        yield slice(*r), slice(*c)


def _shards(w: Written) -> str:
    """What ranks hold is their share of the whole, read by several threads and kept."""
    whole = w.whole()
    rows, cols = w.shape
    for size in _SIZES:
        ranks = [Shard(rank, size) for rank in range(size)]
        cuts = {"vocabulary": [(s.padded_slice(rows), slice(0, cols)) for s in ranks]}
        if rows % size == 0:
            cuts["rows"] = [(s.slice(rows, "rows"), slice(0, cols)) for s in ranks]
        if cols % size == 0:
            cuts["columns"] = [(slice(0, rows), s.slice(cols, "columns")) for s in ranks]
        for name, each in cuts.items():
            with ThreadPoolExecutor(_READERS) as pool:
                parts = list(pool.map(lambda cut: w.read(*cut), each))
            for rank, (part, cut) in enumerate(zip(parts, each, strict=True)):
                if said := _share_differs(part, whole[cut], -(-rows // size), name):
                    return f"rank {rank} of {size}, by {name}: {said}"
    return ""


def _share_differs(part: WeightPart, want: Tensor, padded: int, name: str) -> str:
    """ "" if a rank's part is its share, also when rows are added to fill a vocabulary."""
    if said := _difference(part.dequantise(), want):
        return said
    if name != "vocabulary" or part.format not in FORMATS:
        return ""
    below = torch.zeros(padded - want.shape[0], want.shape[1])
    said = _difference(with_rows(part, padded).dequantise(), torch.cat((want, below)))
    return said and f"filled up to {padded} rows: {said}"


def _stacks(w: Written) -> str:
    """An expert out of a stack, gate above up, is that expert; or refused with a sentence."""
    try:
        whole = w.whole()
    except (CheckpointError, UnsupportedError):
        return ""
    most = _MOST * float(w.sample.values.abs().max())
    if said := _difference(whole, w.sample.values, most):
        return f"of three experts in one tensor, the second: {said}"
    return _slices(w)


QUESTIONS: Mapping[str, Callable[[Written], str]] = {
    "accepts": _accepts,
    "values": _values,
    "slices": _slices,
    "shards": _shards,
    "stacks": _stacks,
}


def _cut(rows: slice, cols: slice) -> str:
    return f"rows {rows.start}:{rows.stop}, columns {cols.start}:{cols.stop}"


def _difference(got: Tensor, want: Tensor, most: float = 0.0) -> str:
    """How values differ by more than `most`, or ""."""
    if got.shape != want.shape:
        return f"shape {list(got.shape)}, expected {list(want.shape)}"
    wrong = ~((got - want).abs() <= most)
    if not bool(wrong.any()):
        return ""
    row, col = wrong.nonzero()[0].tolist()
    said = f"the first at [{row}, {col}]: {got[row, col]:.6g}, expected {want[row, col]:.6g}"
    return f"{int(wrong.sum())} of {wrong.numel()} values differ, {said}"
