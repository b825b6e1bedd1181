"""The keys of config.json that describe the lightning indexer → Indexing. Torch-free."""

from __future__ import annotations

from ds_runtime.checkpoint.reader import Reader
from ds_runtime.description.config import Indexing, ModelConfig
from ds_runtime.errors import ConfigError, UnsupportedError, shown

_KINDS = {"full": True, "shared": False}


def read_indexing(get: Reader, layers: int, glm: bool) -> Indexing:
    """The indexer of a sparse model. GLM rotates pairs unless it says otherwise."""
    computes, key = _computes(get, layers)
    return Indexing(
        heads=get.integer("index_n_heads"),
        dim=get.integer("index_head_dim"),
        # Nobody sees more: rows of choices, and what is set aside for them, need not be longer.
        top_k=min(get.integer("index_topk"), get.integer("max_position_embeddings")),
        interleaved=get.boolean("indexer_rope_interleave", glm),
        computes=computes,
        because=f"{key} {shown(get.any(key))}",
    )


def check_indexing(get: Reader, config: ModelConfig) -> None:
    """Raise for an indexer that no kernel computes."""
    if (indexing := config.indexing) is None:
        return
    if config.q_lora is None:
        raise ConfigError(
            f"{get.where}: q_lora_rank is missing: the indexer of {config.architecture} reads the "
            "query latent"
        )
    d = indexing.dim
    if d & (d - 1) or d < max(4, config.qk_rope):
        raise UnsupportedError(
            f"{get.where}: index_head_dim {d} is not supported; expected a power of two of at "
            f"least qk_rope_head_dim {config.qk_rope}"
        )
    if not config.rope_interleave:
        raise UnsupportedError(
            f"{get.where}: rope_interleave false is not supported for {config.architecture}"
        )
    if not indexing.computes[0]:
        raise ConfigError(
            f"{get.where}: layer 0 shares the choice of an earlier layer, but there is none: "
            "it must be full (F)"
        )


def _computes(get: Reader, layers: int) -> tuple[tuple[bool, ...], str]:
    """Per layer, whether it has an indexer, and the key that says so: `indexer_types`, else
    `index_topk_pattern`, else `index_topk_freq` with `index_skip_topk_offset`."""
    if kinds := get.strings("indexer_types"):
        if len(kinds) != layers:
            raise ConfigError(
                f"{get.where}: indexer_types names {len(kinds)} layers, num_hidden_layers is "
                f"{layers}"
            )
        for kind in kinds:
            if kind not in _KINDS:
                raise ConfigError(
                    f"{get.where}: indexer_types has {shown(kind)}; expected full or shared"
                )
        return tuple(_KINDS[kind] for kind in kinds), "indexer_types"
    if pattern := get.text("index_topk_pattern"):
        if set(pattern) - set("FS") or len(pattern) > layers:
            raise get.wrong("index_topk_pattern", f"F or S for each of at most {layers} layers")
        computes = tuple(pattern[i : i + 1] != "S" for i in range(layers))  # F beyond its end
        return computes, "index_topk_pattern"
    freq = get.integer("index_topk_freq", default=1, least=1)
    offset = get.integer("index_skip_topk_offset", default=2)
    return tuple(max(i - offset + 1, 0) % freq == 0 for i in range(layers)), "index_topk_freq"
