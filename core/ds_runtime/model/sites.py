"""The sites of a model: every op at every place, as the model classes will ask for it.

Torch-free, so that `ds-runtime plan` needs no weights. Must agree with `model/*.py`: an op that a
layer uses but that is not listed here raises at its first call.
"""

from __future__ import annotations

from collections.abc import Callable

from ds_runtime.model.config import ModelConfig
from ds_runtime.ops.spec import Site

FormatOf = Callable[[str], str]  # module path in the checkpoint → weight format


def vocab_rows(config: ModelConfig, tp: int) -> int:
    """Rows of embedding and head per rank; the last rank's are padded with zeros."""
    return -(-config.vocab_size // tp)


def model_sites(config: ModelConfig, format_of: FormatOf, tp: int = 1) -> list[Site]:
    """All sites of the target model on one of `tp` ranks."""
    sites = [Site("embed", -1, "embed_tokens"), Site("add_rms_norm", -1, "norm")]
    for layer in range(config.layers):
        sites += [Site("rms_norm", layer, "block"), Site("add_rms_norm", layer, "block")]
        sites += _attention(config, layer, format_of, tp)
        sites += _mlp(config, layer, format_of, tp)
    rows = vocab_rows(config, tp)
    sites.append(Site("linear", -1, "lm_head", weight_format="dense", shape=(rows, config.hidden)))
    sites += [Site("sample", -1, "sampler"), Site("logprobs", -1, "sampler")]
    return sites


def _linear(layer: int, module: str, shape: tuple[int, int], format_of: FormatOf) -> Site:
    weight_format = format_of(f"model.layers.{layer}.{module}")
    return Site("linear", layer, module, weight_format=weight_format, shape=shape)


def _attention(c: ModelConfig, layer: int, format_of: FormatOf, tp: int) -> list[Site]:
    heads = c.heads // tp
    at = "self_attn"
    kv_b = (heads * (c.qk_nope + c.v_head), c.kv_lora)
    sites = [
        Site("rms_norm", layer, at),
        Site("mla_prologue", layer, at),
        Site("cache_gather", layer, at, "prefill"),
        Site("mha_prefill", layer, at, "prefill"),
        Site("merge_state", layer, at, "prefill"),
        Site("mla_decode", layer, at, "decode"),
        Site(
            "mla_absorb",
            layer,
            f"{at}.kv_b_proj",
            weight_format=format_of(f"model.layers.{layer}.{at}.kv_b_proj"),
            shape=kv_b,
        ),
        _linear(layer, f"{at}.kv_a_proj_with_mqa", (c.latent, c.hidden), format_of),
        _linear(layer, f"{at}.o_proj", (c.hidden, heads * c.v_head), format_of),
    ]
    if c.q_lora:
        sites.append(_linear(layer, f"{at}.q_a_proj", (c.q_lora, c.hidden), format_of))
        sites.append(_linear(layer, f"{at}.q_b_proj", (heads * c.qk_head, c.q_lora), format_of))
    else:
        sites.append(_linear(layer, f"{at}.q_proj", (heads * c.qk_head, c.hidden), format_of))
    return sites


def _mlp(c: ModelConfig, layer: int, format_of: FormatOf, tp: int) -> list[Site]:
    if not c.is_moe(layer):
        return _swiglu(c, layer, "mlp", c.intermediate // tp, format_of)
    width = c.moe_intermediate // tp
    sites = [
        Site("router_logits", layer, "mlp"),
        Site("route", layer, "mlp"),
        Site(
            "experts",
            layer,
            "mlp.experts",
            weight_format=format_of(f"model.layers.{layer}.mlp.experts.0.gate_proj"),
            shape=(c.experts, width, c.hidden),
        ),
    ]
    if c.shared_experts:
        shared = c.shared_experts * c.moe_intermediate // tp
        sites += _swiglu(c, layer, "mlp.shared_experts", shared, format_of)
    return sites


def _swiglu(c: ModelConfig, layer: int, module: str, width: int, format_of: FormatOf) -> list[Site]:
    fmt = format_of(f"model.layers.{layer}.{module}.gate_proj")
    return [
        Site("silu_mul", layer, module),
        Site(
            "linear",
            layer,
            f"{module}.gate_up_proj",
            weight_format=fmt,
            shape=(2 * width, c.hidden),
        ),
        _linear(layer, f"{module}.down_proj", (c.hidden, width), format_of),
    ]
