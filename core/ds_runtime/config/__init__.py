"""Every setting of the engine and the server, its default and its help. Frozen; torch-free.

Command-line flags and the keys of `--config FILE` are these fields, so this is the only place for
defaults. Plugins may wish for changes (`ds_defaults`); what the user set explicitly always wins, of
`fusion` by name.
"""

from ds_runtime.config.engine import EngineConfig, with_changes
from ds_runtime.config.fields import parse_size
from ds_runtime.config.graph_sizes import check_graph_sizes
from ds_runtime.config.server import ServerConfig, check_key
from ds_runtime.config.values import MAX_ITL

__all__ = [
    "MAX_ITL",
    "EngineConfig",
    "ServerConfig",
    "check_graph_sizes",
    "check_key",
    "parse_size",
    "with_changes",
]
