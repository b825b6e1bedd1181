"""A GGUF file's vocabulary as tokenizer.json and tokenizer_config.json. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_runtime.errors import CheckpointError

_KEY = "tokenizer.ggml"
_CONTROL, _USER = 3, 4  # kinds of token: special ones, and such as <think>
_SPLITS = {  # how DeepSeek-V3's tokenizer.json cuts text before it merges
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^"
        "\r\n"
        r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+["
        "\r\n]*"
        r"|\s*["
        "\r\n"
        r"]+|\s+(?!\S)|\s+",
    )
}


def tokenizer_files(values: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """File name → content; none if the file holds no vocabulary.

    CheckpointError for a vocabulary of another kind than DeepSeek-V3's: how it cuts text is known
    only by a name.
    """
    model, pre = values.get(f"{_KEY}.model"), values.get(f"{_KEY}.pre")
    if model in (None, "none", "no_vocab"):
        return {}
    tokens, merges = values.get(f"{_KEY}.tokens"), values.get(f"{_KEY}.merges")
    if model != "gpt2" or pre not in _SPLITS or not tokens or not isinstance(merges, list):
        raise CheckpointError(
            f"{where}: a tokenizer cannot be built from {_KEY}.model {model!r} with {_KEY}.pre "
            f"{pre!r}, only from 'gpt2' with {', '.join(map(repr, _SPLITS))}; put tokenizer.json "
            "and tokenizer_config.json of the model next to the file"
        )
    kinds = values.get(f"{_KEY}.token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise CheckpointError(
            f"{where}: {len(tokens)} {_KEY}.tokens and {len(kinds)} token_type; the file is "
            "damaged: download it again"
        )
    added = [
        _added(i, t, kind == _CONTROL)
        for i, (t, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER)
    ]
    backend = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _pretokenizers(_SPLITS[pre])},
        "post_processor": None,
        "decoder": _byte_level(add_prefix_space=True),
        "model": {
            "type": "BPE",
            "unk_token": None,
            "vocab": {t: i for i, t in enumerate(tokens)},
            "merges": merges,
        },
    }
    return {"tokenizer.json": backend, "tokenizer_config.json": _settings(values, tokens)}


def _settings(values: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    """tokenizer_config.json: special tokens by name, and the template."""
    found: dict[str, Any] = {"add_bos_token": values.get(f"{_KEY}.add_bos_token", True)}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        index = values.get(f"{_KEY}.{theirs}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
            found[f"{ours}_token"] = tokens[index]
    if template := values.get("tokenizer.chat_template"):
        found["chat_template"] = template
    return found


def _added(index: int, text: str, special: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": text, "special": special, **plain}


def _pretokenizers(patterns: tuple[str, ...]) -> list[dict[str, Any]]:
    isolated = {"type": "Split", "behavior": "Isolated", "invert": False}
    return [
        *({**isolated, "pattern": {"Regex": p}} for p in patterns),
        _byte_level(add_prefix_space=False, use_regex=False),
    ]


def _byte_level(add_prefix_space: bool, use_regex: bool = True) -> dict[str, Any]:
    shape = {"add_prefix_space": add_prefix_space, "trim_offsets": True}
    return {"type": "ByteLevel", **shape, "use_regex": use_regex}
