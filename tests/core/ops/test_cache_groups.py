"""Groups of caches: entries and blocks, what a model declares, and bytes without a kind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ds_runtime
from ds_runtime.description.caches import cache_groups
from ds_runtime.description.hf import from_hf
from ds_runtime.description.nextn import NextN
from ds_runtime.description.sites import model_sites, nextn_sites
from ds_runtime.engine.step.inputs import Frame, StepInputs
from ds_runtime.engine.step.plan import Work
from ds_runtime.engine.step.transfer import PageTable, Upload
from ds_runtime.kv.caches import allocate
from ds_runtime.ops.binding.facts import site_facts
from ds_runtime.ops.contract import DeviceInfo, Facts, Site
from ds_runtime.ops.contracts.caches import (
    FLOAT_ROWS,
    ROWS,
    CacheSizes,
    HistoryGroup,
    LaidGroup,
    StateGroup,
    page_multiple,
)
from ds_runtime.ops.reference.layouts import LATENT_PAGES
from ds_runtime.ops.table import OPS
from ds_runtime_bench.shapes import config_of

DEVICE = DeviceInfo("cpu", "a CPU", "x86")
FACTS = Facts(DEVICE, {"kv_lora": 6, "qk_rope": 2}, page_size=32)
layers = st.lists(st.integers(0, 8), unique=True, max_size=4).map(tuple)
groups = st.one_of(
    st.builds(
        HistoryGroup, name=st.just("kv"), layers=layers, ratio=st.sampled_from([1, 2, 4, 32])
    ),
    st.builds(StateGroup, name=st.just("kv"), layers=layers, rows=st.integers(1, 40)),
)


@given(group=groups, pages=st.integers(0, 5), states=st.integers(0, 5), undo=st.integers(0, 4))
def test_bytes_are_those_that_are_allocated(group, pages, states, undo):
    laid = LaidGroup(group, LATENT_PAGES, group.within(FACTS, undo))
    caches = allocate([laid], pages, states, torch.device("cpu"))
    sizes = CacheSizes.of([laid])
    assert sum(c.nbytes for c in caches) == pages * sizes.page + states * sizes.state
    assert all(c.shape[0] == group.blocks(pages, states) for c in caches)
    assert all(c.shape[1] == group.entries(32, undo) for c in caches)
    assert all(caches.of("kv", n).shape[0] in (pages, states) for n in group.layers)


def test_a_page_has_an_entry_for_every_ratio_tokens_and_a_state_one_for_every_row():
    assert HistoryGroup("a", (0,), ratio=4).entries(32) == 8
    assert StateGroup("b", (0,), rows=16).entries(32) == 16
    assert StateGroup("b", (0,), rows=16).entries(32, undo=3) == 19, "rows of rejected drafts"
    assert (HistoryGroup("a", ()).blocks(7, 2), StateGroup("b", ()).blocks(7, 2)) == (7, 2)
    assert [g.kind for g in (HistoryGroup("a", ()), StateGroup("b", ()))] == ["history", "state"]


@given(st.lists(st.integers(1, 12), max_size=4))
def test_a_page_size_is_a_multiple_of_every_ratio(ratios):
    made = [HistoryGroup(str(i), (), ratio=r) for i, r in enumerate(ratios)]
    of = page_multiple([*made, StateGroup("s", (), rows=7)])
    fitting = [n for n in range(1, of + 1) if all(n % r == 0 for r in ratios)]
    assert fitting == [of], "the smallest"


def test_a_layer_may_read_the_cache_of_another():
    group = HistoryGroup("kv", (0, 2), reads=((1, 0), (3, 2)))
    caches = allocate([LaidGroup(group, LATENT_PAGES, FACTS)], 2, 0, torch.device("cpu"))
    assert caches.of("kv", 1) is caches.of("kv", 0) is not caches.of("kv", 2)
    assert len(list(caches)) == 2 and caches.get("kv", 4) is caches.get("other", 0) is None


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: HistoryGroup("kv", (0, 0)), "named twice"),
        (
            lambda: HistoryGroup("kv", (0, 1), reads=((1, 0),)),
            "layer 1 cannot read the cache of layer 0",
        ),
        (
            lambda: StateGroup("w", (0,), reads=((1, 2),)),
            "layer 1 cannot read the cache of layer 2",
        ),
        (lambda: HistoryGroup("kv", (), ratio=0), "ratio 0 must be at least 1"),
        (lambda: StateGroup("w", (), rows=0), "rows 0 must be at least 1"),
    ],
)
def test_groups_that_cannot_be_are_refused(made, said):
    with pytest.raises(ValueError, match=said):
        made()


def used_by(sites):
    """(group, layout) → layers whose ops read or write such caches."""
    used: dict[tuple[str, str], set[int]] = {}
    for site in sites:
        if layout := OPS[site.op].layout:
            used.setdefault((site.group or layout, layout), set()).add(site.layer)
    return used


def test_rows_of_states_are_as_wide_as_their_group_says():
    group = StateGroup("open", (0, 3), layout=ROWS, rows=7, width=24)
    laid = LaidGroup(group, FLOAT_ROWS, group.within(FACTS, 2))
    caches = allocate([laid], 5, 3, torch.device("cpu"))
    assert all(c.shape == (3, 9, 24) and c.dtype == torch.float32 for c in caches)
    assert sum(c.nbytes for c in caches) == 3 * CacheSizes.of([laid]).state


def test_several_groups_share_a_layout():
    """A kernel sees the entries of the group that its site names."""
    entries = {"near": 17, "far": 4}
    sites = [Site("cache_write", 0, "a", group=name) for name in ("near", "far", "")]
    assert [site_facts(FACTS, site, entries).page_size for site in sites] == [17, 4, 32]


@pytest.mark.parametrize("shape", ["tiny-v2-lite", "tiny-v3", "tiny-v32"])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_model_declares_the_caches_that_its_ops_use(shape, drafts, tmp_path):
    config = from_hf(config_of(shape, "float32"))
    nextn = NextN(tmp_path, config.layers, config) if drafts else None
    sites = model_sites(config, lambda module: "dense", verify="verify" if drafts else "")
    sites += nextn_sites(config, nextn, lambda module: "dense") if nextn else []
    used = used_by(sites)
    declared = cache_groups(config, nextn)
    assert {(g.name, g.layout): set(g.layers) for g in declared} == used
    assert all(g.kind == "history" and g.multiple == 1 for g in declared)


def test_nobody_asks_of_which_kind_a_group_is():
    """But for who says what a kind is, and who declares groups."""
    core = Path(ds_runtime.__file__).parent
    may = {"ops/contracts/caches.py", "description/caches.py", "api.py"}
    asks = re.compile(r"HistoryGroup|StateGroup|group\.kind|\.multiple\b|\.ratio\b")
    found = {
        str(path.relative_to(core))
        for path in core.rglob("*.py")
        if asks.search(path.read_text(encoding="utf-8"))
    }
    assert found - {"assembly/defaults.py"} == may  # that says which ratios make a page size


@pytest.mark.parametrize("size", [None, 4])
def test_a_step_names_the_block_of_each_sequence(size):
    """That of its row; of dummies in a captured step the spare one."""
    last, works = (
        torch.zeros(6 * 2, dtype=torch.int64),
        [Work(rid=str(row), row=row, start=3, length=1, pages=[row]) for row in (4, 1)],
    )
    for stateful in (True, False):
        inputs = StepInputs(4, 2, 8, last, 64, 2, stateful)
        frame, sent = None, Upload(torch.device("cpu"))
        if size:
            table = PageTable(size, 2, 9, torch.device("cpu"))
            frame = Frame(size, 1, table, {}, False)
        added = inputs.add(works, sent, frame)
        sent.send()
        blocks = added.batch(sent, {}).blocks
        wanted = [4, 1] + [5] * ((size or 2) - 2)
        assert blocks.tolist() == wanted if stateful else blocks is None
