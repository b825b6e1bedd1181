"""adapter_config.json of a PEFT folder, and which modules of a model it means. Torch-free.

Source: PEFT's own reader (huggingface/peft, tuners/lora), whose names and rules these are.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ds_runtime.checkpoint.files import HEADER, open_plain, read_object
from ds_runtime.config import EngineConfig
from ds_runtime.config.paths import user_path
from ds_runtime.description.config import ModelConfig
from ds_runtime.description.structure import model_of
from ds_runtime.description.tree import EXPERTS, Stored, by_name
from ds_runtime.errors import CheckpointError, ConfigError, shown

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of tensor names, before the module
_N = TypeVar("_N", int, float)
_ROUTED = f".{EXPERTS}."  # in the path of a routed expert's Linear
_RANK_STEP = 16  # kernels multiply tiles: ranks of slots are filled up to whole ones

# Keys that change nothing about a finished adapter, whatever they hold.
_NEUTRAL = frozenset(
    {"peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path"}
    | {"revision", "inference_mode", "lora_dropout", "init_lora_weights", "loftq_config"}
    | {"eva_config", "lora_ga_config", "megatron_core", "runtime_config", "qalora_group_size"}
    | {"ensure_weight_tying", "velora_config", "monteclora_config"}
    | {"layers_to_transform", "layers_pattern", "exclude_modules", "target_parameters"}
    | {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"}
)
# Weights that training began from: with these it was not the checkpoint's.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """`NAME=DIR`: a name that requests may give as their model, and a PEFT folder."""

    name: str
    folder: Path

    @staticmethod
    def parse(text: str) -> AdapterSpec:
        """Raises ConfigError for anything else than NAME=DIR."""
        name, equals, folder = text.partition("=")
        if not equals or not folder:
            raise ConfigError(f"--lora {text!r}: write NAME=DIR, like legal=/adapters/legal")
        check_name(name)
        return AdapterSpec(name, user_path(folder, f"--lora {name}:").absolute())


def check_name(name: str) -> None:
    """ConfigError unless requests can name an adapter so."""
    if not re.fullmatch(r"[^\s\x00-\x1f\x7f]{1,128}", name):
        raise ConfigError(f"adapter name {shown(name)}: must be 1 to 128 characters without spaces")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What an adapter_config.json says of the tensors next to it, which say themselves whose they
    are.
    """

    folder: Path
    rank: int
    alpha: float
    rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    @staticmethod
    def load(folder: Path) -> PeftConfig:
        """Raises CheckpointError for a file that is missing, damaged or asks for more than LoRA."""
        path = folder / CONFIG
        try:
            raw = read_object(path)
        except CheckpointError as e:
            raise CheckpointError(
                f"{e}; an adapter is a folder with "
                f"{CONFIG} and {WEIGHTS}, as PEFT's save_pretrained writes it"
            ) from e
        if not isinstance(raw, dict):
            raise CheckpointError(f"{path}: holds {shown(raw)}, not an object")
        _refuse(path, raw)
        return PeftConfig(
            folder=folder,
            rank=_rank(path, "r", raw.get("r")),
            alpha=_number(path, "lora_alpha", raw.get("lora_alpha")),
            rslora=_flag(path, "use_rslora", raw.get("use_rslora")),
            rank_pattern={
                k: _rank(path, f"rank_pattern {k!r}", v) for k, v in _map(path, raw, "rank")
            },
            alpha_pattern={
                k: _number(path, f"alpha_pattern {k!r}", v) for k, v in _map(path, raw, "alpha")
            },
        )

    @property
    def max_rank(self) -> int:
        """The largest rank of any module."""
        return max((self.rank, *self.rank_pattern.values()))

    def rank_of(self, module: str) -> int:
        """The rank of one module."""
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scaling(self, module: str) -> float:
        """What B·A is multiplied by: alpha / r, or alpha / √r where rank-stabilised."""
        rank, alpha = self.rank_of(module), _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def names_module(targets: Iterable[str], module: str) -> bool:
    """PEFT's rule for target_modules: paths or their ends, or all."""
    return any(t in ("all", "all-linear") or f".{module}".endswith(f".{t}") for t in targets)


def _by_pattern(patterns: Mapping[str, _N], module: str, default: _N) -> _N:
    for pattern, value in patterns.items():
        if re.match(_whole(pattern), module):
            return value
    return default


def _whole(pattern: str) -> str:
    """PEFT's rule for patterns: they match paths, or their ends."""
    return rf"(.*\.)?({pattern})$"


def _refuse(path: Path, raw: Mapping[str, Any]) -> None:
    """CheckpointError for what is no plain LoRA."""
    if raw.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{path}: peft_type {shown(raw.get('peft_type'))} is not supported; only LORA is"
        )
    if raw.get("bias", "none") != "none":
        raise CheckpointError(
            f"{path}: bias {shown(raw['bias'])} is not supported: train with bias 'none'"
        )
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise CheckpointError(
            f"{path}: init_lora_weights {shown(start)} belongs to a base whose weights training "
            "changed: save it with path_initial_model_for_weight_conversion, which makes it plain"
        )
    for key, value in raw.items():
        if key in _NEUTRAL or key == "bias" or value in (None, False, [], {}, ""):
            continue
        raise CheckpointError(
            f"{path}: {key} {shown(value)} is not supported; serve a merged checkpoint "
            "(merge_and_unload) instead"
        )


def _rank(path: Path, what: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= 4096:
        raise CheckpointError(
            f"{path}: {what} {shown(value)}: must be a whole number from 1 to 4096"
        )
    return value


def _number(path: Path, what: str, value: object) -> float:
    most = sys.float_info.max  # of an integer, too; and NaN is not at most that
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= most:
        raise CheckpointError(f"{path}: {what} {shown(value)}: must be a finite number")
    return float(value)


def _flag(path: Path, what: str, value: object) -> bool:
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{path}: {what} {shown(value)}: must be true or false")
    return bool(value)


def _map(path: Path, raw: Mapping[str, Any], what: str) -> Iterable[tuple[str, Any]]:
    value = raw.get(f"{what}_pattern") or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: {what}_pattern {shown(value)}: must be an object")
    for pattern in value:
        try:
            re.compile(_whole(pattern))
        except (re.error, OverflowError, RecursionError) as e:
            raise CheckpointError(f"{path}: {what}_pattern {shown(pattern)}: {e}") from e
    return value.items()


def check_weights(path: Path) -> None:
    """CheckpointError unless the file of an adapter's weights is there."""
    if path.is_file():
        return
    why = (
        "only the pickled adapter_model.bin is there, which can run code when loaded: save "
        "it again with safe_serialization"
        if path.with_name("adapter_model.bin").is_file()
        else "missing: is the download complete?"
    )
    raise CheckpointError(f"{path}: {why}")


def adapted_modules(folder: Path, known: Collection[str]) -> set[str]:
    """Those of the `known` modules that an adapter changes, by the names of its tensors."""
    path = folder / WEIGHTS
    check_weights(path)
    try:
        with open_plain(path) as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, HEADER)))
            names: list[str] = list(header.keys())
    except (OSError, ValueError, AttributeError, RecursionError) as e:
        raise CheckpointError(
            f"{path}: cannot be read ({type(e).__name__}: {e}); download it again"
        ) from e
    found = {
        n.removeprefix(PREFIX).partition(".lora_")[0].removesuffix(".base_layer") for n in names
    }
    return {m for m in known if m in found or f"{m.partition('.experts.')[0]}.experts" in found}


def slot_rank(rank: int) -> int:
    """The rank that a slot holds adapters of up to `rank` in."""
    return -(-rank // _RANK_STEP) * _RANK_STEP


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """The slots of an engine. rank: that slots are made for, max_rank: that adapters may have.

    modules: of the checkpoint, those with slots; of routed experts all of a layer, or none.
    adapters: those to load at start, into slots 0, 1, …
    """

    slots: int
    rank: int
    max_rank: int
    modules: frozenset[str]
    adapters: tuple[AdapterSpec, ...]

    @property
    def has_experts(self) -> bool:
        """Whether routed experts have slots."""
        return any(_ROUTED in m for m in self.modules)

    @staticmethod
    def of(config: EngineConfig, model: ModelConfig) -> LoraPlan | None:
        """From the settings; None if there are no slots. Reads the configs of the adapters."""
        specs = tuple(AdapterSpec.parse(text) for text in config.lora)
        names = [s.name for s in specs]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"--lora {name}: named {names.count(name)} times; use two names")
        slots = len(specs) if config.max_loras is None else config.max_loras
        if slots < len(specs):
            raise ConfigError(
                f"--max-loras {slots}: {len(specs)} adapters are given with --lora; give at least "
                "as many"
            )
        if not slots:
            for flag in ("max_lora_rank", "lora_target_modules"):
                if getattr(config, flag) is not None:
                    raise ConfigError(
                        f"--{flag.replace('_', '-')}: there is no room for adapters; give --lora "
                        "NAME=DIR, or --max-loras N"
                    )
            return None
        configs = [PeftConfig.load(s.folder) for s in specs]
        max_rank = config.max_lora_rank or max((c.max_rank for c in configs), default=16)
        for c in configs:
            if c.max_rank > max_rank:
                raise ConfigError(
                    f"--max-lora-rank {max_rank}: {c.folder} has rank {c.max_rank}; give at least "
                    "that"
                )
        modules = _targets(config.lora_target_modules, specs, model)
        return LoraPlan(slots, slot_rank(max_rank), max_rank, modules, specs)


def _targets(
    given: tuple[str, ...] | None, specs: Sequence[AdapterSpec], model: ModelConfig
) -> frozenset[str]:
    """The modules that get slots: those given, else those of the adapters, else all but the
    routed experts.
    """
    known = adaptable_modules(model)
    if given is not None:
        for name in given:
            if not any(names_module((name,), m) for m in known):
                ends = sorted({m.rpartition(".")[2] for m in known})
                raise ConfigError(
                    f"--lora-target-modules {name}: no module of this model ends so; known are "
                    f"{', '.join(ends)}, longer paths, and all"
                )
        found = {m for m in known if names_module(given, m)}
    elif specs:
        found = {m for spec in specs for m in adapted_modules(spec.folder, known)}
    else:
        found = {m for m in known if _ROUTED not in m}
    layers = {m.partition(_ROUTED)[0] for m in found if _ROUTED in m}
    whole = {m for m in known if _ROUTED in m and m.partition(_ROUTED)[0] in layers}
    return frozenset(found | whole)


def adaptable_modules(config: ModelConfig, experts: range | None = None) -> dict[str, Stored]:
    """Every Linear that a low-rank adapter may change, by its path: all but the routers."""
    model = model_of(config, lambda module: "dense", experts=experts)
    assert model.head is not None
    found = {name: s for name, s in by_name(model).items() if s.kind in ("linear", "head")}
    return found | {s.name: s for s in model.head.parts}
