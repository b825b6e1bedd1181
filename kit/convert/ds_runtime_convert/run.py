"""Plan a conversion, check that it can be done, write its shards, and open the result.

Everything about the output is known before a weight is read, so a run that was killed continues
where it stopped. The shards' headers say which conversion they belong to. config.json comes last,
so that nothing opens a folder that is not whole.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ds_runtime.checkpoint.base import KEY, base_of
from ds_runtime.checkpoint.files import HEADER, read_object
from ds_runtime.checkpoint.gguf.folder import LINK
from ds_runtime.checkpoint.tensors import DTYPES, INDEX
from ds_runtime.common.progress import Progress, amount
from ds_runtime.description.hf import QUANT_FILE, from_hf, with_quant_file
from ds_runtime.description.structure import SHARED
from ds_runtime.errors import (
    CheckpointError,
    ConfigError,
    DsRuntimeError,
    UnsupportedError,
    unwritable,
)
from ds_runtime.weights.quant import Quant
from ds_runtime_convert.layout import Item, ShardPlan, copied, fingerprint, linear, shards
from ds_runtime_convert.source import Source, quant_of
from ds_runtime_convert.targets import Target, find_target
from ds_runtime_convert.write import PARTIAL, Writer

SHARD_BYTES = 5_000_000_000
_CONFIG = "config.json"
_BESIDE = ("*.json", "*.jinja", "*.txt", "*.model", "*.sha256", "LICENSE*")
_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_TABLES = tuple(f"{name}.weight" for name in SHARED)  # as large as the head
_MARK = "ds_runtime_conversion"  # in the shards' headers


@dataclass(frozen=True, slots=True)
class Report:
    """What was made. kept: Linears that the format's groups do not fit; errors: root mean square
    error over root mean square value, by format, of what this run wrote."""

    out: Path
    to: str
    before: int
    after: int
    kept: tuple[str, ...] = ()
    errors: dict[str, float] = field(default_factory=dict)
    already: bool = False


def convert(
    model: Path, to: str, out: Path, shard_bytes: int = SHARD_BYTES, progress: bool = False
) -> Report:
    """Write the checkpoint folder `model` to the folder `out` in format `to` (see TARGETS).

    Round to nearest, one Linear in memory at a time; each is read back and compared when it is
    written. Call again to continue after an interruption. Raises ConfigError for folders that
    cannot be used or hold another conversion and for too little space, UnsupportedError for unknown
    formats, CheckpointError for damaged checkpoints.
    """
    target = find_target(to)
    if os.path.realpath(model) == os.path.realpath(out):  # of a link to itself, too
        raise ConfigError(f"--out {out}: is the checkpoint that is read; name another folder")
    if shard_bytes < 1:
        raise ConfigError(f"--shard-size {shard_bytes}: must be above 0, like 5GB")
    source = Source(model)
    if progress and source.config.left_over:
        print(f"warning: {source.config.left_over}", file=sys.stderr, flush=True)
    try:
        job = _Job(source, target, out, shard_bytes)
        return job.run(progress)
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise unwritable(f"--out {out}", e, "a folder that is yours") from e
        raise ConfigError(
            f"--out {out}: {e.strerror}; make space and run the same command again: it "
            "continues from here"
        ) from e
    finally:
        source.checkpoint.close()


class _Job:
    """One conversion: its plan, from which everything else follows."""

    def __init__(self, source: Source, target: Target, out: Path, shard_bytes: int) -> None:
        self.source, self.target, self.out = source, target, out
        config = source.config
        if target.name == "w4afp8" and not config.experts:
            raise UnsupportedError("--to w4afp8: the model has no routed experts; try --to fp8")
        self.raw = read_object(source.folder / _CONFIG)
        self.kept = tuple(target.kept(source.linears.values()))
        # What the target names itself stays anyway.
        bare = self._quant(())
        self.kept = tuple(m for m in self.kept if bare.format_of(m) != "dense")
        self.quant = self._quant(self.kept)
        self.scale = _NAMES[config.dtype] if target.half_scales else "F32"
        mark = f"{target.name} {fingerprint(source.checkpoint.entries, config.quantization)}"
        self.plan = shards(list(self._items()), shard_bytes, {_MARK: mark})

    def _configs(self, kept: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(config.json, hf_quant_config.json)."""
        stated, beside = self.target.files(kept)
        # What is written is whole: it needs no base.
        raw = {k: v for k, v in self.raw.items() if k not in ("quantization_config", KEY)}
        if self.target.name == "bf16":
            raw |= {k: "bfloat16" for k in ("torch_dtype", "dtype") if k in raw}
        if self.target.name == "fp8" and self.source.config.hybrid is not None:
            raw.setdefault("expert_dtype", "fp8")  # experts that are in no format of their own yet
        return raw | ({"quantization_config": stated} if stated else {}), beside

    def _quant(self, kept: tuple[str, ...]) -> Quant:
        """How the output is read."""
        raw, beside = self._configs(kept)
        config = from_hf(with_quant_file(raw, beside) if beside else raw, f"{self.out / _CONFIG}")
        return quant_of(config, str(self.out / _CONFIG))

    def _items(self) -> Iterator[Item]:
        entries = self.source.checkpoint.entries
        numbers, own = self.target.name == "bf16", _NAMES[self.source.config.dtype]
        for name in self.source.others():
            entry = entries[name]
            dtype = entry.dtype if entry.dtype in DTYPES else own
            dtype = "BF16" if numbers and name.endswith(_TABLES) else dtype
            yield copied(name, dtype, entry.shape)
        for module, stored in self.source.linears.items():
            held = entries[self.source.places[module].names[0]].dtype
            plain = self.source.quant.format_of(module) == "dense" and held in DTYPES
            dense = "BF16" if numbers else held if plain else own
            rows, cols = stored.shape
            yield linear(module, self.quant, (rows, cols), dense, self.scale)

    def run(self, progress: bool) -> Report:
        """Check, write what is missing, and open it."""
        have = self._existing()
        total = sum(s.nbytes for s in self.plan)
        before = sum(e.nbytes for e in self.source.checkpoint.entries.values())
        report = Report(self.out, self.target.name, before, total, self.kept)
        if have == total and self._opens():
            return replace(report, already=True)
        self._check_space(total - have)
        self.out.mkdir(parents=True, exist_ok=True)
        writer = Writer(self.source, self.quant, self.scale)
        label = f"converting to {self.target.name}"
        data = sum(item.nbytes for s in self.plan for item in s.items)
        with Progress(label, data, enabled=progress) as bar:
            for shard in self.plan:
                writer.shard(self.out, shard, bar.advance)
        self._finish()
        result = Source(self.out)  # reads every header, and checks every name, shape and dtype
        result.checkpoint.close()
        return replace(report, errors=writer.errors.relative())

    def _opens(self) -> bool:
        """Whether the folder has all that lies beside its shards, too."""
        if not all((self.out / name).is_file() for name in (_CONFIG, INDEX)):
            return False
        try:
            Source(self.out).checkpoint.close()
        except DsRuntimeError:
            return False
        return True

    def _existing(self) -> int:
        """Bytes of this conversion that are there; ConfigError if anything else is."""
        if not self.out.exists():
            return 0
        if not self.out.is_dir():
            raise ConfigError(f"--out {self.out}: is a file; name a folder")
        planned = {s.name: s for s in self.plan}
        size = 0
        for path in sorted(self.out.iterdir()):
            shard = planned.get(path.name.removesuffix(PARTIAL))
            if shard is not None:
                size += _belonging(path, shard)
            elif path.name.removesuffix(PARTIAL).endswith(".safetensors"):
                raise ConfigError(f"--out {self.out}: holds {path.name} of another checkpoint"
                                  f"{_said(path)}; name another folder")  # fmt: skip
        if not size and any(self.out.iterdir()):
            raise ConfigError(f"--out {self.out}: is not empty; name another folder")
        return size

    def _check_space(self, needed: int) -> None:
        there = next(p for p in (self.out, *self.out.absolute().parents) if p.exists())
        free = shutil.disk_usage(there).free
        if needed > free:
            raise ConfigError(
                f"--out {self.out}: {amount(needed)} are to be written and {amount(free)} are free "
                "there; make space, or name a folder on another disk"
            )

    def _finish(self) -> None:
        """All that lies beside weights; config.json last."""
        where = {t: s.name for s in self.plan for t in s.entries(self.out / s.name)}
        size = sum(item.nbytes for s in self.plan for item in s.items)
        copy_beside(self.source.folder, self.out)
        raw, beside = self._configs(self.kept)
        _write_json(self.out / INDEX, {"metadata": {"total_size": size}, "weight_map": where})
        if beside:
            _write_json(self.out / QUANT_FILE, beside)
        _write_json(self.out / _CONFIG, raw)


def copy_beside(source: Path, out: Path) -> None:
    """Copy what lies next to the weights of a checkpoint, and of its base: tokenizer, templates."""
    own = (_CONFIG, INDEX, QUANT_FILE, LINK)
    base = base_of(source)
    for folder in (base, source) if base is not None else (source,):
        for path in sorted({p for g in _BESIDE for p in folder.glob(g)}):
            if path.is_file() and path.name not in own:
                shutil.copyfile(path, out / path.name)


def _belonging(path: Path, shard: ShardPlan) -> int:
    """The file's size; ConfigError unless it begins as the shard, and is whole if it says so."""
    size = path.stat().st_size
    partial = path.name.endswith(PARTIAL)
    with path.open("rb") as file:
        start = file.read(len(shard.header))
    begins = shard.header.startswith(start) if partial else start == shard.header
    if not begins:
        raise ConfigError(
            f"--out {path.parent}: {path.name} is of another conversion{_said(path)}; name another "
            "folder, or delete this one"
        )
    if not partial and size != shard.nbytes:
        raise CheckpointError(
            f"{path}: {size} bytes found, {shard.nbytes} expected; delete it and run the same "
            "command again"
        )
    return size


def _said(path: Path) -> str:
    """What a shard's header says of its conversion, for a message."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(length, HEADER)))
            return f" ({header['__metadata__'][_MARK].split()[0]}, or of another source)"
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return ""


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """All or nothing."""
    beside = path.with_name(path.name + PARTIAL)
    beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(beside, path)
