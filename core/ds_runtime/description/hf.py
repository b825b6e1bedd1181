"""config.json → ModelConfig. Torch-free; accepts the hub form and the transformers-5 form.

Every value is checked here: what comes out can be computed with, and anything else raises a
ConfigError or UnsupportedError that names file, key and value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ds_runtime.checkpoint.files import read_object
from ds_runtime.checkpoint.reader import Reader
from ds_runtime.description.config import ModelConfig, Yarn
from ds_runtime.description.hybrid.config import hybrid_config
from ds_runtime.description.indexing import check_indexing, read_indexing
from ds_runtime.description.leftover import left_over
from ds_runtime.errors import CheckpointError, ConfigError, UnsupportedError, shown
from ds_runtime.ops.contract import Routing

QUANT_FILE = "hf_quant_config.json"
_LAYERS, _EXPERTS = 2048, 8192  # at most: every module is listed before any is looked for
GLM = "GlmMoeDsaForCausalLM"
SPARSE = ("DeepseekV32ForCausalLM", GLM)  # V3 with a lightning indexer
HYBRID = "DeepseekV4ForCausalLM"
SUPPORTED = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", *SPARSE, HYBRID)
_DISTILLED = (
    "is not served; R1-Distill checkpoints have this architecture, too: serve them with an engine "
    "for Qwen2 and Llama"
)
_RECOGNISED = {
    "Qwen2ForCausalLM": _DISTILLED,
    "LlamaForCausalLM": _DISTILLED,
    "DeepseekV41ForCausalLM": "is not served; DeepSeek-V4.1 has another attention, memory and "
    "expert format than V4",
}


def load_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json. What it says of quantisation does not count where the weights are
    not quantised."""
    path = folder / "config.json"
    if not path.exists():
        raise CheckpointError(
            f"{path}: not found; --model takes a folder with config.json and safetensors"
        )
    raw = read_object(path)
    beside = folder / QUANT_FILE
    if beside.exists():
        raw = with_quant_file(raw, read_object(beside))
    config = from_hf(raw, str(path))
    if config.quantization and (said := left_over(folder, config.quantization, QUANT_FILE)):
        return replace(config, quantization={}, left_over=said)
    return config


def with_quant_file(raw: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the content of hf_quant_config.json in its quantization_config, under that
    name: loaders hold the two against each other."""
    stated = raw.get("quantization_config")
    if stated is not None and not isinstance(stated, Mapping):
        return dict(raw)  # refused by from_hf
    return {**raw, "quantization_config": {**(stated or {}), QUANT_FILE: dict(beside)}}


def from_hf(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """A checked ModelConfig from a config.json dict; `where` names it in errors."""
    get = Reader(raw, where)
    architecture = _architecture(get)
    _refuse_unserved(get)
    layers = get.integer("num_hidden_layers", most=_LAYERS)
    if architecture == HYBRID:
        return hybrid_config(get, architecture, layers, _EXPERTS, **_common(get))
    experts = get.integer("n_routed_experts", "num_local_experts", default=0, most=_EXPERTS)
    theta, yarn = _rope(get)
    v3 = architecture != "DeepseekV2ForCausalLM"
    config = ModelConfig(
        architecture=architecture,
        layers=layers,
        heads=get.integer("num_attention_heads"),
        q_lora=get.integer("q_lora_rank", default=0) or None,
        kv_lora=get.integer("kv_lora_rank"),
        qk_nope=get.integer("qk_nope_head_dim"),
        qk_rope=get.integer("qk_rope_head_dim"),
        v_head=get.integer("v_head_dim"),
        intermediate=get.integer("intermediate_size"),
        moe_intermediate=get.integer("moe_intermediate_size", default=None if experts else 0),
        experts=experts,
        shared_experts=get.integer("n_shared_experts", default=0),
        first_dense=_first_dense(get),
        moe_every=get.integer("moe_layer_freq", default=1, least=1),
        routing=_routing(get, experts, v3) if experts else None,
        rope_theta=theta,
        yarn=yarn,
        rope_interleave=get.boolean("rope_interleave", True),
        mtp_layers=get.integer(
            "num_nextn_predict_layers", "num_mtp_layers", default=0, most=_LAYERS
        ),
        indexing=read_indexing(get, layers, architecture == GLM)
        if architecture in SPARSE
        else None,
        **_common(get),
    )
    check_indexing(get, config)
    if config.qk_rope % 2:
        raise UnsupportedError(f"{where}: qk_rope_head_dim {config.qk_rope} must be even")
    _check_layer_types(get, config)
    return config


def _common(get: Reader) -> dict[str, Any]:
    """Fields that every architecture says by the same keys."""
    return {
        "vocab_size": get.integer("vocab_size"),
        "hidden": get.integer("hidden_size"),
        "eps": get.number("rms_norm_eps", 1e-6),
        "max_positions": get.integer("max_position_embeddings"),
        "tie_embeddings": get.boolean("tie_word_embeddings", False),
        "dtype": _dtype(get),
        "quantization": dict(get.mapping("quantization_config")),
        "eos_tokens": get.ids("eos_token_id"),
    }


def _architecture(get: Reader) -> str:
    names = get.strings("architectures")
    name = names[0] if names else get.text("model_type") or "none"
    if name in SUPPORTED:
        return name
    supported = ", ".join(SUPPORTED)
    if name in _RECOGNISED:
        raise UnsupportedError(f"{get.where}: {name} {_RECOGNISED[name]}; supported: {supported}")
    raise UnsupportedError(f"{get.where}: architecture {name!r} is unknown; supported: {supported}")


def _refuse_unserved(get: Reader) -> None:
    """UnsupportedError for what no kernel computes."""
    if get.boolean("attention_bias", False):
        raise UnsupportedError(f"{get.where}: attention_bias true is not supported; expected false")
    act = get.text("hidden_act")
    if act not in ("", "silu"):
        raise UnsupportedError(f"{get.where}: hidden_act {act!r}; supported: 'silu'")


def _first_dense(get: Reader) -> int:
    """The number of leading dense layers; `mlp_layer_types` may say it instead."""
    kinds = get.strings("mlp_layer_types")
    if kinds and get.any("first_k_dense_replace") is None:
        return next((i for i, kind in enumerate(kinds) if kind != "dense"), len(kinds))
    return get.integer("first_k_dense_replace", default=0)


def _check_layer_types(get: Reader, config: ModelConfig) -> None:
    """Raise unless `mlp_layer_types`, where given, says what the other keys say."""
    kinds = get.strings("mlp_layer_types")
    if not kinds:
        return
    if len(kinds) != config.layers:
        raise ConfigError(
            f"{get.where}: mlp_layer_types names {len(kinds)} layers, num_hidden_layers is "
            f"{config.layers}"
        )
    for layer, kind in enumerate(kinds):
        wanted = "sparse" if config.is_moe(layer) else "dense"
        if kind != wanted:
            raise UnsupportedError(
                f"{get.where}: mlp_layer_types has {kind!r} at layer {layer}, where {wanted!r} is "
                "supported: dense layers first (first_k_dense_replace), then every "
                "moe_layer_freq-th sparse"
            )


def _routing(get: Reader, experts: int, v3: bool) -> Routing:
    where = get.where
    method = get.text("topk_method") or ("noaux_tc" if v3 else "greedy")
    scoring = get.text("scoring_func") or ("sigmoid" if v3 else "softmax")
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
        renormalize=get.boolean("norm_topk_prob", v3),
        scale=get.number("routed_scaling_factor", 1.0),
    )
    if experts % routing.n_group:
        raise ConfigError(
            f"{where}: n_routed_experts {experts} does not divide into {routing.n_group} groups "
            "(n_group); take config.json and the weights from the same checkpoint"
        )
    if routing.topk_group > routing.n_group:
        raise ConfigError(
            f"{where}: topk_group {routing.topk_group} is more than n_group {routing.n_group}"
        )
    if routing.top_k > experts // routing.n_group * routing.topk_group:
        raise ConfigError(
            f"{where}: num_experts_per_tok {routing.top_k} is more than topk_group "
            f"{routing.topk_group} groups of {experts // routing.n_group} experts hold"
        )
    return routing


def _rope(get: Reader) -> tuple[float, Yarn | None]:
    """(theta, yarn) as transformers 5 reads them: a `rope_scaling` that says anything stands alone,
    else `rope_parameters` does; `rope_theta` outside of it counts where it has none."""
    under = "rope_scaling" if get.mapping("rope_scaling") else "rope_parameters"
    scaling = Reader(get.mapping(under), get.where, under)
    theta = scaling.number("rope_theta", get.number("rope_theta", 10000.0, 1.0), 1.0)
    key = "type" if scaling.any("rope_type") is None else "rope_type"
    kind = "default" if scaling.any(key) is None else scaling.text(key)
    if kind not in ("default", "yarn"):
        raise UnsupportedError(f"{get.where}: rope type {kind!r}; supported: default, yarn")
    for key, served in (("attention_factor", None), ("truncate", True)):
        _leave_out(scaling, key, served)
    if kind == "default":
        return theta, None
    for reader in (scaling, get):
        if reader.any("partial_rotary_factor") != 1:
            _leave_out(reader, "partial_rotary_factor", None)
    return theta, _yarn(get, scaling)


def _leave_out(reader: Reader, key: str, served: object) -> None:
    """UnsupportedError for a key that is there with another value than the one served."""
    value = reader.raw.get(key, served)
    if value is not served:
        name = f"{reader.under}.{key}" if reader.under else key
        raise UnsupportedError(
            f"{reader.where}: {name} {shown(value)} is not supported; leave it out"
        )


def _yarn(get: Reader, scaling: Reader) -> Yarn:
    """Its numbers; an original length outside of `scaling` counts first, and 0 where transformers
    takes it for nothing."""
    name = "original_max_position_embeddings"
    length = get.integer("max_position_embeddings")
    inside = scaling.integer(name, default=length, least=1)
    all_dim = _or_default(scaling, "mscale_all_dim", 0.0)
    return Yarn(
        factor=scaling.number("factor"),
        original=get.integer(name, default=inside, least=1),
        beta_fast=_or_default(scaling, "beta_fast", 32.0),
        beta_slow=_or_default(scaling, "beta_slow", 1.0),
        mscale=_or_default(scaling, "mscale", 0.0) if all_dim else 1.0,
        mscale_all_dim=all_dim,
    )


def _or_default(scaling: Reader, key: str, default: float) -> float:
    """A positive number, or 0 which means the default."""
    return scaling.number(key, default) if scaling.any(key) != 0 else default


def _dtype(get: Reader) -> Literal["bfloat16", "float16", "float32"]:
    name = (get.text("torch_dtype") or get.text("dtype") or "bfloat16").removeprefix("torch.")
    if name not in ("bfloat16", "float16", "float32"):
        raise UnsupportedError(
            f"{get.where}: torch_dtype {name!r}; supported: bfloat16, float16, float32"
        )
    return name  # type: ignore[return-value]
