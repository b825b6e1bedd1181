"""What a kernel sees at one site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ds_runtime.ops.contract import Facts, Site
from ds_runtime.ops.table import OPS

PAGES: Mapping[str, int] = {}  # caches have as many entries in a block as a page has tokens


def site_facts(base: Facts, site: Site, entries: Mapping[str, int] = PAGES) -> Facts:
    """The facts at a site. entries: of a block of cache groups, where that is not the page size."""
    return replace(
        base,
        page_size=entries.get(site.group or OPS[site.op].layout, base.page_size),
        role=site.role,
        layer=site.layer,
        module=site.module,
        phase=site.phase,
        weight_format=site.weight_format,
        shape=site.shape,
        graph_capture=base.graph_capture and site.is_captured,
    )
