"""Which sizes of steps are captured. Torch-free."""

from __future__ import annotations

from ds_runtime.config.engine import EngineConfig
from ds_runtime.config.fields import flag_of
from ds_runtime.errors import ConfigError

_EVERY = 32  # rows: a larger step that is captured late takes too long for that to matter
_LIMITS = (
    ("graph_sizes", "disable_graph", "max_running_requests", "requests run at once"),
    ("prefill_graph_sizes", "disable_prefill_graph", "max_step_tokens", "are computed in one step"),
)


def graph_sizes(config: EngineConfig, late: bool = False) -> tuple[int, ...]:
    """Rows of the decode steps to capture, rising: --graph-sizes, or ever wider apart. late: each
    when it is needed, so that no step has spare rows.
    """
    most, given = config.max_running_requests, config.graph_sizes
    if config.max_graph_size is not None:
        most = min(most, config.max_graph_size)
    if given is None and late:
        return tuple(range(1, min(most, _EVERY) + 1))
    if given is None:
        sizes = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most, 32))
        return (*(size for size in sizes if size < most), most)
    return tuple(sorted(set(given)))


def prefill_graph_sizes(config: EngineConfig) -> tuple[int, ...]:
    """Tokens of the steps with prompts to capture, rising: --prefill-graph-sizes, or ever wider
    apart."""
    most, given = config.max_step_tokens, config.prefill_graph_sizes
    if given is None:
        common = config.chunked_prefill_size + config.max_running_requests
        most = min(most, common, config.max_prefill_graph_size)
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
