"""Page sizes, snapshots and memory follow from the groups of caches that a model has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime.assembly.defaults import check_states, with_whole_pages
from ds_runtime.assembly.result import undone
from ds_runtime.config import EngineConfig
from ds_runtime.errors import ConfigError, UnsupportedError
from ds_runtime.kv.budget import KvMemory
from ds_runtime.ops.contracts.caches import CacheSizes, HistoryGroup, StateGroup

KV = HistoryGroup("kv", (0,))
FOURTH, FAR = HistoryGroup("fourth", (0,), ratio=4), HistoryGroup("far", (0,), ratio=128)
NEAR = StateGroup("near", (0,), rows=128)
DRAFTS = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3}


@given(size=st.integers(1, 600), wished=st.booleans())
def test_a_page_holds_whole_entries_of_every_group(size, wished):
    """A plugin's wish, and the default, are rounded up, which is said."""
    config = EngineConfig(page_size=size)
    changes = [("page_size", f"16 → {size}", "acme", "wished")] if wished else []
    before = len(changes)
    settled = with_whole_pages(config, [KV, FOURTH, FAR, NEAR], frozenset(), changes)
    assert settled.page_size % 128 == 0 and 0 <= settled.page_size - size < 128
    if settled.page_size == size:
        assert settled is config and len(changes) == before
    else:
        field, change, who, why = changes[-1]
        assert (field, change, who) == ("page_size", f"{size} → {settled.page_size}", "core")
        assert "fourth (4), far (128)" in why


def test_groups_of_one_token_per_entry_leave_any_size():
    for size in (1, 7, 16):
        config = EngineConfig(page_size=size)
        assert with_whole_pages(config, [KV, NEAR], {"page_size"}, []) is config


def test_a_size_of_the_user_that_does_not_fit_is_an_error():
    with pytest.raises(
        ConfigError, match=r"--page-size 64: .*far \(128\); give a multiple of 128, e"
    ):
        with_whole_pages(EngineConfig(page_size=64), [KV, FAR], {"page_size"}, [])


def test_snapshots_of_nothing_are_refused():
    check_states(EngineConfig(), [KV])
    check_states(EngineConfig(state_snapshots=3), [KV, NEAR])
    for count in (0, 3):
        with pytest.raises(ConfigError, match=f"--state-snapshots {count}: .* leave the flag out"):
            check_states(EngineConfig(state_snapshots=count), [KV, FOURTH])


def test_trees_over_a_state_are_refused():
    check_states(EngineConfig(**DRAFTS), [KV, NEAR])
    trees = EngineConfig(**DRAFTS, speculative_eagle_topk=2)
    check_states(trees, [KV])
    with pytest.raises(UnsupportedError, match=r"--speculative-eagle-topk 2: .*\(near\).*give 1"):
        check_states(trees, [KV, NEAR])


def test_a_step_takes_back_what_it_verifies_behind_the_first():
    assert undone(EngineConfig()) == 0
    assert undone(EngineConfig(**DRAFTS)) == 3


@given(
    given_=st.integers(0, 10**6),
    page=st.integers(1, 500),
    state=st.integers(0, 500),
    count=st.one_of(st.none(), st.integers(0, 50)),
    rows=st.integers(1, 64),
    radix=st.booleans(),
)
def test_memory_holds_states_then_snapshots_then_pages(given_, page, state, count, rows, radix):
    config = EngineConfig(
        state_snapshots=count, max_running_requests=rows, disable_radix_cache=not radix
    )
    assembly = SimpleNamespace(config=config, cache_sizes=CacheSizes(page, state))
    made = KvMemory.of(assembly, given_, free=given_, why="")
    if not state:
        assert (made.snapshots, made.states, made.pages) == (0, 0, given_ // page)
        return
    assert made.states == rows + 1 + made.snapshots, "a block per row, and a spare one"
    if not radix:
        assert made.snapshots == 0
    elif count is None:
        assert made.snapshots * state <= 0.15 * given_ < (made.snapshots + 1) * state + 1
    else:
        assert made.snapshots == count
    if made.pages:
        assert made.total <= given_ < made.total + page
    fewer = KvMemory.of(assembly, given_ // 2, free=given_, why="")
    least = made.fewest([made, fewer])
    assert (least.pages, least.snapshots) == (fewer.pages, fewer.snapshots)
    assert least.states == fewer.states
