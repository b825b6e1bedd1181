"""Random checkpoints of real shapes, written shard by shard in bounded memory.

Values come from pools of random numbers that are read from random offsets, so that writing runs
at the disk's speed. Routing is spread, logits differ, and nothing else about them is meaningful.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from ds_runtime.assembly.assemble import find_loader
from ds_runtime.checkpoint.tensors import INDEX, in_shards
from ds_runtime.common.progress import Progress
from ds_runtime.description.hf import from_hf
from ds_runtime.description.structure import draft_of, stored_modules
from ds_runtime.description.tree import Stored, by_name
from ds_runtime.errors import ConfigError
from ds_runtime.ops.contract import DeviceInfo, Facts
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.weights.quant import Quant
from ds_runtime_bench.shapes import config_of, own_dtype

SHARD_BYTES = 5_000_000_000
_MAX_SEED = (1 << 64) - 1  # that torch's generator takes
_POOL = 1 << 25  # elements
_FP8_STD = 60.0  # of the stored bytes' values; scales bring it back to _STD
_FP4_RMS = 2.93  # of the sixteen codes of e2m1
_STD = 0.02
# Of routers' biases. The best experts' scores are within 0.03 of each other: with biases as wide as
# that, some experts would hardly ever be chosen, and steps would read less than real ones.
_CORRECTION = 0.002
_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor to be written: kind names its pool."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def make_checkpoint(
    out: Path,
    shape: str,
    dtype: str | None = None,
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = False,
) -> Path:
    """Write config.json, a small tokenizer and random safetensors shards with their index.

    shape: a key of `shapes.SHAPES`; dtype: one of `shapes.DTYPES`, or None for the
    shape's own. The same
    arguments give the same bytes. Returns `out`. Raises ConfigError before anything is written.
    """
    if not 0 <= seed <= _MAX_SEED:
        raise ConfigError(f"--seed {seed}: must be from 0 to {_MAX_SEED}")
    if shard_bytes < 1:
        raise ConfigError(f"--shard-size {shard_bytes}: must be above 0, like 5GB")
    dtype = dtype or own_dtype(shape)
    raw = make_config(out, shape, dtype)
    plan = list(plan_tensors(raw))
    largest = max(math.prod(p.shape) for p in plan)
    experts = raw["n_routed_experts"], raw["num_experts_per_tok"]
    kept = _TORCH[raw["torch_dtype"]]
    pools = Pools(kept, dtype, seed, min(_POOL, 2 * largest), experts)
    shards = in_shards(plan, shard_bytes)
    total = sum(p.nbytes for p in plan)
    with Progress(f"writing {shape}", total, enabled=progress) as bar:
        for file, tensors in shards.items():
            with (out / file).open("wb") as handle:
                _write_shard(handle, tensors, pools, bar)
    where = {p.name: file for file, shard in shards.items() for p in shard}
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (out / INDEX).write_text(json.dumps(index, indent=1))
    return out


def make_config(out: Path, shape: str, dtype: str | None = None) -> dict[str, Any]:
    """Write all but the weights: config.json, which is returned, and a small tokenizer."""
    raw = config_of(shape, dtype or own_dtype(shape))
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(raw, indent=1))
    generation = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False}
    (out / "generation_config.json").write_text(json.dumps(generation))
    _write_tokenizer(out)
    return raw


def plan_tensors(raw: dict[str, Any]) -> Iterator[Planned]:
    """Every tensor of a checkpoint with this config.json, layer by layer."""
    config = from_hf(raw)
    facts = Facts(DeviceInfo("cpu", "", ""), config.dims())
    loader = find_loader(load_plugins(()).offers(facts), config)
    quant = Quant.open(loader, config.quantization)
    dtype = _TORCH[config.dtype]
    modules = [*stored_modules(config, quant.format_of).values()]
    if config.mtp_layers:  # without the copies of embedding and head, which nobody reads
        modules += by_name(draft_of(config, config.layers, quant.format_of)).values()
    hybrid = config.hybrid is not None  # whose scales are bytes where they are powers of two
    powers = hybrid and (config.quantization or {}).get("scale_fmt") == "ue8m0"
    for stored in modules:
        yield from _components(stored, dtype, quant, powers)


def _components(
    stored: Stored, dtype: torch.dtype, quant: Quant, powers: bool
) -> Iterator[Planned]:
    module, shape, size = stored.module, stored.shape, math.prod(stored.shape)
    if stored.kind == "ids":
        yield Planned(module, "ids", "I64", shape, 8 * size)
    elif stored.bare:
        yield Planned(module, stored.kind, "F32", shape, 4 * size)
    elif stored.format in ("fp8_block", "mxfp4"):
        names = Quant.named(module, quant.encoding_of(stored))
        rows, cols = shape
        if stored.format == "mxfp4":  # two codes to a byte
            grid = (rows, -(-cols // 32))
            yield Planned(names["weight"], "fp4", "I8", (rows, cols // 2), size // 2)
            yield Planned(names["scale"], "fp4 power", "F8_E8M0", grid, math.prod(grid))
            return
        grid = (-(-rows // 128), -(-cols // 128))
        yield Planned(names["weight"], "fp8", "F8_E4M3", shape, size)
        kind, scale, item = ("power", "F8_E8M0", 1) if powers else ("scale", "F32", 4)
        yield Planned(names["scale"], kind, scale, grid, item * math.prod(grid))
    else:
        kind = stored.kind if stored.kind in ("embedding", "norm") else "weight"
        nbytes = size * dtype.itemsize
        yield Planned(f"{module}.weight", kind, _NAMES[dtype], shape, nbytes)


class Pools:
    """Random bytes per kind of tensor, made once and read from random offsets."""

    def __init__(
        self, dtype: torch.dtype, format: str, seed: int, elements: int, experts: tuple[int, int]
    ) -> None:
        """experts: how many there are, and how many a token chooses."""
        self._dtype = dtype
        self._experts = experts
        self._ue8m0 = format == "fp8_ue8m0"
        self._draw = torch.Generator().manual_seed(seed)
        self._offsets = np.random.default_rng(seed)
        self._elements = elements
        self._pools: dict[str, tuple[int, npt.NDArray[np.uint8]]] = {}

    def bytes_of(self, planned: Planned) -> Iterator[memoryview]:
        """The tensor's content in pieces."""
        if planned.kind not in self._pools:
            values = self._make(planned.kind)
            item = values.itemsize * math.prod(values.shape[1:])
            self._pools[planned.kind] = (item, values.flatten().view(torch.uint8).numpy())
        item, pool = self._pools[planned.kind]
        left = planned.nbytes
        while left:
            start = int(self._offsets.integers(len(pool) // item)) * item
            piece = pool[start : start + left]
            left -= len(piece)
            yield piece.data

    def _make(self, kind: str) -> torch.Tensor:
        small = kind not in ("fp4", "fp8", "weight", "embedding")
        n = min(self._elements, 1 << 16) if small else self._elements
        if kind == "ids":  # distinct ones in a row, which are never parted
            count, top_k = self._experts
            order = torch.rand(min(n, 1 << 12), count, generator=self._draw).argsort(1)
            return order[:, :top_k].contiguous()
        if kind == "fp4":
            return torch.randint(0, 256, (n,), generator=self._draw, dtype=torch.uint8)
        normal = torch.randn(n, generator=self._draw)
        if kind == "fp8":
            return normal.mul_(_FP8_STD).clamp_(-448, 448).to(torch.float8_e4m3fn)
        if kind in ("power", "fp4 power"):
            middle = math.log2(_STD / (_FP4_RMS if kind == "fp4 power" else _FP8_STD))
            return (normal.clamp(-1, 1) / 2 + middle).round().add_(127).to(torch.uint8)
        if kind == "scale":
            spread = torch.exp2(normal.clamp(-1, 1) / 2) * (_STD / _FP8_STD)
            return torch.exp2(spread.log2().round()) if self._ue8m0 else spread
        if kind in ("bias", "correction", "numbers"):
            return normal.mul_(_CORRECTION if kind == "correction" else 0.05)
        if kind == "norm":
            return normal.mul_(0.1).add_(1).to(self._dtype)
        return normal.mul_(1.0 if kind == "embedding" else _STD).to(self._dtype)


def _write_shard(file: BinaryIO, tensors: Sequence[Planned], pools: Pools, bar: Progress) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for p in tensors:
        ends = [offset, offset + p.nbytes]
        header[p.name] = {"dtype": p.dtype, "shape": list(p.shape), "data_offsets": ends}
        offset += p.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    for p in tensors:
        for piece in pools.bytes_of(p):
            file.write(piece)
        bar.advance(p.nbytes)


def _write_tokenizer(out: Path) -> None:
    """A byte-level BPE tokenizer of a few hundred tokens, with a template for chats."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([__doc__ or ""] * 2, trainer)
    backend.save(str(out / "tokenizer.json"))
    bos, eos, user, assistant = _SPECIAL
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
        + f"{assistant}{{{{ m['content'] }}}}{{{{ eos_token }}}}"
        + "{% else %}"
        + f"{user}{{{{ m['content'] }}}}"
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}"
        + assistant
        + "{% endif %}"
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "bos_token": bos,
        "eos_token": eos,
        "chat_template": template,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
