"""How much memory one rank's weights take once packed: from sites alone. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ds_runtime.model.config import ModelConfig
from ds_runtime.model.sites import vocab_rows
from ds_runtime.ops.spec import Kernel, Site

if TYPE_CHECKING:
    from ds_runtime.assemble import Assembly

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FP8_BYTES = 1 + 4 / (128 * 128)


def packed_bytes(
    config: ModelConfig,
    choices: Iterable[tuple[Site, Kernel | None]],
    dtype: str,
    tp: int,
    positions: int,
) -> int:
    """Bytes of one rank's packed weights, embedding, routers and rotation table.

    choices: sites with their kernels, as `Binding.choices`. A kernel holds a weight in the
    compute dtype unless it keeps the format, as often as it says. Padding is not counted.
    """
    item = ITEM_BYTES[dtype]
    total: float = vocab_rows(config, tp) * config.hidden * item + rotation_bytes(config, positions)
    for site, kernel in choices:
        if not site.weight_format or not site.shape:
            continue
        matrices = 3 if site.op == "experts" else 1
        kept = kernel is not None and site.weight_format in kernel.keeps
        size = _FP8_BYTES if kept else item
        copies = 1 if kernel is None else kernel.copies
        total += copies * matrices * math.prod(site.shape) * size
    routers = sum(config.is_moe(layer) for layer in range(config.layers))
    total += routers * config.experts * config.hidden * 4
    return int(total)


def rotation_bytes(config: ModelConfig, positions: int) -> int:
    """The rotation table: float32 [positions, qk_rope]."""
    return positions * config.qk_rope * 4


def page_table_bytes(assembly: Assembly) -> int:
    """What a decode kernel keeps for one step: an int32 per page of every running request."""
    config = assembly.config
    pages = -(-positions_of(assembly) // config.page_size)
    return config.max_running * pages * 4


def positions_of(assembly: Assembly) -> int:
    """Positions that the rotation table covers: the context."""
    return assembly.config.context_length or assembly.model.max_positions


def needed_bytes(assembly: Assembly) -> int:
    """What one rank's packed weights will take."""
    config, choices = assembly.config, assembly.binding.choices
    positions = positions_of(assembly)
    return packed_bytes(assembly.model, choices, config.dtype, config.tp, positions)
