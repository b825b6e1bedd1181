"""Whether a model fits in the memory of a described device, and the smallest layout that does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from ds_runtime.common.progress import amount
from ds_runtime.errors import ConfigError, DsRuntimeError

if TYPE_CHECKING:
    from ds_runtime.assembly.result import Assembly

MOST_RANKS = 64


def shortfall(assembly: Assembly) -> str | None:
    """What does not fit in one rank's device, as starting would find; None if all does. Raises
    ConfigError where it is --kv-memory that does not.
    """
    from ds_runtime.assembly.estimate import needed_bytes
    from ds_runtime.kv.budget import Room, context_length, kv_memory

    memory = assembly.platform.memory()
    needed = needed_bytes(assembly)
    if needed > memory.free:
        return f"the weights of one rank need {amount(needed)}"
    context = context_length(assembly)
    try:
        room = Room(memory.total, memory.free, memory.free - needed)
        cache = kv_memory(assembly, room, context)
    except ConfigError as e:
        if assembly.config.kv_memory is not None:
            raise
        return str(e)
    pages = -(-context // cache.page_size)
    if cache.pages < pages:
        said = cache.too_small(cache.pages, context)
        if assembly.config.kv_memory is not None:
            raise said
        return f"the weights of one rank need {amount(needed)}, and {said}"
    return None


def check_fit(assembly: Assembly, device: str, with_ranks: Callable[[int], Assembly]) -> None:
    """ConfigError if the model does not fit in the described device, with the smallest number of
    ranks with which it does. with_ranks: decides again for another `--tp`."""
    said = shortfall(assembly)
    if said is None:
        return
    info, config = assembly.device, assembly.config
    fits = next(_fitting(config.tp, with_ranks), None)
    remedy = (
        f"no larger --tp up to {MOST_RANKS} makes it fit; a model in fewer bits may"
        if fits is None
        else f"--tp {fits} is the smallest layout that fits"
    )
    ranks = "one rank" if config.tp == 1 else f"--tp {config.tp}"
    raise ConfigError(
        f"{config.model} does not fit on {device} ({info.name}, {amount(info.memory)}) with "
        f"{ranks}: {said}; {remedy}"
    )


def _fitting(tp: int, with_ranks: Callable[[int], Assembly]) -> Iterator[int]:
    """The larger numbers of ranks that fit, smallest first."""
    ranks = 2 * tp
    while ranks <= MOST_RANKS:
        with suppress(DsRuntimeError):  # heads that so many ranks cannot divide
            if shortfall(with_ranks(ranks)) is None:
                yield ranks
        ranks *= 2
