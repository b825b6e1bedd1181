"""What a decision shows to be better otherwise: rules, applied until none fires. Torch-free.

Each looks at what was decided, and says what to decide otherwise and why. The first that fires has
everything decided again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ds_runtime.assembly.estimate import packed_bytes
from ds_runtime.assembly.result import Assembly, Ruling
from ds_runtime.assembly.room import (
    REQUEST_TOKENS,
    REQUESTS,
    forms_in_the_way,
    requests_that_fit,
    second_forms,
)
from ds_runtime.common.progress import amount
from ds_runtime.config import EngineConfig
from ds_runtime.description.joins import INDEX_KEYS
from ds_runtime.description.sites import DRAFT_HEAD
from ds_runtime.errors import ConfigError, UnsupportedError
from ds_runtime.ops.binding.bind import Binding


@dataclass(frozen=True, slots=True)
class Terms:
    """What is decided about besides settings. captured: decode steps are replayed. rounded: see
    `SiteList`. apart: fusions that are not wanted. crowded: ops without second forms of weights.
    compact: see `decide_all`. requests: that run at once; 0: as many as fit, None: as it is set.
    """

    captured: bool
    rounded: bool
    apart: frozenset[str]
    crowded: frozenset[str] = frozenset()
    compact: bool = False
    requests: int | None = None


Decide = Callable[[Terms], Assembly]
Fired = tuple[Mapping[str, Any], Ruling]  # fields of Terms, and what is said of it


class Draft:
    """What is decided on some terms."""

    def __init__(self, terms: Terms, decide: Decide) -> None:
        self.terms, self.decide = terms, decide

    @cached_property
    def assembly(self) -> Assembly:
        """Raises ConfigError or UnsupportedError where nothing can be."""
        return self.decide(self.terms)

    def without(self, crowded: frozenset[str]) -> Assembly:
        """The same without second forms of these ops' weights."""
        there = replace(self.terms, crowded=crowded)
        try:
            return self.decide(there)
        except (ConfigError, UnsupportedError):
            return self.decide(replace(there, captured=False))


def settle(terms: Terms, decide: Decide) -> Assembly:
    """What all rules agree with. decide: raises ConfigError or UnsupportedError."""
    draft, rulings = Draft(terms, decide), list[Ruling]()
    while fired := next(filter(None, (rule(draft) for rule in RULES)), None):
        changes, ruling = fired
        draft = Draft(replace(draft.terms, **changes), decide)
        rulings.append(ruling)
    found, dense = draft.assembly, Draft(replace(draft.terms, compact=False), decide)
    settings = (ruling.setting for ruling in rulings if ruling.setting)
    return replace(
        found,
        rulings=tuple(rulings),
        changes=(*found.changes, *settings),
        forms=second_forms(dense.without(frozenset()), found),
    )


def uncaptured(draft: Draft) -> Fired | None:
    """Steps run op by op where a site that would be captured has no kernel that can be."""
    if not draft.terms.captured:
        return None
    try:
        draft.decide(draft.terms)
        return None
    except (ConfigError, UnsupportedError) as e:
        eager = draft.decide(replace(draft.terms, captured=False))
        why = _unsafe(eager.binding) or f"not all can be captured: {e}"
    setting = ("disable_graph", "False → True", "core", why)
    return {"captured": False}, Ruling("uncaptured", why, setting)


def _unsafe(binding: Binding) -> str:
    """The kernels of captured places that are not safe under graph capture."""
    found = {
        f"{site.op} ({kernel.name})": None
        for site, kernel in binding.choices
        if kernel is not None and not kernel.promises.graph_safe and site.is_captured
    }
    return f"not safe under graph capture: {', '.join(found)}" if found else ""


def widening(draft: Draft) -> Fired | None:
    """Drafts read the model's head where a kernel would hold the rounded copy in more bits."""
    config = draft.assembly.config
    for site, kernel in draft.assembly.binding.choices:
        if site.module != DRAFT_HEAD or kernel is None or site.weight_format in kernel.keeps:
            continue
        why = f"{kernel.name} would hold the copy of the head in {config.dtype}"
        if config.speculative_draft_quantize == "fp8":
            raise ConfigError(
                f"--speculative-draft-quantize fp8: {why}, which saves nothing: leave the flag out"
            )
        return {"rounded": False}, Ruling("widening", why)
    return None


def index_keys(draft: Draft) -> Fired | None:
    """The weight of index keys is one of its own where a kernel in front of attention makes none
    of them."""
    made, apart = draft.assembly, draft.terms.apart
    if made.model.indexing is None or INDEX_KEYS in apart:
        return None
    fused = (kernel for site, kernel in made.binding.choices if site.op == "mla_inputs" and kernel)
    if (kernel := next(fused, None)) is None:
        return None
    why = f"{kernel.name} makes no index keys"
    return {"apart": apart | {INDEX_KEYS}}, Ruling("index_keys", why)


def crowded(draft: Draft) -> Fired | None:
    """Second forms of weights go while they leave too little KV cache."""
    ops, why = forms_in_the_way(draft.assembly, draft.without)
    if not ops:
        return None
    return {"crowded": draft.terms.crowded | ops}, Ruling("crowded", why)


def compact(draft: Draft) -> Fired | None:
    """Weights that no kernel reads are held in few bits where they do not fit otherwise."""
    made = draft.assembly
    config, memory = made.config, made.device.memory
    converted = any(decision.converts for decision in made.binding.decisions)
    if draft.terms.compact or not memory or not converted:
        return None
    held = packed_bytes(made.model, made.binding, config.dtype, 0)
    if held <= memory:
        return None
    why = f"weights would take {amount(held)} of {amount(memory)}"
    return {"compact": True}, Ruling("compact", why)


def requests(draft: Draft) -> Fired | None:
    """As many requests run at once as the device has memory for, where nobody said how many."""
    if draft.terms.requests != 0:
        return None
    count = requests_that_fit(draft.assembly)
    why = "a device of its own memory decodes hundreds of requests in little more time"
    if count < REQUESTS:
        why = f"memory has room for no more, of {REQUEST_TOKENS} tokens each"
    before = EngineConfig().max_running_requests
    setting = ("max_running_requests", f"{before} → {count}", "core", why)
    return {"requests": count}, Ruling("requests", why, setting)


RULES = (uncaptured, widening, index_keys, crowded, compact, requests)
