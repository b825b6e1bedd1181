"""Offers → decisions: which kernel serves which op at which site. Pure and torch-free.

`decide_all` runs once, before weights are loaded; `bound.py` then imports what was chosen.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from ds_runtime.errors import ConfigError, UnsupportedError
from ds_runtime.ops.binding.by_rows import Shares, shares_of
from ds_runtime.ops.contract import (
    RANK_REFERENCE,
    Decision,
    Facts,
    Fixable,
    Gate,
    Gates,
    Kernel,
    Layout,
    Offers,
    Site,
)
from ds_runtime.ops.formats import FORMATS, Conversion, conversions
from ds_runtime.ops.table import OPS

KV, INDEX = "kv", "index"  # layout roles: bytes of the latent cache, and of the index keys
_DECIDES = {  # whose layout counts
    KV: ("mla_decode", "mha_decode", "sparse_decode"),
    INDEX: ("index_select",),
}


@dataclass(frozen=True, slots=True)
class Pin:
    """`OP[@SITE-GLOB]=KERNEL` from the user: beats ranks, never a refusal. flag: what the user gave
    instead, if it was another one than --pin."""

    op: str
    glob: str
    kernel: str
    flag: str = ""

    def __str__(self) -> str:
        at = "" if self.glob == "*" else f"@{self.glob}"
        return self.flag or f"--pin {self.op}{at}={self.kernel}"

    def names(self, site: Site) -> bool:
        """Whether it is about this site; an earlier one may count instead."""
        return self.op == site.op and fnmatchcase(site.path, self.glob)

    @staticmethod
    def parse(text: str) -> Pin:
        """Raises ConfigError for anything else than OP[@SITE-GLOB]=KERNEL, and for unknown ops."""
        left, equals, kernel = text.partition("=")
        op, at, glob = left.partition("@")
        if not equals or not kernel or not op or (at and not glob):
            raise ConfigError(f"--pin {text!r}: write OP[@SITE-GLOB]=KERNEL")
        if op not in OPS:
            near = difflib.get_close_matches(op, OPS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "`ds-runtime ops` lists them"
            raise ConfigError(f"--pin {text!r}: op {op!r} is unknown; {hint}")
        return Pin(op, glob or "*", kernel)

    @staticmethod
    def parse_all(texts: Iterable[str]) -> list[Pin]:
        """In the order given: of pins whose globs overlap, the first that fits counts. Raises
        ConfigError as `parse`, and for two that name the same sites and different kernels."""
        pins = dict[tuple[str, str], Pin]()
        for text in texts:
            pin = Pin.parse(text)
            first = pins.setdefault((pin.op, pin.glob), pin)
            if first.kernel != pin.kernel:
                raise ConfigError(
                    f"--pin {text!r}: the same sites are pinned to {first.kernel!r} already; "
                    "keep one of the two, or name sites by OP@SITE-GLOB"
                )
        return list(pins.values())


def site_facts(base: Facts, site: Site) -> Facts:
    """The facts that a kernel sees at one site."""
    return replace(
        base,
        role=site.role,
        layer=site.layer,
        module=site.module,
        phase=site.phase,
        weight_format=site.weight_format,
        shape=site.shape,
        graph_capture=base.graph_capture and site.is_captured,
    )


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
    if kernel.contract not in op.served:
        has = " and ".join(map(str, op.served))
        yield f"written for contract {kernel.contract} of {op.name}, this runtime has {has}"
    if facts.weight_format and facts.weight_format not in kernel.formats:
        read = ", ".join(sorted(kernel.formats)) or "none"
        yield f"does not read weight format {facts.weight_format!r}; it reads {read}"
    if facts.phase != "any" and facts.phase not in kernel.phases:
        yield f"does not serve the {facts.phase} phase"
    if facts.deterministic and not kernel.deterministic:
        yield Fixable("not deterministic", "leave --deterministic out")
    if kernel.footprint.beside and op.name in facts.crowded:
        share = f"{kernel.footprint.beside:.0%}"
        yield f"holds {share} of the weight beside, for which memory has no room"
    if facts.graph_capture and not kernel.graph_safe:
        yield Fixable("not safe under graph capture", "pass --disable-graph")
    checks = kernel.refuse.checks if isinstance(kernel.refuse, Gates) else (kernel.refuse,)
    for check in checks:
        if (said := _asked(check, facts)) is not None:
            yield said
    # Last: which layout was chosen follows from what kernels say of themselves.
    if op.layout and tag and tag not in kernel.layouts:
        yield f"does not use cache layout {tag}; it uses {', '.join(sorted(kernel.layouts))}"


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
    ) -> None:
        self.base = base
        self.pins = pins
        self.apart = apart
        self.compact = compact
        self.shares: dict[tuple[str, int, str], Shares] = {}
        self.by_op: dict[str, list[Kernel]] = {name: [] for name in OPS}
        for kernel in sorted(offers.kernels, key=lambda k: _order(k, offers.third_party)):
            self.by_op[kernel.op.name].append(kernel)
        self.layouts = {layout.tag: layout for layout in offers.layouts}

    def choose_layout(self, sites: Iterable[Site], role: str = KV) -> Layout:
        """The layout of the best kernel that reads a whole cache, if every op on it has a kernel.

        That is a decode kernel, or for the index cache one that scores.
        """
        users = [s for s in sites if OPS[s.op].layout == role]
        first = next(s for s in users if s.op in _DECIDES[role])
        why = []
        for kernel, site in self._readers(first):
            if sentence := refusal(kernel, site_facts(self.base, site)):
                why.append(f"{kernel.name}: {sentence}")
                continue
            for tag in sorted(kernel.layouts & self.layouts.keys()):
                layout = self.layouts[tag]
                if layout.page_sizes and self.base.page_size not in layout.page_sizes:
                    sizes = ", ".join(map(str, layout.page_sizes))
                    why.append(f"{tag}: page size {self.base.page_size}, takes {sizes}")
                elif all(self._servable(s, tag) for s in users):
                    return layout
                else:
                    why.append(f"{tag}: not every cache op has a kernel for it")
        what = {KV: "KV", INDEX: "index"}[role]
        raise UnsupportedError(f"no {what} cache layout fits: " + "; ".join(why))

    def _readers(self, site: Site) -> Iterator[tuple[Kernel, Site]]:
        """Kernels for a site in order of preference, of a fusion also those for its parts."""
        op = OPS[site.op]
        kernels, pinned = self._candidates(site)
        fused = bool(op.composition) and not pinned
        if not (fused and self._is_apart(site)):
            yield from ((k, site) for k in kernels if not fused or k.rank > RANK_REFERENCE)
        for part in (_part(site, name) for name in op.uses if fused and OPS[name].layout):
            yield from ((k, part) for k in self._candidates(part)[0])

    def _is_apart(self, site: Site) -> bool:
        """Whether a fusion is composed whatever is offered."""
        op = OPS[site.op]
        fuses = bool(op.composition) or op.optional
        return fuses and bool(self._why_apart(op.name, site.path))

    def _left_out(
        self,
        op: str,
        site: Site,
        accepted: list[Kernel],
        refused: list[tuple[str, str]],
        above: str,
    ) -> Decision:
        """An optional fusion that the model computes by its parts."""
        why = self._why_apart(op, site.path) or above
        note = "left to " + ", ".join(OPS[op].uses) + (f" ({why})" if why else "")
        lost = tuple((k.name, k.rank) for k in accepted)
        return Decision(op, site, "composed", "core", RANK_REFERENCE, tuple(refused), lost, note)

    def _outranked(self, site: Site, fused: Kernel, tag: str) -> str:
        """Why an optional fusion without weights gives way to its parts, if it does: one of these
        has a kernel that ranks higher than this one of it."""
        op = OPS[site.op]
        for part in (
            _part(site, name) for name in op.uses if op.optional and op.kind == "function"
        ):
            facts = site_facts(self.base, part)
            for kernel in self._candidates(part)[0]:
                if kernel.rank > fused.rank and refusal(kernel, facts, tag) is None:
                    return f"{kernel.name} outranks {fused.name}"
        return ""

    def _why_apart(self, op: str, path: str) -> str:
        """As wished, or as a part is pinned: of this fusion, or of one that it is made of."""
        if op in self.apart:
            return "--disable-fusion"
        pinned = any(p.op in OPS[op].uses and fnmatchcase(path, p.glob) for p in self.pins)
        if pinned and not self._from(op, path):
            return "a part of it is pinned"
        inner = (self._why_apart(part, path) for part in OPS[op].uses if OPS[part].composition)
        return next(filter(None, inner), "")

    def _from(self, op: str, path: str) -> str:
        """The provider of an optional fusion whose parts are pinned to that provider, which has
        the fusion as well, else ""."""
        if not OPS[op].optional:
            return ""
        pins = (
            next((p for p in self.pins if p.op == part and fnmatchcase(path, p.glob)), None)
            for part in OPS[op].uses
        )
        wished = {pin.kernel for pin in pins if pin is not None}
        offered = {k.provider for k in self.by_op[op]}
        return wished.pop() if len(wished) == 1 and wished <= offered else ""

    def _servable(self, site: Site, tag: str) -> bool:
        facts = site_facts(self.base, site)
        op = OPS[site.op]
        kernels, pinned = self._candidates(site)
        if op.optional and not pinned:
            return True
        if op.composition and not pinned:
            kernels = (
                [] if self._is_apart(site) else [k for k in kernels if k.rank > RANK_REFERENCE]
            )
        if any(refusal(k, facts, tag) is None for k in kernels):
            return True
        parts = [_part(site, p) for p in op.uses] if op.composition and not pinned else []
        return bool(parts) and all(self._servable(part, tag) for part in parts)

    def _candidates(self, site: Site) -> tuple[list[Kernel], Pin | None]:
        """Kernels in order of preference, and the pin that left only these, if one did."""
        kernels = self.by_op[site.op]
        for pin in self.pins:
            if pin.names(site):
                chosen = [k for k in kernels if pin.kernel in (k.name, k.provider)]
                if not chosen:
                    names = [k.name for k in kernels]
                    near = difflib.get_close_matches(pin.kernel, names, n=1)
                    hint = f"did you mean {near[0]!r}? " if near else ""
                    raise ConfigError(f"{pin}: no such kernel; {hint}offered: {', '.join(names)}")
                said = [(k.name, refusal(k, site_facts(self.base, site))) for k in chosen]
                if self._converted(site, chosen, "") is not None:
                    return chosen, pin
                if all(sentence is not None for _, sentence in said):
                    refused = "; ".join(f"{name}: {sentence}" for name, sentence in said)
                    others = f"pin other sites with {pin.op}@GLOB={pin.kernel}"
                    instead = "leave it out for the best that serves" if pin.flag else others
                    raise ConfigError(f"{pin}: refused at {site.path}: {refused}; {instead}")
                return chosen, pin
        if provider := self._from(site.op, site.path):
            return [k for k in kernels if k.provider == provider], None
        return kernels, None

    def decide(self, site: Site, tag: str) -> tuple[Kernel | None, Decision]:
        """The kernel for a site; None means: composed from smaller ops."""
        op = OPS[site.op]
        facts = site_facts(self.base, site)
        refused: list[tuple[str, str]] = []
        accepted: list[Kernel] = []
        kernels, pinned = self._candidates(site)
        for kernel in kernels:
            sentence = refusal(kernel, facts, tag)
            if sentence is None:
                accepted.append(kernel)
            else:
                refused.append((kernel.name, str(sentence)))
        lost = tuple((k.name, k.rank) for k in accepted[1:])
        converts = f"{site.stored} → {site.weight_format}" if site.stored else ""
        apart = self._is_apart(site)
        none = apart or not accepted or accepted[0].rank <= RANK_REFERENCE
        above = "" if none or pinned else self._outranked(site, accepted[0], tag)
        if op.optional and (none or above) and not pinned:
            return None, self._left_out(op.name, site, accepted, refused, above)
        held = self._converted(site, kernels, tag) if none and not (pinned and accepted) else None
        if held is not None:
            conversion, site, accepted = held
            lost, none = tuple((k.name, k.rank) for k in accepted[1:]), False
            converts = str(conversion)
        if op.composition and not pinned and none:
            lost = tuple((k.name, k.rank) for k in accepted)
            why = self._why_apart(op.name, site.path)
            note = "composed of " + ", ".join(op.uses) + (f" ({why})" if why else "")
            decision = Decision(
                op.name, site, "composed", "core", RANK_REFERENCE, tuple(refused), lost, note
            )
            return None, decision
        if not accepted:
            said = "; ".join(f"{name}: {sentence}" for name, sentence in refused) or "none offered"
            if pinned:
                raise ConfigError(f"{pinned}: refused for {op.name} at {site.path}: {said}")
            raise UnsupportedError(f"no kernel for {op.name} at {site.path}: {said}")
        best, note = accepted[0], _note(accepted[0])
        converts = converts or _spread(best, site.weight_format)
        if (shares := shares_of(accepted)) is not None:
            self.shares[_place(site)] = shares
            note = "; ".join(filter(None, (note, shares.beside(best))))
        return best, Decision(
            op.name,
            site,
            best.name,
            best.provider,
            best.rank,
            tuple(refused),
            lost,
            note,
            tag if op.layout else "",
            best.contract,
            converts,
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
                facts = site_facts(self.base, there)
                able = [k for k in kernels if k.rank >= least and not refusal(k, facts, tag)]
                if able:
                    return conversion, there, able
        return None


def _spread(kernel: Kernel, weight_format: str) -> str:
    """What a kernel costs that reads a format and holds it dense; "" if it keeps the format."""
    if not weight_format or kernel.rank <= RANK_REFERENCE or weight_format in kernel.keeps:
        return ""
    return next((str(c) for c in conversions(weight_format) if c.target == "dense"), "")


def _check_counts(
    pin: Pin, pins: Sequence[Pin], choices: Sequence[tuple[Site, Kernel | None]]
) -> None:
    """ConfigError for a pin that names no site, or only sites where another counts that leads to
    another kernel. Of the pins that one flag stands for, one has to count."""
    alike = [p for p in pins if p is pin or (pin.flag and p.flag == pin.flag)]
    named = [(site, kernel) for site, kernel in choices if any(p.names(site) for p in alike)]
    if not named:
        raise ConfigError(f"{pin}: matches no site{_hidden(pin, choices)}")
    for site, kernel in named:
        first = next(p for p in pins if p.names(site))
        wished = {p.kernel for p in alike}
        if first in alike or (kernel and wished & {kernel.name, kernel.provider}):
            return
    site, first = named[0][0], next(p for p in pins if p.names(named[0][0]))
    remedy = "" if pin.flag else ", or give the one of fewer sites first"
    raise ConfigError(
        f"{pin}: counts nowhere, as {first} comes first at {site.path} and wherever else both "
        f"name a site: leave one of them out{remedy}"
    )


def _hidden(pin: Pin, choices: Sequence[tuple[Site, Kernel | None]]) -> str:
    """What to do about a pin without a site: a fusion may do the op's work there."""
    for site, kernel in choices:
        if kernel is not None and pin.op in _parts(site.op):
            return (
                f": {kernel.name} does its work at {site.path}: give --disable-fusion {site.op} "
                "beside it, and no pin of that"
            )
    if own := next((site for site, _ in choices if site.op == pin.op), None):
        return f": {pin.op} has others, like {own.path}; ds-runtime plan shows all"
    return ": this model has none of that op; leave it out"


def _parts(op: str) -> set[str]:
    """What a fusion is made of, down to what is none."""
    own = OPS[op].uses if OPS[op].composition or OPS[op].optional else ()
    return {name for part in own for name in (part, *_parts(part))}


def _note(kernel: Kernel) -> str:
    """The kernel's own remark, and that it is called through an adapter if it is."""
    op = kernel.op
    if kernel.contract == op.version:
        return kernel.note
    said = f"written for contract {kernel.contract}, adapted to {op.version}"
    return f"{kernel.note}; {said}" if kernel.note else said


@dataclass(frozen=True, slots=True)
class Binding:
    """What was decided for every site, and the cache layouts that all agree on.

    index_layout: of the index keys, where attention is sparse. shares: places (op, layer,
    module) that several kernels serve.
    """

    base: Facts
    layout: Layout
    choices: tuple[tuple[Site, Kernel | None], ...]
    decisions: tuple[Decision, ...]
    index_layout: Layout | None = None
    shares: Mapping[tuple[str, int, str], Shares] = field(default_factory=dict)

    def tag(self, op: str) -> str:
        """The tag of the layout that the kernels of an op agree on; "" if they share none."""
        layout = self.index_layout if OPS[op].layout == INDEX else self.layout
        return layout.tag if layout is not None and OPS[op].layout else ""


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
) -> Binding:
    """Decide every site, and the parts of every composed fusion at its site.

    apart: fusions that are composed whatever is offered for them. compact: weights that no kernel
    reads are rounded to few bits rather than held dense, where there is a choice.
    """
    binder = Binder(offers, base, pins, apart, compact)
    layout = binder.choose_layout(sites)
    sparse = any(OPS[s.op].layout == INDEX for s in sites)
    index_layout = binder.choose_layout(sites, INDEX) if sparse else None
    tags = {"": "", KV: layout.tag, INDEX: index_layout.tag if index_layout else ""}
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
        _check_counts(pin, pins, choices)
    return Binding(base, layout, tuple(choices), tuple(decisions), index_layout, binder.shares)
