"""Which sizes of steps are captured. Torch-free."""

from __future__ import annotations

from ds_runtime.common.balance import most_of
from ds_runtime.config.engine import EngineConfig
from ds_runtime.config.fields import flag_of
from ds_runtime.errors import ConfigError

_EVERY = 32  # rows: a larger step that is captured late takes too long for that to matter
_LIMITS = (
    ("graph_sizes", "disable_graph", "max_running_requests", "requests run at once"),
    ("prefill_graph_sizes", "disable_prefill_graph", "max_step_tokens", "are computed in one step"),
)


def graph_sizes(config: EngineConfig, late: bool = False) -> tuple[int, ...]:
    """Requests of the decode steps to capture, rising: --graph-sizes, or ever wider apart. late:
    each when it is needed, so that no step has spare rows. Where groups of ranks divide the
    sequences they are those of one group, and every group has as many rows.
    """
    most, given = most_of(config.max_running_requests, config.attn_dp), config.graph_sizes
    if config.max_graph_size is not None:
        most = min(most, config.max_graph_size)
    if given is None and late:
        return tuple(range(1, min(most, _EVERY) + 1))
    if given is None:
        sizes = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most, 32))
        return (*(size for size in sizes if size < most), most)
    return tuple(sorted(set(given)))


def verifying_sizes(
    config: EngineConfig, queries: int | None, late: bool = False
) -> tuple[int, ...]:
    """Those of `graph_sizes` that are captured. queries: tokens of each request that are verified
    together, of all groups no more than a step has; None: nothing is drafted.
    """
    sizes, most = graph_sizes(config, late), config.max_step_tokens
    each = 0 if queries is None else queries * config.attn_dp
    return tuple(size for size in sizes if size * each <= most)


def prefill_graph_sizes(config: EngineConfig) -> tuple[int, ...]:
    """Tokens of the steps with prompts to capture, rising: --prefill-graph-sizes, or ever wider
    apart. Where groups of ranks divide the sequences they are those of one group, and all groups
    together have no more unasked."""
    most, given = config.max_step_tokens, config.prefill_graph_sizes
    if given is None:
        common = config.chunked_prefill_size + config.max_running_requests
        most = min(most, common, config.max_prefill_graph_size)
        most = max(1, most // config.attn_dp)
        few = (16, 32, *range(64, 256, 32), *range(256, 1024, 64))
        sizes = (*few, *range(1024, 4096, 128), *range(4096, most, 192))
        return (*(size for size in sizes if size < most), most)
    return tuple(sorted(set(given)))


def check_graph_sizes(config: EngineConfig) -> None:
    """Of a configuration that has its defaults. Raises ConfigError."""
    for name, off, limit, said in _LIMITS:
        if (given := getattr(config, name)) is None:
            continue
        sizes, most = f"{flag_of(name)} {','.join(map(str, given))}", getattr(config, limit)
        if config.disable_graph or getattr(config, off):
            flag = flag_of("disable_graph" if config.disable_graph else off)
            raise ConfigError(f"{sizes}: {flag} captures none; leave one of them out")
        if max(given) > most:
            raise ConfigError(f"{sizes}: at most {flag_of(limit)} {most} {said}")
