"""config.json of DeepSeek-V4 → ModelConfig, in its own words or in those of transformers.

Both say the same by other keys: `compress_ratios`, `num_hash_layers`, `rope_scaling`, or
`layer_types` with `compress_rates`, `mlp_layer_types`, `rope_parameters`. Torch-free.
"""

from __future__ import annotations

from typing import Any

from ds_runtime.checkpoint.reader import Reader
from ds_runtime.description.config import Hybrid, Indexing, ModelConfig, Yarn
from ds_runtime.errors import ConfigError, UnsupportedError, shown
from ds_runtime.ops.contract import Routing

SPARSE, DENSE = (
    4,
    128,
)  # tokens of a compressed entry, in layers that choose and in those that see all
_KINDS = {
    "sliding_attention": 0,
    "compressed_sparse_attention": SPARSE,
    "heavily_compressed_attention": DENSE,
}
_HASHED, _SCORED = "hash_moe", "moe"


def hybrid_config(
    get: Reader, architecture: str, layers: int, most: int, **said: Any
) -> ModelConfig:
    """said: fields that every architecture's config says alike. most: experts."""
    _refuse(get)
    if quantization := said["quantization"]:  # loaders see it alone, and the first configs lack it
        said["quantization"] = {"expert_dtype": get.any("expert_dtype") or "fp4", **quantization}
    ratios = _ratios(get, layers)
    heads, groups = get.integer("num_attention_heads"), get.integer("o_groups", default=8, least=1)
    if heads % groups:
        raise ConfigError(f"{get.where}: num_attention_heads {heads} in o_groups {groups} groups")
    head = get.integer("head_dim")
    rope = get.integer("qk_rope_head_dim", default=_part(get, head), least=1)
    if rope % 2 or rope >= head:
        raise UnsupportedError(
            f"{get.where}: qk_rope_head_dim {rope} must be even and below head_dim {head}"
        )
    theta, theirs, yarn = _rope(get)
    experts = get.integer("n_routed_experts", "num_local_experts", most=most)
    config = ModelConfig(
        architecture=architecture,
        layers=layers,
        heads=heads,
        q_lora=get.integer("q_lora_rank"),
        kv_lora=head - rope,
        qk_nope=head - rope,
        qk_rope=rope,
        v_head=head,
        intermediate=0,
        moe_intermediate=get.integer("moe_intermediate_size"),
        experts=experts,
        shared_experts=1,
        first_dense=0,
        moe_every=1,
        routing=_routing(get, experts),
        rope_theta=theta,
        yarn=None,
        rope_interleave=True,
        # With these keys the layers behind the last are stages of another kind of draft.
        mtp_layers=0 if any(key.startswith("dspark_") for key in get.raw)
        else get.integer("num_nextn_predict_layers", default=0),
        indexing=_indexing(get, ratios, rope),
        hybrid=Hybrid(
            ratios=ratios,
            window=get.integer("sliding_window"),
            theta=theirs,
            yarn=yarn,
            groups=groups,
            o_lora=get.integer("o_lora_rank"),
            hashed=_hashed(get, layers),
            limit=get.number("swiglu_limit", 10.0),
            streams=get.integer("hc_mult", default=4, least=1),
            rounds=get.integer("hc_sinkhorn_iters", default=20, least=1, most=1000),
            stream_eps=get.number("hc_eps", 1e-6),
        ),
        **said,
    )  # fmt: skip
    return config


def _refuse(get: Reader) -> None:
    """UnsupportedError for what DeepSeek-V4's model does not have."""
    served: tuple[tuple[str, Any], ...] = (
        ("num_key_value_heads", 1),
        ("n_shared_experts", 1),
        ("scoring_func", "sqrtsoftplus"),
        ("topk_method", "noaux_tc"),
        ("norm_topk_prob", True),
        ("mlp_bias", False),
        ("tie_word_embeddings", False),
    )
    for key, value in served:
        if (found := get.any(key)) is not None and (
            found != value or type(found) is not type(value)
        ):
            raise UnsupportedError(
                f"{get.where}: {key} {shown(found)} is not supported for DeepSeek-V4; expected "
                f"{value!r}"
            )
    expert = get.mapping("quantization_config").get("expert_dtype", get.any("expert_dtype"))
    if expert not in (None, "fp4", "fp8"):
        raise UnsupportedError(
            f"{get.where}: expert_dtype {shown(expert)} is not supported; expected 'fp4' or 'fp8'"
        )


def _part(get: Reader, head: int) -> int:
    """Rotated dims of a head where only their part of it is said."""
    part = get.number("partial_rotary_factor", 0.125)
    if not part < 1:
        raise get.wrong("partial_rotary_factor", "a number below 1")
    return int(head * part)


def _ratios(get: Reader, layers: int) -> tuple[int, ...]:
    """Per layer. The native list has entries of draft layers behind them."""
    native, kinds = get.any("compress_ratios"), get.strings("layer_types")
    made: list[tuple[int, ...]] = []
    if native is not None:
        if not isinstance(native, list) or not all(type(r) is int for r in native):
            raise get.wrong("compress_ratios", "a list of whole numbers")
        made.append(tuple(native[:layers]))
    if kinds:
        rates = Reader(get.mapping("compress_rates"), get.where, "compress_rates")
        for kind in kinds:
            if kind not in _KINDS:
                raise UnsupportedError(
                    f"{get.where}: layer_types has {shown(kind)}; supported: {', '.join(_KINDS)}"
                )
            wanted = _KINDS[kind]
            if wanted and rates.integer(kind, default=wanted) != wanted:
                raise UnsupportedError(
                    f"{get.where}: compress_rates.{kind} {rates.any(kind)}; supported: {wanted}"
                )
        made.append(tuple(_KINDS[kind] for kind in kinds))
    if not made:
        raise get.missing("compress_ratios")
    key = "compress_ratios" if native is not None else "layer_types"
    if any(len(found) != layers for found in made):
        raise ConfigError(
            f"{get.where}: {key} names {min(map(len, made))} layers, num_hidden_layers is {layers}"
        )
    if made[0] != made[-1]:
        raise ConfigError(f"{get.where}: compress_ratios and layer_types disagree; leave one out")
    if other := sorted(set(made[0]) - set(_KINDS.values())):
        raise UnsupportedError(
            f"{get.where}: compress_ratios has {other[0]}; supported: 0, {SPARSE}, {DENSE}"
        )
    if not any(made[0]):
        raise UnsupportedError(
            f"{get.where}: {key} names layers with a window alone, of which pages keep nothing; "
            "expected one with compressed entries at least"
        )
    return made[0]


def _hashed(get: Reader, layers: int) -> int:
    """How many layers, from the first, choose experts by token id."""
    kinds = get.strings("mlp_layer_types")
    if not kinds:
        return min(get.integer("num_hash_layers", default=3), layers)
    count = next((i for i, kind in enumerate(kinds) if kind != _HASHED), len(kinds))
    if len(kinds) != layers or any(kind != _SCORED for kind in kinds[count:]):
        raise UnsupportedError(
            f"{get.where}: mlp_layer_types {shown(kinds)} is not supported; expected {layers} "
            f"layers, first those of {_HASHED}, then those of {_SCORED}"
        )
    if get.integer("num_hash_layers", default=count) != count:
        raise ConfigError(
            f"{get.where}: num_hash_layers and mlp_layer_types disagree; leave one out"
        )
    return count


def _rope(get: Reader) -> tuple[float, float, Yarn | None]:
    """(theta of layers with a window alone, theta and YaRN of the others)."""
    under = "rope_scaling" if get.mapping("rope_scaling") else "rope_parameters"
    said = Reader(get.mapping(under), get.where, under)
    main = Reader(said.mapping("main"), get.where, f"{under}.main")
    inner = f"{under}.compress" if said.mapping("compress") else under
    scaling = Reader(said.mapping("compress") or said.raw, get.where, inner)
    for reader, served in ((main, ("", "default")), (scaling, ("", "default", "yarn"))):
        kind = reader.text("rope_type") or reader.text("type")
        if kind not in served:
            raise UnsupportedError(
                f"{get.where}: {reader.under} is of type {kind!r}; supported: "
                f"{', '.join(filter(None, served))}"
            )
    if (factor := scaling.any("attention_factor")) not in (None, 1):
        raise UnsupportedError(
            f"{get.where}: {inner}.attention_factor {shown(factor)} is not supported; leave it out"
        )
    theta = main.number("rope_theta", get.number("rope_theta", 10000.0, 1.0), 1.0)
    nested = scaling if inner != under else Reader({}, get.where)
    theirs = nested.number("rope_theta", get.number("compress_rope_theta", 160000.0, 1.0), 1.0)
    if (scaling.text("rope_type") or scaling.text("type")) != "yarn":
        return theta, theirs, None
    original = scaling.integer("original_max_position_embeddings", least=1)
    fast, slow = scaling.number("beta_fast", 32.0), scaling.number("beta_slow", 1.0)
    return theta, theirs, Yarn(scaling.number("factor"), original, fast, slow, 1.0, 1.0)


def _routing(get: Reader, experts: int) -> Routing:
    top_k = get.integer("num_experts_per_tok")
    if top_k > experts:
        raise ConfigError(
            f"{get.where}: num_experts_per_tok {top_k} is more than n_routed_experts {experts}"
        )
    scale = get.number("routed_scaling_factor", 1.0)
    return Routing(top_k, experts, 1, 1, "sqrtsoftplus", "noaux_tc", True, scale)


def _indexing(get: Reader, ratios: tuple[int, ...], rope: int) -> Indexing | None:
    """What chooses compressed entries, where a layer has such."""
    if SPARSE not in ratios:
        return None
    dim = get.integer("index_head_dim")
    if dim & (dim - 1) or dim < max(4, rope):
        raise UnsupportedError(
            f"{get.where}: index_head_dim {dim} is not supported; expected a power of two of at "
            f"least qk_rope_head_dim {rope}"
        )
    entries = -(-get.integer("max_position_embeddings") // SPARSE)
    top_k = min(get.integer("index_topk"), entries)  # nobody sees more
    computes = tuple(ratio == SPARSE for ratio in ratios)
    return Indexing(get.integer("index_n_heads"), dim, top_k, True, computes, "compress_ratios")
