"""What a device of its own memory has room for: KV cache, second forms of weights, requests.

Torch-free. The same arithmetic decides before weights are read, on a device that nobody uses, and
sizes the KV cache after loading.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from ds_runtime.assembly.crossing import Crossing
from ds_runtime.assembly.estimate import (
    ITEM_BYTES,
    activation_bytes,
    decode_bytes,
    needed_bytes,
    page_table_bytes,
    positions_of,
    saved_bytes,
    second_form_bytes,
    sparse_bytes,
    step_bytes,
)
from ds_runtime.assembly.result import Assembly, SecondForm
from ds_runtime.common.progress import amount
from ds_runtime.common.speculation import Speculation
from ds_runtime.config import EngineConfig
from ds_runtime.config.graph_sizes import prefill_graph_sizes, verifying_sizes
from ds_runtime.ops.binding.pins import Pin
from ds_runtime.ops.contracts.caches import CacheSizes
from ds_runtime.ops.reference.layouts import LATENT_PAGES

REQUESTS = 512  # that run at once where memory allows
REQUEST_TOKENS = 2048  # of each of them, at least, or its context
STATIC = 0.9  # of the device, for weights and KV cache at most
OTHERS = 10**9  # bytes: contexts of libraries, and what the allocator cannot give back
KEPT = 0.6  # of the KV cache without second forms of weights, that these must leave
SHARE = 15  # percent of the caches that snapshots take at most, if nobody says how many there are
_DRAWN = 4  # float32 copies of a step's logits while tokens are drawn
_NODES = 48 << 10  # bytes of the device that a captured step takes per layer
_PEERS = 512 << 20  # bytes that a communicator of several ranks keeps


class CacheDivision(NamedTuple):
    """How the memory of the caches is divided on one rank, by `plan` and the start alike. states: a
    block for every request that runs, a spare one, and snapshots of these."""

    pages: int
    snapshots: int = 0
    states: int = 0

    @staticmethod
    def of(
        config: EngineConfig, sizes: CacheSizes, given: int, most: int | None = None
    ) -> CacheDivision:
        """What `given` bytes hold, with `most` pages at most. No page where states take all."""
        running = config.max_running_requests + 1 if sizes.state else 0

        def pages(snapshots: int) -> int:
            room = max(0, given - (running + snapshots) * sizes.state) // sizes.page
            return room if most is None else min(room, most)

        snapshots = 0
        if sizes.state and not config.disable_radix_cache:
            snapshots = config.state_snapshots or 0
            if config.state_snapshots is None:
                snapshots = max(0, SHARE * given) // (100 * sizes.state)
                others = pages(snapshots) * sizes.page + running * sizes.state
                rest = (100 - SHARE) * sizes.state
                snapshots = min(snapshots, SHARE * others // rest)  # a share of what is kept
        return CacheDivision(pages(snapshots), snapshots, running + snapshots)


@dataclass(frozen=True, slots=True)
class Reserve:
    """Bytes of a device that are neither weights nor KV cache. activations: of the largest step,
    with its logits. captured: the memory of captured steps. communication: buffers of several
    ranks."""

    activations: int
    captured: int
    communication: int
    others: int = OTHERS

    @property
    def total(self) -> int:
        """Bytes of all."""
        return self.activations + self.captured + self.communication + self.others


def reserve(assembly: Assembly) -> Reserve:
    """What is kept free besides weights and KV cache on one rank's device."""
    config, crossing = assembly.config, Crossing.of(assembly)
    shape = Speculation.of(config)
    rows = config.max_running_requests * (1 if shape is None else shape.tokens)
    logits = _logit_bytes(assembly, min(rows, config.max_step_tokens))
    step = activation_bytes(assembly) + sparse_bytes(assembly) + page_table_bytes(assembly)
    step += decode_bytes(assembly)
    captured = _captured_bytes(assembly, shape) if assembly.facts.graph_capture else 0
    communication = _PEERS * len(crossing.mesh.divisions) + crossing.held(config.max_step_tokens)
    communication += assembly.sums.sizes.most
    communication += 2 * assembly.sums.gathered // crossing.mesh.tp  # two halves, of a rank's part
    return Reserve(step + logits, captured, communication)


def _logit_bytes(assembly: Assembly, rows: int) -> int:
    """Of so many rows, from the head to what is drawn."""
    crossing = Crossing.of(assembly)
    floats = crossing.logits // ITEM_BYTES[assembly.config.dtype] * 4
    return _DRAWN * rows * floats + crossing.gathered(rows)


def _captured_bytes(assembly: Assembly, shape: Speculation | None) -> int:
    """Of all steps that are captured: they share the memory of the largest, in which every group of
    ranks has as many rows."""
    config, crossing, groups = assembly.config, Crossing.of(assembly), assembly.config.attn_dp
    decodes = verifying_sizes(config, None if shape is None else shape.tokens)
    prompts, most = prefill_graph_sizes(config), max(decodes, default=0)
    verified = most if shape is None else most * shape.tokens
    tokens = max(verified, *prompts)
    nodes = _NODES * assembly.cached_layers * (len(decodes) + len(prompts))
    held = step_bytes(assembly, tokens, groups * tokens) + crossing.held(tokens)
    drafted = 0 if shape is None else most * shape.topk  # of the draft layer's own runs
    return held + _logit_bytes(assembly, groups * (verified + drafted)) + nodes


def kv_room(config: EngineConfig, total: int, before: int, free: int, reserved: int) -> int:
    """Bytes for the KV cache of a device of `total` bytes, of which `before` were free before the
    weights were loaded and `free` are now. Negative where the weights leave nothing.

    --mem-fraction-static F: weights and KV cache together take F of what was free before.
    --memory-utilization F: they and what is reserved take F of the device.
    """
    if config.memory_utilization is not None:
        return int(config.memory_utilization * total) - reserved - (total - free)
    if config.mem_fraction_static is not None:
        return free - int(before * (1.0 - config.mem_fraction_static))
    return min(int(STATIC * total), total - reserved) - (total - free)


def expanded_said(assembly: Assembly) -> list[str]:
    """A line on what expanded keys and values cost, where the KV cache holds them."""
    if not assembly.model.expanded:
        return []
    facts, layers = assembly.binding.base, assembly.cached_layers
    each = assembly.binding.layout.bytes_per_token(facts)
    latents = LATENT_PAGES.bytes_per_token(facts)
    return [
        f"--disable-mla: keys and values of all heads take {amount(each * layers)} a token, "
        f"{each / latents:.1f} times the {amount(latents * layers)} of latents"
    ]


def idle_room(assembly: Assembly) -> int:
    """Bytes for the KV cache of one rank on a device that nobody else uses."""
    config, total = assembly.config, assembly.device.memory
    free = total - needed_bytes(assembly)
    if config.kv_memory is not None:
        return min(config.kv_memory, free)
    return kv_room(config, total, total, free, reserve(assembly).total)


def forms_in_the_way(
    assembly: Assembly, without: Callable[[frozenset[str]], Assembly]
) -> tuple[frozenset[str], str]:
    """The ops whose second forms of weights are left out next, and why; none if all are kept.

    without: the assembly without such forms of these ops. By --memory-for-speed; `auto` keeps
    them while the KV cache holds `REQUESTS` (or --max-running-requests) full contexts, or `KEPT` of
    what it would hold without them, whichever is less. Those of experts go first. Those of ops that
    a pin names stay.
    """
    config, left = assembly.config, assembly.facts.crowded
    pinned = {pin.op for pin in Pin.parse_all(config.pin)}  # who pins a kernel wants its forms
    here = {op: size for op, size in _forms(assembly).items() if op not in pinned | left}
    if here and config.memory_for_speed == "off":
        return frozenset(here), "--memory-for-speed off"
    if not here or config.memory_for_speed == "all" or not assembly.device.memory:
        return frozenset(), ""
    wanted, room = _wanted(without(left.union(here))), idle_room(assembly)
    if room >= wanted:
        return frozenset(), ""
    op = "experts" if "experts" in here else max(here, key=lambda op: here[op])
    why = f"copies of weights of {op} leave {amount(max(0, room))} of KV cache, less than "
    return frozenset({op}), why + amount(max(0, wanted))


def second_forms(every: Assembly, chosen: Assembly) -> tuple[SecondForm, ...]:
    """All second forms of weights that `every` has, kept where `chosen` has them."""
    if not (forms := _forms(every)):
        return ()
    size = chosen.cache_sizes.page // chosen.config.page_size
    rate, saved, held = every.device.bandwidth, _saved(every), _forms(chosen)
    return tuple(
        SecondForm(
            op,
            int(nbytes),
            int(nbytes) // size,
            saved[op] / rate if rate else None,
            op in held,
        )
        for op, nbytes in sorted(forms.items())
    )


def _forms(assembly: Assembly) -> dict[str, float]:
    return second_form_bytes(assembly.binding, assembly.config.dtype)


def _saved(assembly: Assembly) -> dict[str, float]:
    return saved_bytes(assembly.model, assembly.binding, assembly.config.dtype)


def _wanted(bare: Assembly) -> int:
    """Bytes of KV cache that second forms must leave. bare: without them."""
    one = -(-positions_of(bare) // bare.config.page_size) * bare.cache_sizes.page
    room = idle_room(bare)
    if bare.config.kv_memory is not None:
        return min(bare.config.kv_memory, room)
    return max(min(bare.config.max_running_requests * one, int(KEPT * room)), min(one, room))


def requests_that_fit(assembly: Assembly) -> int:
    """How many requests run at once by default: `REQUESTS`, or fewer, so that `REQUEST_TOKENS`
    tokens of each fit besides what steps of this many hold. Above eight it is a multiple of eight.
    At least the largest of --graph-sizes."""
    config = assembly.config
    each = min(REQUEST_TOKENS, positions_of(assembly))
    one, sizes = -(-each // config.page_size) / config.attn_dp, assembly.cache_sizes

    def lacks(count: int) -> bool:
        with_count = replace(config, max_running_requests=count)
        room = idle_room(replace(assembly, config=with_count))
        return CacheDivision.of(with_count, sizes, room).pages < count * one

    counts = [*range(1, 8), *range(8, REQUESTS + 1, 8)]
    fit: int = counts[max(1, bisect_left(counts, True, key=lacks)) - 1]
    return max([fit, *(config.graph_sizes or ())])


def cached_tokens(assembly: Assembly) -> int | None:
    """Tokens that the caches of all groups hold; None where memory is not the engine's own."""
    if not assembly.platform.own_memory or not assembly.device.memory:
        return None
    room = max(0, idle_room(assembly))
    blocks = CacheDivision.of(assembly.config, assembly.cache_sizes, room)
    return blocks.pages * assembly.config.page_size * assembly.config.attn_dp


def said(assembly: Assembly) -> list[str]:
    """Lines on what one rank's device will hold, where its memory is its own and known; and on what
    a KV cache of expanded keys and values costs."""
    cost = expanded_said(assembly)
    if not assembly.platform.own_memory or not assembly.device.memory:
        return cost
    room, kept = max(0, idle_room(assembly)), reserve(assembly)
    blocks = CacheDivision.of(assembly.config, assembly.cache_sizes, room)
    tokens = blocks.pages * assembly.config.page_size
    context = positions_of(assembly)
    parts = {
        "steps": kept.activations,
        "captured steps": kept.captured,
        "communication": kept.communication,
        "others": kept.others,
    }
    needs = ", ".join(f"{name} {amount(size)}" for name, size in parts.items() if size)
    lacking = needed_bytes(assembly) + room + kept.total - assembly.device.memory
    beside = f"kept free for {needs}"
    if lacking > 0:
        beside = (
            f"{needs} may come on top, {amount(lacking)} more than there is: a step may run out of "
            "memory"
        )
    groups, each = assembly.config.attn_dp, " of each rank" if assembly.config.tp > 1 else ""
    every = f"; {tokens * groups} in all {groups} groups" if groups > 1 else ""
    states = ""
    if blocks.states:
        size = amount(blocks.states * assembly.cache_sizes.state)
        states = f"; {size} for states, {blocks.snapshots} snapshots among them"
    return [
        f"memory {amount(assembly.device.memory)}{each}: weights "
        f"{amount(needed_bytes(assembly))}, KV cache {amount(room)} ({tokens} tokens{every}, "
        f"{tokens / context:.1f} full contexts of {context}{states}); {beside}",
        *cost,
        *(f"copy {form}" for form in assembly.forms),
    ]
