"""Settings that follow from which caches a model has. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ds_runtime.common.speculation import Speculation
from ds_runtime.config import EngineConfig, with_changes
from ds_runtime.errors import ConfigError, UnsupportedError
from ds_runtime.ops.caches import CacheGroup, page_multiple

Changes = list[tuple[str, str, str, str]]  # field, change, who, why


def with_whole_pages(
    config: EngineConfig, groups: Sequence[CacheGroup], explicit: Collection[str], changes: Changes
) -> EngineConfig:
    """A page holds whole entries of every group: a size that nobody gave is rounded up, which is
    added to `changes`. Raises ConfigError for one that was given."""
    size, of = config.page_size, page_multiple(groups)
    if size % of == 0:
        return config
    fits = -(-size // of) * of
    which = ", ".join(f"{g.name} ({g.multiple})" for g in groups if g.multiple > 1)
    why = f"an entry stands for several tokens in {which}"
    if "page_size" in explicit:
        raise ConfigError(f"--page-size {size}: {why}; give a multiple of {of}, e.g. {fits}")
    changes.append(("page_size", f"{size} → {fits}", "core", f"{why}: a multiple of {of}"))
    return with_changes(config, {"page_size": fits})


def check_states(config: EngineConfig, groups: Sequence[CacheGroup]) -> None:
    """Raises ConfigError for snapshots of nothing, UnsupportedError for trees of drafts where
    requests keep more than pages: only a chain can be taken back there."""
    states = [group.name for group in groups if group.blocks(0, 1)]
    if config.state_snapshots is not None and not states:
        raise ConfigError(
            f"--state-snapshots {config.state_snapshots}: requests of this model keep nothing "
            "beside pages: leave the flag out"
        )
    shape = Speculation.of(config)
    if states and shape is not None and shape.topk > 1:
        raise UnsupportedError(
            f"--speculative-eagle-topk {shape.topk}: requests keep a state ({', '.join(states)}), "
            "and a tree of drafts cannot be taken back there: give 1"
        )
