"""Runs a model without an engine: batches built by hand, pages shuffled, unowned memory NaN."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

import ds_runtime_cpu
from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.result import Assembly
from ds_runtime.config import EngineConfig
from ds_runtime.kv.caches import allocate
from ds_runtime.lora.read import Adapter
from ds_runtime.model.base import LanguageModel
from ds_runtime.ops.batch import Batch, DecodePart, Limits, PrefillPart, PrefixChunk, Segments
from ds_runtime.ops.binding.bound import BoundOps
from ds_runtime.ops.contracts.caches import Caches
from ds_runtime.parallel.mesh import Mesh
from ds_runtime.parallel.world import World
from ds_runtime.weights.load import load_model
from thread_members import in_threads

T = TypeVar("T")

CPU = torch.device("cpu")
BLOCKS = 20  # of states; the last is nobody's
HEAVY = ("linear", "mla_absorb", "mha_prefill", "mla_decode", "experts", "mla_prologue", "embed")
SMALL = ("rms_norm", "add_rms_norm", "rope", "silu_mul", "router_logits", "route", "merge_state")
PAGED = ("cache_write", "cache_gather")
SPARSE = ("index_prologue", "index_scores", "index_topk", "sparse_prefill", "sparse_decode")
ALL_REFERENCE = tuple(
    f"{op}=reference" for op in (*HEAVY, *SMALL, *PAGED, *SPARSE) if op != "mla_prologue"
)


def decide(folder: Path, kernels: str = "reference", **settings: object) -> Assembly:
    """Assemble for the CPU, on its own kernels ("cpu") or on the references."""
    pins = {"reference": ALL_REFERENCE, "cpu": ()}[kernels]
    values = {"dtype": "float32", "plugins": (), "platform": "cpu", "pin": pins, **settings}
    if kernels == "reference":
        config = EngineConfig(model=str(folder), lora=tuple(settings.get("lora", ())))
        values["pin"] = tuple(p for p in pins if _has_site(config, p.partition("=")[0]))
        values["fusion"] = ("mla_prologue=off",)  # its parts are pinned
    return assemble(EngineConfig(model=str(folder), **values), extra_plugins=[ds_runtime_cpu])


def _has_site(config: EngineConfig, op: str) -> bool:
    from ds_runtime.description.adapter import LoraPlan
    from ds_runtime.description.hf import load_config
    from ds_runtime.description.sites import model_sites

    always = ("rope", "cache_write")  # parts of the composed prologue
    model = load_config(Path(config.model))
    lora = LoraPlan.of(config, model)
    adapted = () if lora is None else lora.modules
    sites = model_sites(model, lambda module: "dense", adapted=adapted)
    return op in always or any(site.op == op for site in sites)


@dataclass
class Sequence_:
    """A sequence on its way: its tokens, its pages, how many tokens are in the cache, the slot of
    its adapter, and the block of its states.
    """

    tokens: list[int]
    pages: list[int]
    done: int = 0
    logits: list[Tensor] = field(default_factory=list)
    adapter: int = -1
    block: int = 0


class Harness:
    """One loaded model with poisoned caches. `width` is the most pages of a sequence. undo: tokens
    that a step may take back.
    """

    def __init__(
        self, assembly: Assembly, world: World | None = None, pages: int = 64, undo: int = 0
    ) -> None:
        self.undo = undo
        self.assembly = assembly
        self.page_size = assembly.config.page_size
        self.bound = BoundOps(assembly.binding)
        self.model: LanguageModel = load_model(assembly, self.bound, world or World.alone(), CPU)
        if assembly.lora is not None:
            for slot, spec in enumerate(assembly.lora.adapters):
                slots = self.model.lora
                slots.put(slot, slots.stage(Adapter(spec.folder, slots.modules)))
        heads = assembly.model.heads // assembly.config.tp
        self.pages = pages
        limits = Limits(4096, 64, pages, self.page_size, heads, CPU)
        self.states = {key: k.state(limits) for key, k in self.bound.stateful.items()}
        self.caches = self._caches()

    def _caches(self) -> Caches:
        base, undo = self.assembly.binding.base, self.undo
        laid = [replace(g, facts=g.group.within(base, undo)) for g in self.assembly.caches]
        caches = allocate(laid, self.pages, BLOCKS, CPU)
        for cache in caches:
            cache.fill_(poison(cache))
        return caches

    def step(self, works: Sequence[tuple[Sequence_, int]], prefix_chunk: int = 4096) -> None:
        """Run one batch: (sequence, number of next tokens); those of one token may decode."""
        decodes = [w for w in works if w[1] == 1 and w[0].done > 0]
        prefills = [w for w in works if w not in decodes]
        batch = self._batch(decodes, prefills, prefix_chunk)
        batch.states = self.states
        for key, kernel in self.bound.stateful.items():
            kernel.prepare(self.states[key], batch)
        logits = self.model.logits(self.model.forward(batch, self.caches), None, batch.adapters)
        row = 0
        for sequence, count in (*decodes, *prefills):
            sequence.logits.append(logits[row : row + count])
            sequence.done += count
            row += count

    def _batch(
        self,
        decodes: list[tuple[Sequence_, int]],
        prefills: list[tuple[Sequence_, int]],
        prefix_chunk: int,
    ) -> Batch:
        ids, positions, slots = [], [], []
        for sequence, count in (*decodes, *prefills):
            for position in range(sequence.done, sequence.done + count):
                page = sequence.pages[position // self.page_size]
                ids.append(sequence.tokens[position])
                positions.append(position)
                slots.append(page * self.page_size + position % self.page_size)
        batch = Batch(*(torch.tensor(x) for x in (ids, positions, slots)), torch.arange(len(ids)))
        if any(self.caches.states):
            batch.blocks = torch.tensor([s.block for s, _ in (*decodes, *prefills)])
        if decodes:
            lens = tuple(s.done + 1 for s, _ in decodes)
            device_lens = torch.tensor(lens, dtype=torch.int32)
            batch.decode = DecodePart(self._table([s for s, _ in decodes]), device_lens, lens)
        if prefills:
            sequences = [s for s, _ in prefills]
            segs = segments([count for _, count in prefills])
            table = self._table(sequences)
            chunks = prefix_chunks([s.done for s in sequences], prefix_chunk, table, segs)
            if self.assembly.lora is not None:
                chunks = [replace(c, adapters=_slots(sequences, c.segs.lens)) for c in chunks]
            batch.prefill = PrefillPart(segs, table, tuple(chunks))
        if self.assembly.lora is not None:
            works = (*decodes, *prefills)
            batch.adapters = _slots([s for s, _ in works], [count for _, count in works])
        return batch

    def verify(self, sequence: Sequence_, tokens: Sequence[int]) -> Tensor:
        """Logits of tokens behind what is cached, as steps compute them that verify drafts."""
        first, count = sequence.done, len(tokens)
        at = range(first, first + count)
        slots = [sequence.pages[p // self.page_size] * self.page_size + p % self.page_size
                 for p in at]  # fmt: skip
        rows = (torch.tensor(x) for x in (list(tokens), list(at), slots))
        batch = Batch(*rows, torch.arange(count), blocks=torch.tensor([sequence.block]))
        lens = (first + count,)
        table, device_lens = self._table([sequence]), torch.tensor(lens, dtype=torch.int32)
        batch.decode = DecodePart(table, device_lens, lens, (count,))
        return self.model.logits(self.model.forward(batch, self.caches))

    def _table(self, sequences: list[Sequence_]) -> Tensor:
        """Page table whose unused entries name pages that hold NaN, or someone else's."""
        width = max(-(-len(s.tokens) // self.page_size) for s in sequences) + 1
        rows = [s.pages[:width] + [self.pages - 1] * (width - len(s.pages)) for s in sequences]
        return torch.tensor(rows, dtype=torch.int32)

    def sequences(self, prompts: Sequence[Sequence[int]], seed: int) -> list[Sequence_]:
        """Prompts with shuffled pages; the last page stays nobody's."""
        free = list(range(self.pages - 1))
        random.Random(seed).shuffle(free)
        blocks = list(range(BLOCKS - 1))
        random.Random(seed).shuffle(blocks)
        found = []
        for tokens in prompts:
            needed = -(-len(tokens) // self.page_size)
            own = [free.pop() for _ in range(needed)]
            found.append(Sequence_(list(tokens), own, block=blocks.pop()))
        return found


def _slots(sequences: Sequence[Sequence_], counts: Sequence[int]) -> Tensor:
    """Each row's adapter: [rows] int32."""
    slots = torch.tensor([s.adapter for s in sequences], dtype=torch.int32)
    return slots.repeat_interleave(torch.tensor(counts, dtype=torch.int64))


def poison(cache: Tensor) -> float:
    """NaN, or for bytes what is NaN in FP8 and in float32."""
    return float("nan") if cache.is_floating_point() else 255


def segments(lens: Sequence[int]) -> Segments:
    cu = [0]
    for n in lens:
        cu.append(cu[-1] + n)
    return Segments(tuple(lens), torch.tensor(cu, dtype=torch.int32))


def prefix_chunks(done: list[int], size: int, table: Tensor, q_segs: Segments) -> list[PrefixChunk]:
    """Every sequence's prefix in pieces of `size`, all sequences side by side."""
    chunks = []
    for begin in range(0, max(done, default=0), size):
        starts = [min(begin, n) for n in done]
        lens = [min(size, n - start) for n, start in zip(done, starts, strict=True)]
        chunks.append(PrefixChunk(torch.tensor(starts), segments(lens), table, q_segs))
    return chunks


def run_schedule(
    harness: Harness,
    prompts: Sequence[Sequence[int]],
    seed: int,
    largest: int,
    adapters: Sequence[int] = (),
) -> list[Tensor]:
    """Logits of every position, computed in random mixed steps of at most `largest` tokens each.

    adapters: the slot of each prompt's.
    """
    draw = random.Random(seed)
    sequences = harness.sequences(prompts, seed)
    for sequence, adapter in zip(sequences, adapters, strict=False):
        sequence.adapter = adapter
    with torch.inference_mode():
        while any(s.done < len(s.tokens) for s in sequences):
            waiting = [s for s in sequences if s.done < len(s.tokens)]
            chosen = draw.sample(waiting, draw.randint(1, len(waiting)))
            works = [(s, _length(s, largest, draw)) for s in chosen]
            harness.step(works, prefix_chunk=draw.choice((5, 17, 4096)))
    for cache in harness.caches:  # what nobody wrote must still be poison
        last = cache[-1]
        assert last.isnan().all() if cache.is_floating_point() else (last == 255).all()
        cache.fill_(poison(cache))
    return [torch.cat(s.logits) for s in sequences]


def _length(sequence: Sequence_, largest: int, draw: random.Random) -> int:
    left = len(sequence.tokens) - sequence.done
    return 1 if draw.random() < 0.3 else draw.randint(1, min(left, largest))


def on_ranks(size: int, function: Callable[[World], T]) -> list[T]:
    """function(world) on every rank, in threads; the first error wins."""
    return in_threads(size, lambda member: function(World(Mesh(size), member)))
