"""The sites of one rank, with the formats that their weights are rounded to while they are loaded.

Which Linear gets which format (`--quantize`, and its like for drafts) is decided from names alone,
so that the plan shows it without weights; the rounding itself is in
`ops/reference/matrices/rounding.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import cache

from ds_runtime.common.speculation import Speculation
from ds_runtime.config import EngineConfig
from ds_runtime.description.adapter import LoraPlan
from ds_runtime.description.config import ModelConfig
from ds_runtime.description.joins import JOINS, SHARED_EXPERTS
from ds_runtime.description.nextn import NextN
from ds_runtime.description.sites import Verify, model_sites, nextn_sites
from ds_runtime.description.structure import JOIN, KV_B
from ds_runtime.description.tree import COMPRESSOR, EXPERTS, HEAD, HEADS, FormatOf, Ranks
from ds_runtime.errors import ConfigError
from ds_runtime.ops.contract import QuantLoader, Site
from ds_runtime.ops.table import OPS
from ds_runtime.parallel.mesh import Mesh

DRAFT_FORMAT, _COLUMNS = "fp8_block", 128  # that share a scale
DRAFT_EXPERTS = "w4afp8"
_FORMATS = {"int8": "int8_channel", "int4": "int4_group"}
_FROM = frozenset({"dense", "fp8_tensor", "fp8_channel", "fp8_block", "mxfp8", "int8_block"})


class SiteList:
    """The sites of a model, and of its draft layer where there is one.

    apart: fusions that are not wanted. rounds: what drafts alone are made by is rounded to FP8.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        loader: QuantLoader,
        lora: LoraPlan | None,
        drafts: tuple[NextN, QuantLoader] | None,
        fast_dtypes: Container[str],
    ) -> None:
        """drafts: the draft layer, and who reads it. fast_dtypes: of the device. Raises
        ConfigError for what --speculative-draft-quantize cannot round."""
        encoding = cache(loader.encodings(model.quantization))

        def stored(module: str) -> str:
            tied = module == HEAD and model.tie_embeddings
            return "dense" if tied else encoding(module).format

        self.apart = apart(config)
        self._ranks = Ranks(config.tp, Mesh.of(config).attn_tp, config.expert_parts)
        self._alone = config.batch_invariant
        self._model = model
        self._format_of = with_target(config.quantize, stored)
        self._adapted = lora.modules if lora is not None else frozenset[str]()
        self._nextn, self._verify, self.rounds = drafts and drafts[0], _phase(config), False
        if drafts is not None:
            nextn, reader = drafts
            self._draft_format = _draft_format(config, model, nextn, reader)
            head = self._format_of(HEAD)
            self.rounds = rounds_drafts(config, head, model.hidden, fast_dtypes)

    def sites(self, apart: frozenset[str], rounded: bool) -> list[Site]:
        """All of them. apart: of the model; drafts have what `self.apart` leaves."""
        ranks, verify = self._ranks, self._verify
        given = self._model, self._format_of, ranks, apart, self._adapted, verify
        found = model_sites(*given, alone=self._alone)
        if self._nextn is None:
            return found
        own, head = self._draft_format, ""
        if rounded:
            own, head = with_fp8_drafts(own), DRAFT_FORMAT
        drafts = self._model, self._nextn, own, ranks, self.apart, verify, head, self._alone
        return found + nextn_sites(*drafts)


def apart(config: EngineConfig) -> frozenset[str]:
    """The fusions that are not wanted. ConfigError for what is none."""
    known = [*JOINS, *(name for name, op in OPS.items() if op.composition or op.optional)]
    for name in config.fusions:
        if name not in known:
            raise ConfigError(f"--fusion {name}: no such fusion; known: {', '.join(known)}")
    off = frozenset(name for name, on in config.fusions.items() if not on)
    if config.expert_parts == 1 or config.fusions.get(SHARED_EXPERTS):
        return off
    return off | {SHARED_EXPERTS}  # rows of the own sequences are fewer


def _phase(config: EngineConfig) -> Verify:
    shape = Speculation.of(config)
    return "" if shape is None else "verify" if shape.topk == 1 else "tree"


def _draft_format(
    config: EngineConfig, model: ModelConfig, nextn: NextN, loader: QuantLoader
) -> FormatOf:
    """The format of each Linear of the draft layer, by its path in its own checkpoint."""
    encoding = cache(loader.encodings(nextn.config.quantization))

    def stored(module: str) -> str:
        return encoding(module).format

    own = with_target(config.quantize, stored)
    if config.speculative_draft_quantize != DRAFT_EXPERTS:
        return own
    return with_w4afp8_experts(own, stored, model.is_moe(model.layers))


def target_format(quantize: str, module: str, stored: str) -> str:
    """The format that a Linear is packed from, given the checkpoint's own.

    The head is rounded to int8 at most, because nothing after it repairs its errors. kv_b stays as
    it is, because decode multiplies by it from both sides, and it is small. So do compressors,
    which native files keep wide.
    """
    name = module.rpartition(".")[2]
    wide = name == KV_B or COMPRESSOR in module.split(".")
    if quantize == "none" or stored not in _FROM or wide:
        return stored
    return "int8_channel" if name in HEADS else _FORMATS[quantize]


def with_target(quantize: str, format_of: Callable[[str], str]) -> Callable[[str], str]:
    """`format_of` after rounding."""
    if quantize == "none":
        return format_of  # a model has tens of thousands of weights
    return lambda module: target_format(quantize, module, format_of(module))


def rounds_drafts(
    config: EngineConfig, head: str, hidden: int, fast_dtypes: Container[str]
) -> bool:
    """Whether what drafts alone are made by is rounded to FP8. head: the format of the model's.
    ConfigError where that was asked for and the head has few bits already."""
    asked = config.speculative_draft_quantize
    if asked == "fp8" and head != "dense":
        raise ConfigError(
            f"--speculative-draft-quantize fp8: the head is {head} already, and is not rounded "
            "again: leave the flag out"
        )
    fits = head == "dense" and config.dtype != "float32" and hidden % _COLUMNS == 0
    return asked == "fp8" or (asked != "none" and fits and "float8_e4m3fn" in fast_dtypes)


def with_fp8_drafts(format_of: Callable[[str], str]) -> Callable[[str], str]:
    """`format_of` of a draft layer's modules, with their join rounded to FP8 where it is dense."""

    def found(module: str) -> str:
        format = format_of(module)
        return DRAFT_FORMAT if format == "dense" and module.endswith(f".{JOIN}") else format

    return found


def with_w4afp8_experts(
    format_of: Callable[[str], str], stored: Callable[[str], str], has_experts: bool
) -> Callable[[str], str]:
    """`format_of` of a draft layer's modules, with its routed experts rounded to int4. stored: the
    checkpoint's own. ConfigError where there are none, and from what is returned where they are
    not rounded again."""
    if not has_experts:
        raise ConfigError(
            f"--speculative-draft-quantize {DRAFT_EXPERTS}: the draft layer has no routed experts: "
            "leave the flag out"
        )

    def found(module: str) -> str:
        if f".{EXPERTS}." not in module:
            return format_of(module)
        if (format := stored(module)) not in _FROM:
            raise ConfigError(
                f"--speculative-draft-quantize {DRAFT_EXPERTS}: {module} is {format} already, and "
                "is not rounded again: leave the flag out"
            )
        return DRAFT_EXPERTS

    return found
