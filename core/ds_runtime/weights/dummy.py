"""Random weights in place of a checkpoint's, made on the device from config.json alone.

Every tensor that the model would read is there, in the format that quantization_config says. Codes,
scales and zero points are random. A decoded Linear has the standard deviation that keeps values of
order one through any number of layers. Routers choose their experts evenly, and the head's logits
have an entropy of about `_ENTROPY` nats. The same config gives the same tensors, on every device
and every rank.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from ds_runtime.checkpoint.shards import Checkpoint
from ds_runtime.checkpoint.tensors import DTYPES, StoredTensor
from ds_runtime.description.config import ModelConfig
from ds_runtime.description.tree import Stored
from ds_runtime.errors import UnsupportedError
from ds_runtime.ops.contract import Encoding
from ds_runtime.ops.formats import FORMATS
from ds_runtime.weights.layouts import expected
from ds_runtime.weights.quant import Quant

_ENTROPY = 4.0  # nats of the next token, about
_PERIOD = 4194301  # items after which content repeats: a prime, so that no rows are alike
_UNEVEN = math.sqrt((1 + 0.25) / 2)  # root mean square of scales of which half are halved
_BASE = {"e4m3": 60.0, "int8": 40.0, "int4": 2.2, "e2m1": 2.0}  # standard deviation of codes
_E2M1 = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between the values 0, 0.5, 1, 1.5, 2, 3, 4, 6
_ACTIVATION = {"e4m3": 2.0**-5, "int8": 2.0**-3, "int4": 2.0**-5, "e2m1": 2.0**-7}  # static scales
# Of biases; those of routers would leave some experts idle if they were wider.
_BARE = {"bias": 0.05, "correction": 0.002, "numbers": 0.05}
_ROWS = 4096  # of a table, after which they repeat
_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """What a tensor holds. kind: of `_KINDS`; dtype: as safetensors names it; value: its standard
    deviation or its exponent; numbers: what is not random."""

    kind: str
    dtype: str
    value: float = 0.0
    numbers: tuple[int, int] | None = None


class DummyCheckpoint(Checkpoint):
    """A checkpoint of random tensors: those that `modules` need, and no others.

    Raises UnsupportedError for a layout that only its loader knows.
    """

    def __init__(
        self, folder: Path, config: ModelConfig, quant: Quant, modules: Iterable[Stored]
    ) -> None:
        self._contents: dict[Path, RandomTensor] = {}
        self._patterns: dict[tuple[RandomTensor, torch.device], Tensor] = {}
        self._making = threading.Lock()
        entries: dict[str, StoredTensor] = {}
        for stored in modules:
            for name, content, shape in _tensors(config, quant, stored):
                size = math.prod(shape) * DTYPES[content.dtype].itemsize
                entries[name] = StoredTensor(Path(name), content.dtype, shape, 0, size)
                self._contents[Path(name)] = content
        super().__init__(folder, entries)

    def _bytes(
        self,
        entry: StoredTensor,
        begin: int,
        size: int,
        device: torch.device | str = "cpu",
        looks: bool = True,
    ) -> Tensor:
        """`size` bytes of a tensor from its byte `begin` on, made where they are wanted."""
        content, device = self._contents[entry.file], torch.device(device)
        pattern = self._pattern(content, device)
        item = DTYPES[content.dtype].itemsize
        first = crc32(str(entry.file).encode()) % max(1, pattern.shape[0] // item) * item
        start = begin if content.numbers else first + begin
        out, done = torch.empty(size, dtype=torch.uint8, device=device), 0
        while done < size:
            at = (start + done) % pattern.shape[0]
            count = min(size - done, pattern.shape[0] - at)
            out[done : done + count] = pattern[at : at + count]
            done += count
        if self.on_read is not None:
            with self._lock:
                self.on_read(size)
        return out

    def _pattern(self, content: RandomTensor, device: torch.device) -> Tensor:
        """The bytes that tensors of this content repeat."""
        with self._making:
            if (content, device) not in self._patterns:
                made = _KINDS[content.kind](content).reshape(-1).view(torch.uint8)
                self._patterns[content, device] = made.to(device)
            return self._patterns[content, device]

    @contextmanager
    def together(self, names: Iterable[str], device: torch.device | str) -> Iterator[None]:
        """Nothing is read, so that nothing is gained by fewer reads."""
        yield


def _tensors(
    config: ModelConfig, quant: Quant, stored: Stored
) -> Iterator[tuple[str, RandomTensor, tuple[int, ...]]]:
    """(name, content, shape) of one module's tensors."""
    module, shape = stored.module, stored.shape
    if stored.kind == "ids":
        assert config.routing is not None
        yield module, RandomTensor("ids", "I64", 0, (config.experts, shape[1])), shape
        return
    if stored.bare:
        yield module, RandomTensor("normal", "F32", _BARE[stored.kind]), shape
        return
    encoding = quant.encoding_of(stored)
    wanted = expected(encoding, shape)
    if wanted is None or encoding.layout == "blocks":
        raise UnsupportedError(
            f"--load-format dummy: {module} is stored as {encoding.layout!r}, which only its "
            "loader can make; give a config.json with another quantization_config, or none"
        )
    contents = _contents(config, encoding, stored)
    names = Quant.named(module, encoding)
    for component, want in wanted.items():
        if component not in encoding.optional:
            content = contents[component]
            dtype = content.dtype or want.dtypes[0]
            yield names[component], replace(content, dtype=dtype), want.shapes[0]


def _contents(config: ModelConfig, encoding: Encoding, stored: Stored) -> dict[str, RandomTensor]:
    """Component → content. dtype "": the first that the layout may have."""
    shape = stored.shape
    std, dtype = _std(config, stored), _NAMES[config.dtype]
    if encoding.format == "dense":
        return {"weight": RandomTensor("norm" if len(shape) == 1 else "normal", dtype, std)}
    kind = _codes(encoding)
    grid = FORMATS[encoding.format].block != (0, 0)  # else one scale for all
    spread = _UNEVEN if grid else 1.0
    power = round(math.log2(std / (_BASE[kind] * spread)))
    found = {
        "weight": RandomTensor(f"{kind}_{_packing(encoding)}", "", std / (spread * 2.0**power))
    }
    scale = "scale" if grid else "power"
    if "global" in encoding.tensors:
        found["scale"] = RandomTensor(scale, "", 0)
        found["global"] = RandomTensor("power", "", -power if encoding.divides else power)
    else:
        found["scale"] = RandomTensor(scale, "", power)
    activation = math.log2(_ACTIVATION[kind])
    found["input_scale"] = RandomTensor(
        "power", "", -activation if encoding.divides else activation
    )
    found["zero"] = RandomTensor(_zero(encoding), "")
    _, width = encoding.block or FORMATS[encoding.format].block
    if "group" in encoding.tensors:
        found["group"] = RandomTensor("group", "", 0, (shape[1], width or shape[1]))
    if "shape" in encoding.tensors:
        found["shape"] = RandomTensor("shape", "", 0, (shape[0], shape[1]))
    return found


def _std(config: ModelConfig, stored: Stored) -> float:
    """The standard deviation of decoded weights: a Linear keeps the size of its input."""
    head = math.sqrt(max(1.0, 2 * (math.log(config.vocab_size) - _ENTROPY)))
    if stored.kind == "embedding":
        return head / math.sqrt(config.hidden) if config.tie_embeddings else 1.0
    if stored.kind == "head":
        return head / math.sqrt(config.hidden)
    return 1 / math.sqrt(stored.shape[-1])


def _codes(encoding: Encoding) -> str:
    form = FORMATS[encoding.format]
    if form.codes == "float8_e4m3fn":
        return "e4m3"
    if form.codes == "uint8":
        return "e2m1"
    return "int4" if form.bits == 4 else "int8"


def _packing(encoding: Encoding) -> str:
    """How codes lie in bytes: one by one, two to a byte, or in words and shifted to be positive."""
    return {"rows": "rows", "nibbles": "nibbles"}.get(encoding.layout, "words")


def _zero(encoding: Encoding) -> str:
    """The zero point that stands for no shift, as its layout packs it."""
    if encoding.layout == "rows":
        return "zero"
    if FORMATS[encoding.format].bits == 8:
        return "zero_128"
    return "zero_7" if encoding.layout == "gptq" else "zero_8"


def _random(content: RandomTensor) -> Tensor:
    """[_PERIOD] standard normal numbers of this content's own."""
    seed = crc32(f"{content.kind} {content.value}".encode())
    return torch.randn(_PERIOD, generator=torch.Generator().manual_seed(seed))


def _normal(content: RandomTensor) -> Tensor:
    return (_random(content) * content.value).to(DTYPES[content.dtype])


def _norm(content: RandomTensor) -> Tensor:
    return (_random(content) * 0.1 + 1).to(DTYPES[content.dtype])


def _e4m3(content: RandomTensor) -> Tensor:
    return (_random(content) * content.value).clamp(-448, 448).to(torch.float8_e4m3fn)


def _int8(content: RandomTensor) -> Tensor:
    return (_random(content) * content.value).round().clamp(-127, 127).to(torch.int8)


def _int4(content: RandomTensor) -> Tensor:
    return (_random(content) * content.value).round().clamp(-8, 7).to(torch.int16)


def _e2m1(content: RandomTensor) -> Tensor:
    values = _random(content) * content.value
    codes = torch.bucketize(values.abs(), torch.tensor(_E2M1))
    return codes.to(torch.int16) | ((values < 0).to(torch.int16) << 3)


def _nibbles(codes: Tensor) -> Tensor:
    """Two to a byte."""
    other = codes.roll(codes.shape[0] // 2)
    return _words(((codes & 15) | ((other & 15) << 4)).to(torch.uint8))


def _words(data: Tensor) -> Tensor:
    """As many bytes as fill whole int32, whatever they are read as."""
    return data.view(torch.uint8)[: data.shape[0] // 4 * 4].contiguous()


def _scale(content: RandomTensor) -> Tensor:
    """Powers of two, half of them halved."""
    less = (_random(content) < 0).to(torch.int16)
    return _powers(content, less)


def _power(content: RandomTensor) -> Tensor:
    return _powers(content, torch.zeros(1, dtype=torch.int16))


def _powers(content: RandomTensor, less: Tensor) -> Tensor:
    if content.dtype in ("U8", "F8_E8M0"):
        return (127 + int(content.value) - less).to(torch.uint8)
    return torch.exp2(content.value - less.to(torch.float32)).to(DTYPES[content.dtype])


def _group(content: RandomTensor) -> Tensor:
    """The group of each column, in no order."""
    assert content.numbers is not None
    columns, width = content.numbers
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    return (order // width).to(DTYPES[content.dtype])


def _ids(content: RandomTensor) -> Tensor:
    """Of each row so many of so many numbers, in no order."""
    assert content.numbers is not None
    most, count = content.numbers
    draws = torch.rand(_ROWS, most, generator=torch.Generator().manual_seed(most))
    return draws.topk(count, dim=1).indices.to(DTYPES[content.dtype])


def _shape(content: RandomTensor) -> Tensor:
    return torch.tensor(content.numbers, dtype=DTYPES[content.dtype])


def _same(byte: int) -> Callable[[RandomTensor], Tensor]:
    return lambda content: torch.full((4096,), byte, dtype=torch.uint8)


_KINDS: Mapping[str, Callable[[RandomTensor], Tensor]] = {
    "normal": _normal,
    "norm": _norm,
    "e4m3_rows": _e4m3,
    "int8_rows": _int8,
    "int4_rows": lambda content: _int4(content).to(torch.int8),
    "int8_words": lambda content: _words(_int8(content).view(torch.uint8) ^ 128),
    "int4_nibbles": lambda content: _nibbles(_int4(content)),
    "int4_words": lambda content: _nibbles(_int4(content) + 8),
    "e2m1_nibbles": lambda content: _nibbles(_e2m1(content)),
    "scale": _scale,
    "power": _power,
    "zero": _same(0),
    "zero_7": _same(0x77),
    "zero_8": _same(0x88),
    "zero_128": _same(128),
    "group": _group,
    "shape": _shape,
    "ids": _ids,
}
