"""config.json → ModelConfig. Torch-free; accepts the hub form and the transformers-5 form."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ds_runtime.errors import CheckpointError, ConfigError, UnsupportedError
from ds_runtime.ops.spec import Dims, Routing

SUPPORTED = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
_RECOGNISED = {
    "DeepseekV32ForCausalLM": "DeepSeek-V3.2 needs sparse attention (the lightning indexer), which "
    "this version does not serve",
    "GlmMoeDsaForCausalLM": "GLM's sparse attention (the lightning indexer) is not served by this "
    "version",
    "DeepseekV4ForCausalLM": "DeepSeek-V4 has another attention, residual and expert format than "
    "V2 and V3, and this version does not serve it",
    "DeepseekV41ForCausalLM": "DeepSeek-V4.1 has another attention, memory and expert format than "
    "V2 and V3, and this version does not serve it",
}


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN rope scaling (arXiv 2309.00071) as DeepSeek configures it."""

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def multiplier(self, scale: float) -> float:
        """0.1 · scale · ln(factor) + 1, and 1 where factor ≤ 1."""
        return 1.0 if self.factor <= 1.0 else 0.1 * scale * math.log(self.factor) + 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry and constants of one checkpoint; names follow the literature."""

    architecture: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    q_lora: int | None
    kv_lora: int
    qk_nope: int
    qk_rope: int
    v_head: int
    intermediate: int
    moe_intermediate: int
    experts: int  # 0: every layer is dense
    shared_experts: int
    first_dense: int
    moe_every: int
    routing: Routing | None
    eps: float
    rope_theta: float
    yarn: Yarn | None
    rope_interleave: bool
    max_positions: int
    tie_embeddings: bool
    attention_bias: bool
    mtp_layers: int
    dtype: Literal["bfloat16", "float16", "float32"]
    quantization: Mapping[str, Any]
    bos_token: int | None
    eos_tokens: tuple[int, ...]

    @property
    def qk_head(self) -> int:
        """Width of one query head: nope + rope."""
        return self.qk_nope + self.qk_rope

    @property
    def latent(self) -> int:
        """Cached elements per token and layer: latent + rope key."""
        return self.kv_lora + self.qk_rope

    @property
    def softmax_scale(self) -> float:
        """(nope + rope)^-½, times m(mscale_all_dim)² under YaRN (V2 and V3 reference code)."""
        scale: float = self.qk_head**-0.5
        if self.yarn is not None and self.yarn.mscale_all_dim:
            scale *= self.yarn.multiplier(self.yarn.mscale_all_dim) ** 2
        return scale

    def is_moe(self, layer: int) -> bool:
        """Whether this layer's MLP is routed."""
        return self.experts > 0 and layer >= self.first_dense and layer % self.moe_every == 0

    def dims(self, tp: int = 1) -> Dims:
        """Geometry for Facts; heads and expert widths are those of one rank."""
        return Dims(
            {
                "hidden": self.hidden,
                "layers": self.layers,
                "heads": self.heads // tp,
                "q_lora": self.q_lora or 0,
                "kv_lora": self.kv_lora,
                "qk_nope": self.qk_nope,
                "qk_rope": self.qk_rope,
                "v": self.v_head,
                "intermediate": self.intermediate // tp,
                "moe_intermediate": self.moe_intermediate // tp,
                "experts": self.experts,
                "top_k": self.routing.top_k if self.routing else 0,
                "vocab": self.vocab_size,
            }
        )

    def check_tp(self, tp: int) -> None:
        """Raise ConfigError if the model cannot be cut into `tp` ranks."""
        shared = self.shared_experts * self.moe_intermediate
        cuts = {"num_attention_heads": self.heads, "intermediate_size": self.intermediate}
        if self.experts:
            cuts |= {"moe_intermediate_size": self.moe_intermediate, "shared expert width": shared}
        for name, value in cuts.items():
            if value % tp:
                raise ConfigError(f"--tp {tp}: {name} {value} of this model is not divisible by it")


def load_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise CheckpointError(
            f"{path}: not found; --model takes a folder with config.json and safetensors"
        ) from e
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path}: cannot be read as JSON: {e}") from e
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: holds {type(raw).__name__}, expected a JSON object")
    return from_hf(raw, str(path))


def from_hf(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """A checked ModelConfig from a config.json dict; `where` names it in errors."""
    architecture = _architecture(raw, where)
    get = _Reader(raw, where)
    experts = get.integer("n_routed_experts", "num_local_experts", default=0)
    heads = get.integer("num_attention_heads")
    theta, yarn = _rope(raw, where)
    if get.optional("attention_bias"):
        raise UnsupportedError(f"{where}: attention_bias true is not supported; expected false")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedError(f"{where}: hidden_act {raw['hidden_act']!r}; supported: 'silu'")
    v3 = architecture == "DeepseekV3ForCausalLM"
    config = ModelConfig(
        architecture=architecture,
        vocab_size=get.integer("vocab_size"),
        hidden=get.integer("hidden_size"),
        layers=get.integer("num_hidden_layers"),
        heads=heads,
        q_lora=get.integer("q_lora_rank", default=0) or None,
        kv_lora=get.integer("kv_lora_rank"),
        qk_nope=get.integer("qk_nope_head_dim"),
        qk_rope=get.integer("qk_rope_head_dim"),
        v_head=get.integer("v_head_dim"),
        intermediate=get.integer("intermediate_size"),
        moe_intermediate=get.integer("moe_intermediate_size", default=0 if not experts else None),
        experts=experts,
        shared_experts=get.integer("n_shared_experts", default=0),
        first_dense=_first_dense(raw, get),
        moe_every=get.integer("moe_layer_freq", default=1),
        routing=_routing(raw, get, experts, v3, where) if experts else None,
        eps=get.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        yarn=yarn,
        rope_interleave=bool(raw.get("rope_interleave", True)),
        max_positions=get.integer("max_position_embeddings"),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=False,
        mtp_layers=get.integer("num_nextn_predict_layers", "num_mtp_layers", default=0),
        dtype=_dtype(raw, where),
        quantization=dict(raw.get("quantization_config") or {}),
        bos_token=raw.get("bos_token_id"),
        eos_tokens=_ids(raw.get("eos_token_id")),
    )
    if config.qk_rope % 2:
        raise UnsupportedError(f"{where}: qk_rope_head_dim {config.qk_rope} must be even")
    return config


class _Reader:
    """Typed access with errors that name file, key and value."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def optional(self, key: str) -> Any:
        return self.raw.get(key)

    def integer(self, *keys: str, default: int | None = None) -> int:
        for key in keys:
            value = self.raw.get(key)
            if value is None:
                continue
            least = 1 if default is None else 0
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(
                    f"{self.where}: {key} is {value!r}, expected a whole number of at least {least}"
                )
            return value
        if default is None:
            raise ConfigError(f"{self.where}: {keys[0]} is missing")
        return default

    def number(self, key: str, default: float) -> float:
        value = self.raw.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"{self.where}: {key} is {value!r}, expected a positive number")
        return float(value)


def _architecture(raw: Mapping[str, Any], where: str) -> str:
    names = raw.get("architectures") or []
    name = str(names[0]) if names else str(raw.get("model_type", "none"))
    if name in SUPPORTED:
        return name
    supported = ", ".join(SUPPORTED)
    if name in _RECOGNISED:
        raise UnsupportedError(f"{where}: {name}: {_RECOGNISED[name]}; supported: {supported}")
    raise UnsupportedError(f"{where}: architecture {name!r} is unknown; supported: {supported}")


def _first_dense(raw: Mapping[str, Any], get: _Reader) -> int:
    kinds = raw.get("mlp_layer_types")
    if kinds and raw.get("first_k_dense_replace") is None:
        return len(_leading_dense(kinds))
    return get.integer("first_k_dense_replace", default=0)


def _leading_dense(kinds: list[str]) -> list[str]:
    leading = []
    for kind in kinds:
        if kind != "dense":
            break
        leading.append(kind)
    return leading


def _routing(raw: Mapping[str, Any], get: _Reader, experts: int, v3: bool, where: str) -> Routing:
    method = str(raw.get("topk_method") or ("noaux_tc" if v3 else "greedy"))
    scoring = str(raw.get("scoring_func") or ("sigmoid" if v3 else "softmax"))
    if method not in ("greedy", "group_limited_greedy", "noaux_tc"):
        raise UnsupportedError(
            f"{where}: topk_method {method!r}; supported: greedy, group_limited_greedy, noaux_tc"
        )
    if scoring not in ("softmax", "sigmoid"):
        raise UnsupportedError(f"{where}: scoring_func {scoring!r}; supported: softmax, sigmoid")
    routing = Routing(
        top_k=get.integer("num_experts_per_tok"),
        num_experts=experts,
        n_group=get.integer("n_group", default=0) or 1,
        topk_group=get.integer("topk_group", default=0) or 1,
        scoring=scoring,  # type: ignore[arg-type]
        method=method,  # type: ignore[arg-type]
        renormalize=bool(raw.get("norm_topk_prob", v3)),
        scale=get.number("routed_scaling_factor", 1.0),
    )
    if experts % routing.n_group:
        raise ConfigError(
            f"{where}: n_routed_experts {experts} in n_group {routing.n_group} groups"
        )
    if routing.top_k > experts // routing.n_group * routing.topk_group:
        raise ConfigError(
            f"{where}: num_experts_per_tok {routing.top_k} is more than topk_group "
            f"{routing.topk_group} groups of {experts // routing.n_group} experts hold"
        )
    return routing


def _rope(raw: Mapping[str, Any], where: str) -> tuple[float, Yarn | None]:
    """(theta, yarn) from `rope_scaling` + `rope_theta`, or from `rope_parameters`."""
    parameters = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or parameters
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise UnsupportedError(f"{where}: rope type {kind!r}; supported: default, yarn")
    try:
        yarn = Yarn(
            factor=float(scaling["factor"]),
            original=int(
                scaling.get("original_max_position_embeddings") or raw["max_position_embeddings"]
            ),
            beta_fast=float(scaling.get("beta_fast") or 32),
            beta_slow=float(scaling.get("beta_slow") or 1),
            mscale=float(scaling.get("mscale") or 1.0),
            mscale_all_dim=float(scaling.get("mscale_all_dim") or 0.0),
        )
    except KeyError as e:
        raise ConfigError(f"{where}: rope_scaling of type yarn lacks {e.args[0]!r}") from e
    return theta, yarn


def _dtype(raw: Mapping[str, Any], where: str) -> Literal["bfloat16", "float16", "float32"]:
    name = str(raw.get("torch_dtype") or raw.get("dtype") or "bfloat16").removeprefix("torch.")
    if name not in ("bfloat16", "float16", "float32"):
        raise UnsupportedError(
            f"{where}: torch_dtype {name!r}; supported: bfloat16, float16, float32"
        )
    return name  # type: ignore[return-value]


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)
