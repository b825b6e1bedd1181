"""Where the draft layer (MTP, NextN) lies, what it stores, and its sites. Torch-free.

In the model it is layer `num_hidden_layers`, behind the last; its checkpoint may be the model's own
or another folder, with a format of its own. Embedding and head are the model's: copies of them in
the checkpoint are not read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ds_runtime.checkpoint.hub import resolve_model
from ds_runtime.description.config import ModelConfig
from ds_runtime.description.hf import load_config
from ds_runtime.description.manifest import Stored, block_modules
from ds_runtime.description.sites import (
    TREE,
    FormatOf,
    Verify,
    block_sites,
    decode_op,
    tree_choice,
    vocab_rows,
)
from ds_runtime.errors import CheckpointError, ConfigError, UnsupportedError
from ds_runtime.ops.contract import Site

DRAFT = "draft"  # the role of its sites
SHARED = ("embed_tokens", "shared_head.head")  # what its checkpoint may hold again
HEAD = "draft_head"  # the site of a copy of the model's head that drafts are drawn by
_FLAG = "--speculative-algorithm"


@dataclass(frozen=True, slots=True)
class NextN:
    """The draft layer's checkpoint. layer: its number there; config: of that folder."""

    folder: Path
    layer: int
    config: ModelConfig

    def stored_name(self, module: str, layers: int) -> str:
        """A module below `model.layers.{layers}.` as this checkpoint calls it."""
        ours = f"model.layers.{layers}."
        assert module.startswith(ours), module
        return f"model.layers.{self.layer}.{module[len(ours) :]}"


def find_nextn(algorithm: str, path: str | None, folder: Path, config: ModelConfig) -> NextN:
    """In the folder that the user names, else in the model's. Errors name what is missing."""
    if path is None:
        if config.mtp_layers < 1:
            raise UnsupportedError(
                f"{_FLAG} {algorithm}: {folder / 'config.json'} has no num_nextn_predict_layers, "
                "so the checkpoint has no layer that drafts; name a folder that has one with "
                "--speculative-draft-model-path, or leave the flag out"
            )
        return NextN(folder, config.layers, config)
    flag = "--speculative-draft-model-path"
    if not path:
        raise ConfigError(f"{flag} '': is empty: name a folder or a hub id, or leave it out")
    try:
        there = resolve_model(path)
        found = load_config(there)
    except CheckpointError as e:
        said = str(e).replace("--model", flag, 1)
        raise CheckpointError(said if said.startswith(flag) else f"{flag} {path}: {said}") from e
    if (config.indexing is None) != (found.indexing is None):
        have, lack = ("no indexer", "one") if found.indexing is None else ("an indexer", "none")
        raise ConfigError(
            f"{flag} {there}: its draft layer has {have} ({found.architecture}), the model has "
            f"{lack} ({config.architecture}): it belongs to another model"
        )
    own, other = dict(config.dims()), dict(found.dims())
    for name in own:
        if name not in ("layers", "intermediate") and own[name] != other[name]:
            raise ConfigError(
                f"{flag} {there}: {name} is {other[name]}, the model's is "
                f"{own[name]}: its draft layer belongs to another model"
            )
    # Exported alone, the layer is the first and only one.
    return NextN(there, 0 if found.layers == 1 else found.layers, found)


def nextn_modules(config: ModelConfig, nextn: NextN, format_of: FormatOf) -> dict[str, Stored]:
    """What is read of the draft layer: by its path in the model, as its checkpoint stores it."""
    ours, theirs = (f"model.layers.{n}." for n in (config.layers, nextn.layer))
    drafts = draft_modules(config, nextn.layer, format_of)
    return {ours + module[len(theirs) :]: s for module, s in drafts.items()}


def draft_modules(config: ModelConfig, layer: int, format_of: FormatOf) -> dict[str, Stored]:
    """What draft layer `layer` of a checkpoint stores, by its path there."""
    at = f"model.layers.{layer}"
    return {s.module: s for s in _stored(config, layer, at, format_of)}


def _stored(c: ModelConfig, layer: int, at: str, format_of: FormatOf) -> Iterator[Stored]:
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield Stored(f"{at}.{name}", (c.hidden,))
    yield Stored(f"{at}.eh_proj", (c.hidden, 2 * c.hidden), format_of(f"{at}.eh_proj"))
    # Of what kind it is the model's number says: in a folder of its own it has another.
    yield from block_modules(c, layer, c.is_moe(c.layers), c.has_indexer(c.layers), format_of)


def nextn_sites(
    config: ModelConfig,
    nextn: NextN,
    format_of: FormatOf,
    tp: int = 1,
    apart: Collection[str] = (),
    verify: Verify = "verify",
    attention_tp: int | None = None,
    head: str = "",
) -> list[Site]:
    """The draft layer's sites on one of `tp` ranks. format_of: of its own checkpoint's paths.
    attention_tp: ranks that divide the heads of attention (default: all). head: the format of its
    copy of the model's head; none: it has no copy.
    """
    layer, trees = config.layers, verify == "tree" and config.indexing is None

    def stored(module: str) -> str:
        return format_of(nextn.stored_name(module, layer))

    sites = [
        Site("rms_norm", layer, "nextn"),
        Site("add_rms_norm", layer, "nextn"),
        Site(
            "linear",
            layer,
            "eh_proj",
            weight_format=stored(f"model.layers.{layer}.eh_proj"),
            shape=(config.hidden, 2 * config.hidden),
        ),
        *block_sites(config, layer, stored, (tp, attention_tp or tp), apart, "verify"),
        *((Site(decode_op(config), layer, TREE, "tree"),) if trees else ()),
    ]
    if verify == "tree" and config.indexing is not None:
        sites += tree_choice(layer)
    if head:
        shape = (vocab_rows(config, tp), config.hidden)
        sites.append(Site("linear", layer, HEAD, weight_format=head, shape=shape))
    return [replace(site, role=DRAFT) for site in sites]
