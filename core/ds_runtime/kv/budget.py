"""How long a context may be and how many KV pages one rank gets. Pure arithmetic; torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ds_runtime.assembly.estimate import activation_bytes, decode_bytes, prefix_bytes, sparse_bytes
from ds_runtime.assembly.result import Assembly
from ds_runtime.assembly.room import CacheDivision, kv_room, reserve
from ds_runtime.common.progress import amount
from ds_runtime.config.fields import flag_of
from ds_runtime.errors import ConfigError
from ds_runtime.ops.contracts.caches import CacheSizes

FULL_CONTEXTS = 8


def context_length(assembly: Assembly) -> int:
    """The longest prompt + output: the flag, else the model's own limit."""
    limit = assembly.model.max_positions
    wanted = assembly.config.context_length
    if wanted is not None and wanted > limit:
        raise ConfigError(
            f"--context-length {wanted}: the model's positions end at {limit} "
            f"(max_position_embeddings); give at most that"
        )
    return limit if wanted is None else wanted


@dataclass(frozen=True, slots=True)
class KvMemory:
    """What one rank can hold. sizes: of a page, and a block of state. why: what sets the size.
    snapshots: of what requests keep besides pages; states: all blocks for that, these among them.
    """

    pages: int
    sizes: CacheSizes
    free: int
    page_size: int
    why: str
    remedy: str = ""  # of a cache that is too small, beside the flags of memory
    warning: str = ""  # where the largest steps may run out of memory
    snapshots: int = 0
    states: int = 0

    @staticmethod
    def of(
        assembly: Assembly,
        given: int,
        free: int,
        why: str,
        remedy: str = "",
        warning: str = "",
        most: int | None = None,
    ) -> KvMemory:
        """Of `given` bytes: blocks for requests and snapshots, then pages, `most` at most."""
        config, sizes = assembly.config, assembly.cache_sizes
        pages, snapshots, states = CacheDivision.of(config, sizes, given, most)
        said = why, remedy, warning
        return KvMemory(pages, sizes, free, config.page_size, *said, snapshots, states)

    @property
    def total(self) -> int:
        """Bytes of the whole KV cache."""
        return self.pages * self.sizes.page + self.states * self.sizes.state

    def fewest(self, others: Sequence[KvMemory]) -> KvMemory:
        """What every rank can hold."""
        pages, snapshots = (min(m.pages for m in others), min(m.snapshots for m in others))
        states = self.states - self.snapshots + snapshots
        return replace(self, pages=pages, snapshots=snapshots, states=states)

    def too_small(self, pages: int, context: int) -> ConfigError:
        """The error for a cache that does not hold one full context."""
        needed = amount(-(-context // self.page_size) * self.sizes.page)
        fits = pages * self.page_size
        lower = f"lower --context-length, e.g. to {fits}, or " if fits else ""
        beside = states = ""
        if self.states:
            running = self.states - self.snapshots - 1
            beside = (
                f", besides {amount(self.states * self.sizes.state)} of states "
                f"(--max-running-requests {running}, --state-snapshots {self.snapshots})"
            )
            states = "lower --state-snapshots or --max-running-requests, "
        return ConfigError(
            f"KV cache: one context of {context} tokens needs {needed}, but {self.why} "
            f"{amount(pages * self.sizes.page)}, {fits} tokens{beside}; {amount(self.free)} are "
            f"free: {self.remedy}{states}{lower}raise --kv-memory or --mem-fraction-static"
        )


@dataclass(frozen=True, slots=True)
class Room:
    """Memory of one rank's device in bytes: all of it, and what was free before the weights were
    loaded and is free now."""

    total: int
    before: int
    free: int


def kv_memory(assembly: Assembly, room: Room, context: int) -> KvMemory:
    """Pages for the KV cache of one rank. Raises ConfigError for a flag that asks for more memory
    than there is."""
    config = assembly.config
    made = partial(KvMemory.of, assembly, free=room.free)
    if config.kv_memory is not None:
        if config.kv_memory > room.free:
            raise ConfigError(
                f"--kv-memory {amount(config.kv_memory)}: only {amount(room.free)} are free after "
                "loading the weights; give less"
            )
        return made(
            config.kv_memory,
            why="your setting gives",
            warning=_narrow(assembly, room, config.kv_memory),
        )
    shares = (config.mem_fraction_static, config.memory_utilization)
    if assembly.platform.own_memory or any(share is not None for share in shares):
        return _of_device(assembly, room, made)
    share, remedy = assembly.platform.kv_share, ""
    left = max(0, room.free - sparse_bytes(assembly) - decode_bytes(assembly))
    beside = max(0, left - activation_bytes(assembly))
    most = int(left * share)
    if beside < most:
        most, share, remedy = beside, beside / room.free, _fewer_tokens(assembly)
    one = -(-context // config.page_size)
    why = f"{share:.0%} of free memory is"
    return made(most, most=FULL_CONTEXTS * one, why=why, remedy=remedy)


def _of_device(assembly: Assembly, room: Room, made: Callable[..., KvMemory]) -> KvMemory:
    """Where weights and cache share a device's own memory, or a fraction that the user gives."""
    config, fraction = assembly.config, assembly.config.mem_fraction_static
    reserved = reserve(assembly)
    left = kv_room(config, room.total, room.before, room.free, reserved.total)
    if fraction is not None and left <= 0:
        raise ConfigError(
            f"--mem-fraction-static {fraction:g}: of {amount(room.before)} that were free, the "
            f"weights leave {amount(room.free)}, and {amount(int(room.before * (1 - fraction)))} "
            "are to stay free: nothing is left for the KV cache; raise it"
        )
    why = "your setting gives"
    if fraction is None:
        why = (
            f"besides steps of {config.max_step_tokens} tokens ({amount(reserved.activations)}), "
            f"captured steps ({amount(reserved.captured)}) and other memory there are"
        )
    remedy = _fewer_tokens(assembly)
    if reserved.captured:
        remedy += f"--max-running-requests (now {config.max_running_requests}), "
        remedy += "give --disable-graph, "
    warning = "" if fraction is None else _narrow(assembly, room, left)
    return made(left, why=why, remedy="" if fraction else remedy, warning=warning)


def _narrow(assembly: Assembly, room: Room, given: int) -> str:
    """What to say of a KV cache of so many bytes that leaves the largest steps too little; "" if it
    does not."""
    left, needs = room.free - given, reserve(assembly).total
    if left >= needs or not assembly.platform.own_memory:
        return ""
    fraction = assembly.config.mem_fraction_static
    flag = (
        f"--kv-memory {amount(given)}"
        if fraction is None
        else f"--mem-fraction-static {fraction:g}"
    )
    return (
        f"{flag} leaves {amount(left)} of the device, and the largest steps may need "
        f"{amount(needs)}: a step may run out of memory; a KV cache of "
        f"{amount(max(0, room.free - needs))} is safe"
    )


def _fewer_tokens(assembly: Assembly) -> str:
    config, name = assembly.config, "max_step_tokens"
    if 2 * prefix_bytes(assembly) > activation_bytes(assembly):
        name = "prefix_chunk"
    return f"lower {flag_of(name)} (now {getattr(config, name)}), "
