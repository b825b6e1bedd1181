"""Offers → decisions: which kernel serves which op at which site. Pure and torch-free.

`decide_all` runs once, before weights are loaded; `bound.py` then imports what was chosen.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from ds_runtime.errors import ConfigError, UnsupportedError
from ds_runtime.ops.binding import invariant
from ds_runtime.ops.binding.by_rows import Shares, shares_of
from ds_runtime.ops.binding.facts import PAGES, site_facts
from ds_runtime.ops.binding.notes import Decision, note_of, spread
from ds_runtime.ops.binding.pins import Pin, check_counts
from ds_runtime.ops.contract import (
    RANK_REFERENCE,
    Facts,
    Fixable,
    Gate,
    Gates,
    Kernel,
    Offers,
    Site,
)
from ds_runtime.ops.contracts.caches import KV
from ds_runtime.ops.formats import FORMATS, Conversion, conversions
from ds_runtime.ops.kernel import Layout
from ds_runtime.ops.table import OPS


def _part(site: Site, op: str) -> Site:
    """The site of one part of a composed fusion."""
    return replace(site, op=op, weight_format="", shape=())


def refusal(kernel: Kernel, facts: Facts, tag: str = "") -> str | None:
    """Why this kernel cannot serve here: the first of `refusals`, or None."""
    return next(refusals(kernel, facts, tag), None)


def refusals(kernel: Kernel, facts: Facts, tag: str = "") -> Iterator[str]:
    """Every reason why this kernel cannot serve here: what it does not declare, its gates, and
    the cache layout `tag` that others agree on."""
    op = kernel.op
    yield from invariant.refusals(kernel, facts)
    if kernel.contract not in op.served:
        has = " and ".join(map(str, op.served))
        yield f"written for contract {kernel.contract} of {op.name}, this runtime has {has}"
    if facts.weight_format and facts.weight_format not in kernel.formats:
        read = ", ".join(sorted(kernel.formats)) or "none"
        yield f"does not read weight format {facts.weight_format!r}; it reads {read}"
    if facts.phase != "any" and facts.phase not in kernel.phases:
        yield f"does not serve the {facts.phase} phase"
    if op.absent and facts.ranks.get("ep", 1) > 1 and not kernel.promises.skips_absent:
        yield Fixable("does not skip experts of other ranks", "leave --ep out")
    if facts.deterministic and not kernel.promises.deterministic:
        yield Fixable("not deterministic", "leave --deterministic out")
    if kernel.footprint.second_form and op.name in facts.crowded:
        share = f"{kernel.footprint.second_form:.0%}"
        yield f"holds an extra {share} of the weight, for which memory has no room"
    if facts.graph_capture and not kernel.promises.graph_safe:
        yield Fixable("not safe under graph capture", "pass --disable-graph")
    checks = kernel.refuse.checks if isinstance(kernel.refuse, Gates) else (kernel.refuse,)
    for check in checks:
        if (said := _asked(check, facts)) is not None:
            yield said
    # Last: which layout was chosen follows from what kernels say of themselves.
    if op.layout and tag and tag not in kernel.layouts:
        yield f"does not use cache layout {tag}; it uses {', '.join(sorted(kernel.layouts))}"


def _instead(kernels: Iterable[Kernel], facts: Facts, tag: str) -> tuple[str, ...]:
    """Better ones that --batch-invariant alone keeps out."""
    said = ((k, refusals(k, facts, tag)) for k in kernels if facts.own_bits)
    return invariant.instead(said)


def _verdicts(kernels: Iterable[Kernel], facts: Facts, tag: str) -> list[invariant.Verdict]:
    made = [(kernel, refusal(kernel, facts, tag)) for kernel in kernels]
    return invariant.judged(made) if facts.own_bits else made


def _asked(check: Gate, facts: Facts) -> str | None:
    """What one gate says; one that fails refuses."""
    try:
        said = check(facts)
    except Exception as e:
        return f"its refuse() raised {type(e).__name__}: {e}"
    if said is None or (isinstance(said, str) and said):
        return said
    return f"its refuse() returned {said!r}, not None or a sentence"


def _order(kernel: Kernel, third_party: frozenset[str]) -> tuple[int, bool, str]:
    return (-kernel.rank, kernel.provider not in third_party, kernel.name)


class Binder:
    """Decides site by site, remembering what it already evaluated."""

    def __init__(
        self,
        offers: Offers,
        base: Facts,
        pins: Sequence[Pin] = (),
        apart: Collection[str] = (),
        compact: bool = False,
        entries: Mapping[str, int] = PAGES,
    ) -> None:
        self.base, self.entries = base, entries
        self.pins = pins
        self.apart = apart
        self.compact = compact
        self.shares: dict[tuple[str, int, str], Shares] = {}
        self.by_op: dict[str, list[Kernel]] = {name: [] for name in OPS}
        for kernel in sorted(offers.kernels, key=lambda k: _order(k, offers.third_party)):
            self.by_op[kernel.op.name].append(kernel)
        self.layouts = {layout.tag: layout for layout in offers.layouts}

    def facts(self, site: Site) -> Facts:
        """What a kernel sees at a site."""
        return site_facts(self.base, site, self.entries)

    def choose_layout(self, sites: Iterable[Site], key: str) -> Layout:
        """The layout of the best kernel that reads a whole cache, if every op on it has a kernel.
        key: of the ops that share it, as in `Op.layout`.

        That is a decode kernel, for the index cache one that scores, for others that of any op.
        """
        users = [s for s in sites if OPS[s.op].layout == key]
        first = next((s for s in users if OPS[s.op].chooses), users[0])
        why, found = list[str](), sorted({self.facts(site).page_size for site in users})
        for kernel, sentence in self._readers(first):
            if sentence is not None:
                why.append(f"{kernel.name}: {sentence}")
                continue
            for tag in sorted(kernel.layouts & self.layouts.keys()):
                layout = self.layouts[tag]
                wrong = [n for n in found if layout.page_sizes and n not in layout.page_sizes]
                if wrong:
                    sizes = ", ".join(map(str, layout.page_sizes))
                    why.append(f"{tag}: page size {wrong[0]}, takes {sizes}")
                elif all(self._servable(s, tag) for s in users):
                    return layout
                else:
                    why.append(f"{tag}: not every cache op has a kernel for it")
        what = {KV: "KV"}.get(key, key)
        why = invariant.left(first.op, why) if self.base.batch_invariant else why
        raise UnsupportedError(f"no {what} cache layout fits: " + "; ".join(why))

    def _readers(self, site: Site) -> Iterator[invariant.Verdict]:
        """Kernels for a site in order of preference, of a fusion also those for its parts."""
        kernels, parts = self._options(site)
        yield from _verdicts(kernels, self.facts(site), "")
        for part in parts:
            if OPS[part.op].layout:
                yield from _verdicts(self._candidates(part)[0], self.facts(part), "")

    def _servable(self, site: Site, tag: str) -> bool:
        facts = self.facts(site)
        kernels, parts = self._options(site)
        if any(why is None for _, why in _verdicts(kernels, facts, tag)):
            return True
        # The parts of an optional fusion have sites of their own.
        own = OPS[site.op].optional or all(self._servable(part, tag) for part in parts)
        return bool(parts) and own

    def _options(self, site: Site) -> tuple[list[Kernel], list[Site]]:
        """Kernels that may serve a site, in order of preference, and the parts of a fusion, which
        serve where none of them does."""
        op = OPS[site.op]
        kernels, pin = self._candidates(site)
        if pin or not op.uses:
            return kernels, []
        if self._why_apart(op.name, site.path):
            kernels = []
        return (
            [k for k in kernels if k.rank > RANK_REFERENCE],
            [_part(site, name) for name in op.uses],
        )

    def _why_parts(self, site: Site, accepted: Sequence[Kernel], tag: str) -> str | None:
        """Why the parts of a fusion serve instead, "" if only since nothing better is offered; None
        if they do not."""
        if why := self._why_apart(site.op, site.path):
            return why
        if not accepted or accepted[0].rank <= RANK_REFERENCE:
            return ""
        return self._outranked(site, accepted[0], tag) or None

    def _why_apart(self, op: str, path: str) -> str:
        """As wished, or as a part is pinned: of this fusion, or of one that it is made of."""
        if op in self.apart:
            return f"--fusion {op}=off"
        if any(self._pin(part, path) for part in OPS[op].uses) and not self._from(op, path):
            return "a part of it is pinned"
        inner = (self._why_apart(part, path) for part in OPS[op].uses if OPS[part].composition)
        return next(filter(None, inner), "")

    def _from(self, op: str, path: str) -> str:
        """The provider of an optional fusion whose parts are pinned to that provider, which has
        the fusion as well, else ""."""
        if not OPS[op].optional:
            return ""
        pins = (self._pin(part, path) for part in OPS[op].uses)
        wished = {pin.kernel for pin in pins if pin is not None}
        offered = {k.provider for k in self.by_op[op]}
        return wished.pop() if len(wished) == 1 and wished <= offered else ""

    def _outranked(self, site: Site, fused: Kernel, tag: str) -> str:
        """Why an optional fusion without weights gives way to its parts, if it does: one of these
        has a kernel that ranks higher than this one of it."""
        op = OPS[site.op]
        for name in op.uses if op.optional and op.kind == "function" else ():
            part = _part(site, name)
            for kernel, why in _verdicts(self._candidates(part)[0], self.facts(part), tag):
                if kernel.rank > fused.rank and why is None:
                    return f"{kernel.name} outranks {fused.name}"
        return ""

    def _pin(self, op: str, path: str) -> Pin | None:
        """The first that names a place."""
        return next((p for p in self.pins if p.op == op and fnmatchcase(path, p.glob)), None)

    def _candidates(self, site: Site) -> tuple[list[Kernel], Pin | None]:
        """Kernels in order of preference, and the pin that left only these, if one did."""
        kernels = self.by_op[site.op]
        if (pin := self._pin(site.op, site.path)) is None:
            provider = self._from(site.op, site.path)
            return [k for k in kernels if not provider or k.provider == provider], None
        chosen = [k for k in kernels if pin.kernel in (k.name, k.provider)]
        if not chosen:
            names = [k.name for k in kernels]
            near = difflib.get_close_matches(pin.kernel, names, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"{pin}: no such kernel; {hint}offered: {', '.join(names)}")
        if self._converted(site, chosen, "") is not None:
            return chosen, pin
        said = [(k.name, refusal(k, self.facts(site))) for k in chosen]
        if all(sentence is not None for _, sentence in said):
            refused = "; ".join(f"{name}: {sentence}" for name, sentence in said)
            others = f"pin other sites with {pin.op}@GLOB={pin.kernel}"
            instead = "leave it out for the best that serves" if pin.flag else others
            raise ConfigError(f"{pin}: refused at {site.path}: {refused}; {instead}")
        return chosen, pin

    def decide(self, site: Site, tag: str) -> tuple[Kernel | None, Decision]:
        """The kernel for a site; None means: its parts."""
        op, facts = OPS[site.op], self.facts(site)
        kernels, pin = self._candidates(site)
        verdicts = _verdicts(kernels, facts, tag)
        accepted = [kernel for kernel, sentence in verdicts if sentence is None]
        refused = tuple((k.name, str(said)) for k, said in verdicts if said is not None)
        if op.uses and not pin and (why := self._why_parts(site, accepted, tag)) is not None:
            note = f"{'left to' if op.optional else 'composed of'} {', '.join(op.uses)}"
            note += f" ({why})" if why else ""
            lost, better = tuple((k.name, k.rank) for k in accepted), _instead(kernels, facts, tag)
            made = (op.name, site, "composed", "core", RANK_REFERENCE, refused, lost, note)
            return None, Decision(*made, instead=better)
        converts = f"{site.stored} → {site.weight_format}" if site.stored else ""
        poor = not accepted or (accepted[0].rank <= RANK_REFERENCE and not pin)
        if poor and (held := self._converted(site, kernels, tag)) is not None:
            conversion, site, accepted = held
            converts = str(conversion)
        if not accepted:
            said = "; ".join(f"{name}: {sentence}" for name, sentence in refused) or "none offered"
            if pin:
                raise ConfigError(f"{pin}: refused for {op.name} at {site.path}: {said}")
            if facts.own_bits:
                said = "; ".join(invariant.left(op.name, said.split("; ")))
            raise UnsupportedError(f"no kernel for {op.name} at {site.path}: {said}")
        best, note = accepted[0], note_of(accepted[0])
        if facts.own_bits:
            accepted = invariant.alike(accepted)
        if (shares := shares_of(accepted)) is not None:
            self.shares[_place(site)] = shares
            note = "; ".join(filter(None, (note, shares.beside(best))))
        return best, Decision(
            op.name,
            site,
            best.name,
            best.provider,
            best.rank,
            refused,
            tuple((k.name, k.rank) for k in accepted[1:]),
            note,
            tag if op.layout else "",
            best.contract,
            converts or spread(best, site.weight_format),
            _instead(kernels[: kernels.index(best)], self.facts(site), tag),
        )

    def _converted(
        self, site: Site, kernels: Sequence[Kernel], tag: str
    ) -> tuple[Conversion, Site, list[Kernel]] | None:
        """The first conversion of the site's weight that a kernel better than the reference
        reads, the site with it, and those kernels. The reference itself counts for a format that
        it does not read, as one of a loader's own."""
        if not site.weight_format:
            return None
        own = site.weight_format not in FORMATS
        tried = conversions(site.weight_format, self.compact)
        for least in (RANK_REFERENCE + 1, *((RANK_REFERENCE,) if own else ())):
            for conversion in tried:
                there = replace(site, weight_format=conversion.target, stored=site.weight_format)
                facts = self.facts(there)
                could = [k for k in kernels if k.rank >= least]
                if able := [k for k, why in _verdicts(could, facts, tag) if why is None]:
                    return conversion, there, able
        return None


@dataclass(frozen=True, slots=True)
class Binding:
    """What was decided for every site, and the cache layouts that all agree on.

    layouts: by the keys that ops have; entries: of a block, by the names of cache groups. shares:
    places (op, layer, module) that several kernels serve.
    """

    base: Facts
    layouts: Mapping[str, Layout]
    choices: tuple[tuple[Site, Kernel | None], ...]
    decisions: tuple[Decision, ...]
    entries: Mapping[str, int] = field(default_factory=dict)
    shares: Mapping[tuple[str, int, str], Shares] = field(default_factory=dict)

    def tag(self, op: str) -> str:
        """The tag of the layout that the kernels of an op agree on; "" if they share none."""
        layout = self.layouts.get(OPS[op].layout)
        return "" if layout is None else layout.tag

    @property
    def layout(self) -> Layout:
        """Of the KV cache."""
        return self.layouts[KV]


def _place(site: Site) -> tuple[str, int, str]:
    """What identifies a kernel at run time: a place has one per op, whatever the phase."""
    return site.op, site.layer, site.module


def _places(sites: Iterable[Site]) -> dict[tuple[str, int, str], Site]:
    """Sites by place."""
    places: dict[tuple[str, int, str], Site] = {}
    for site in sites:
        other = places.setdefault(_place(site), site)
        assert other == site, f"two sites of {site.op} at {site.path}: {other} and {site}"
    return places


def decide_all(
    sites: Sequence[Site],
    offers: Offers,
    base: Facts,
    pins: Sequence[Pin] = (),
    apart: Collection[str] = (),
    compact: bool = False,
    entries: Mapping[str, int] = PAGES,
) -> Binding:
    """Decide every site, and the parts of every composed fusion at its site.

    apart: fusions that are composed whatever is offered for them. compact: weights that no kernel
    reads are rounded to few bits rather than held dense, where there is a choice. entries: of a
    block of each cache group, where that is not the page size.
    """
    binder = Binder(offers, base, pins, apart, compact, entries)
    keys = dict.fromkeys(OPS[site.op].layout for site in sites)
    layouts = {key: binder.choose_layout(sites, key) for key in keys if key}
    tags = {"": "", **{key: layout.tag for key, layout in layouts.items()}}
    todo = list(dict.fromkeys(sites))
    places = _places(todo)
    choices: list[tuple[Site, Kernel | None]] = []
    decisions: list[Decision] = []
    while todo:
        site = todo.pop(0)
        kernel, decision = binder.decide(site, tags[OPS[site.op].layout])
        choices.append((decision.site, kernel))
        decisions.append(decision)
        if kernel is None and not OPS[site.op].optional:
            for part in OPS[site.op].uses:
                needed = _part(site, part)
                there = places.setdefault(_place(needed), needed)
                if there is needed:
                    todo.insert(0, needed)
                assert there.phase in ("any", needed.phase), f"{there} is to serve {site}"
    for pin in pins:
        check_counts(pin, pins, choices)
    made = tuple(choices), tuple(decisions), binder.entries, binder.shares
    return Binding(base, layouts, *made)
