"""What start-up has decided, before the first weight is read. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from ds_runtime._version import __version__
from ds_runtime.assembly.plan import Plan, make_rows
from ds_runtime.checkpoint.files import Stamps
from ds_runtime.checkpoint.hub import plan_name
from ds_runtime.common.progress import amount
from ds_runtime.common.speculation import Speculation
from ds_runtime.config import EngineConfig
from ds_runtime.description.adapter import LoraPlan
from ds_runtime.description.caches import cache_groups
from ds_runtime.description.config import ModelConfig
from ds_runtime.description.nextn import NextN
from ds_runtime.ops.binding.bind import Binding
from ds_runtime.ops.contract import DeviceInfo, Facts, Offers, QuantLoader, Refusal
from ds_runtime.ops.contracts.caches import FLOAT_ROWS, ROWS, CacheSizes, LaidGroup
from ds_runtime.parallel.mesh import Mesh
from ds_runtime.parallel.sums.halves import Halves, why_not
from ds_runtime.parallel.sums.kinds import LIBRARY_SUMS, ONE_SHOT, Sums, spelled
from ds_runtime.parallel.sums.sizes import MANY
from ds_runtime.platform.contract import Platform
from ds_runtime.platform.probe import installed
from ds_runtime.plugins.manager import Plugins


@dataclass(frozen=True, slots=True)
class SecondForm:
    """The weights of an op in a faster form in addition to the one they came in. nbytes: of one
    rank. tokens: that the KV cache holds less for it. seconds: that a decode step of one request
    takes less, by the device's memory bandwidth; None where that is not known."""

    op: str
    nbytes: int
    tokens: int
    seconds: float | None
    kept: bool

    def __str__(self) -> str:
        saves = "" if self.seconds is None else f", saves {self.seconds * 1e3:.2f} ms"
        return (
            f"{self.op}: {amount(self.nbytes)} more than its weights, {self.tokens} tokens of KV "
            f"cache{saves} of a decode step: {'kept' if self.kept else 'left out'}"
        )


@dataclass(frozen=True, slots=True)
class Ruling:
    """What a rule had decided again, and why. setting: that it changed, as `Assembly.changes`."""

    rule: str
    why: str
    setting: tuple[str, str, str, str] | tuple[()] = ()


@dataclass(frozen=True)
class Assembly:
    """Everything decided before the first weight is read."""

    config: EngineConfig
    folder: Path
    model: ModelConfig
    platform: Platform
    device: DeviceInfo
    facts: Facts
    loader: QuantLoader
    binding: Binding
    plugins: Plugins
    offers: Offers
    lora: LoraPlan | None
    others: tuple[tuple[str, Refusal], ...]  # plugins whose platform does not run here, or broken
    nextn: NextN | None = None  # the draft layer, where there is speculation
    nextn_loader: QuantLoader | None = None
    changes: tuple[tuple[str, str, str, str], ...] = ()  # of defaults: field, change, who, why
    forms: tuple[SecondForm, ...] = ()  # of weights, kept or not
    rulings: tuple[Ruling, ...] = ()
    sums: Sums = LIBRARY_SUMS
    stamps: Stamps = field(
        default_factory=dict
    )  # of all files of weights, before the first is read

    @cached_property
    def mesh(self) -> Mesh:
        """All ranks of the engine."""
        return Mesh.of(self.config)

    @cached_property
    def halves(self) -> Halves | None:
        """Which steps with prompts run as two halves."""
        return Halves.of(self.config, self.model.hybrid is not None)

    def summing(self, able: Sums) -> Assembly:
        """The same with the kinds of sums that its ranks could set up. able: without a sentence."""
        if (able.sizes, able.at_once) == (self.sums.sizes, self.sums.at_once):
            own = replace(self.sums, normed=able.normed, gathered=able.gathered)
            return self if own == self.sums else replace(self, sums=own)
        ranks, lost = self.mesh.attn_tp, "ranks could not set it up: the log says why"
        said = f"all-reduces of {ranks} ranks: {able.sizes}; more was measured, and {lost}"
        if self.config.batch_invariant:
            why = "all-reduces of few values have no kernel of their own: " + lost
            said = "" if able.at_once else why
        return replace(self, sums=replace(able, said=said))

    @cached_property
    def plan(self) -> Plan:
        """The binding, and what it follows from."""
        config, facts = self.config, self.facts
        return Plan(
            model=plan_name(self.folder),
            platform=self.platform.name,
            arch=self.device.arch,
            dtype=config.dtype,
            kv_layout=self.binding.layout.tag,
            kv_dtype=facts.kv_dtype,
            index_dtype=facts.index_dtype if self.model.indexing is not None else "",
            page_size=config.page_size,
            tp=self.mesh.tp,
            attn_dp=self.mesh.attn_dp,
            ep=self.mesh.ep,
            rows=make_rows(self.binding.decisions),
            changes=self.changes,
            versions=_versions(self.plugins),
            sums=self.sums.said,
            sum_sizes=str(self.sums.sizes) if self.sums.sizes.upto else "",
            gathered=self.sums.gathered,
            halves=str(self.halves or ""),
            undivided=self._undivided(),
            given_up=tuple(self._given_up()) if config.batch_invariant else (),
        )

    def _given_up(self) -> Iterator[str]:
        """What other settings would have, in sentences."""
        form = "chosen latents" if self.model.indexing is not None else "cached latents"
        form = "cached keys and values" if self.model.expanded else form
        yield f"prompts attend {form} row by row, as decode steps do, not in tiles of queries"
        yield from self._in_order()
        served: dict[tuple[str, str, str], None] = {}
        for made in self.binding.decisions:
            served |= {(made.op, made.kernel, name): None for name in made.instead}
        yield from (f"{op}: {kernel} serves in place of {name}" for op, kernel, name in served)

    def _in_order(self) -> Iterator[str]:
        """How ranks add in their order."""
        if self.config.tp > 1:
            what = "sums"
            if self.sums.at_once:
                what += f" of {MANY} values or more"
                yield f"sums of fewer than {MANY} values are one kernel, which adds ranks in order"
            yield f"{what} gather the parts of {self.config.tp} ranks, and each adds them in order"

    def sums_said(self) -> list[str]:
        """How ranks sum, in sentences; nothing where the library's kind is all there is."""
        said = [self.sums.said] if self.sums.said else []
        if self.sums.normed:
            said.append(f"{ONE_SHOT} sums are one kernel with the add and the norm after them")
        if self.sums.gathered:
            said.append(f"one kernel gathers logits of up to {spelled(self.sums.gathered)}")
        said += [line for line in (str(self.halves or ""), self._undivided()) if line]
        return said + ([*self._in_order()] if self.config.batch_invariant else [])

    def _undivided(self) -> str:
        """Why no step runs as two halves, in a sentence; "" where some do, or nobody asked."""
        why = why_not(self.config, self.model.hybrid is not None)
        asked = self.config.enable_two_batch_overlap
        return f"--enable-two-batch-overlap changes nothing: {why}" if asked and why else ""

    @cached_property
    def caches(self) -> tuple[LaidGroup, ...]:
        """The groups of caches, those of the draft layer among them, as one rank has them."""
        facts, undo = self.binding.base, undone(self.config)
        layouts = {**self.binding.layouts, ROWS: FLOAT_ROWS}
        return tuple(
            LaidGroup(group, layouts[group.layout], group.within(facts, undo))
            for group in cache_groups(self.model, self.nextn)
        )

    @cached_property
    def cache_sizes(self) -> CacheSizes:
        """Bytes of them on one rank."""
        return CacheSizes.of(self.caches)

    @property
    def cached_layers(self) -> int:
        """Layers that keep anything, the draft layer among them."""
        return len({layer for laid in self.caches for layer in laid.group.layers})

    def left_over(self) -> list[str]:
        """A sentence per quantization_config, of the model and of its drafts, that is not used."""
        models = (self.model, *(() if self.nextn is None else (self.nextn.config,)))
        return list(dict.fromkeys(m.left_over for m in models if m.left_over))

    def left_out(self) -> list[str]:
        """A sentence per broken plugin: nothing of it was bound."""
        broken = [(name, r) for name, r in self.others if r.kind == "broken"]
        return [f"plugin {name} is left out: {refusal}" for name, refusal in broken]


def undone(config: EngineConfig) -> int:
    """Tokens that a step may take back: those that it verifies, after the first."""
    shape = Speculation.of(config)
    return 0 if shape is None else shape.tokens - 1


def _versions(plugins: Plugins) -> tuple[tuple[str, str], ...]:
    found = {"ds-runtime": __version__}
    for name in {"torch", *(r.distribution for r in plugins.reports.values() if r.distribution)}:
        if (version := installed(name)) is not None:
            found[name] = version
    return tuple(sorted(found.items()))
