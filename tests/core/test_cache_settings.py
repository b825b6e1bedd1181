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


def test_trees_over_entries_of_several_tokens_are_refused():
    """Branches would share an entry, and which of them it is of is known too late."""
    check_states(EngineConfig(**DRAFTS), [KV, FOURTH])
    trees = EngineConfig(**DRAFTS, speculative_eagle_topk=2)
    said = r"--speculative-eagle-topk 2: .*several tokens \(fourth, far\).*give 1"
    with pytest.raises(UnsupportedError, match=said):
        check_states(trees, [KV, FOURTH, FAR])


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
    most=st.one_of(st.none(), st.integers(0, 5000)),
)
def test_memory_holds_states_then_snapshots_then_pages(
    given_, page, state, count, rows, radix, most
):
    """most: pages; snapshots are a share of what is kept, not of what would have been given."""
    config = EngineConfig(
        state_snapshots=count, max_running_requests=rows, disable_radix_cache=not radix
    )
    assembly = SimpleNamespace(config=config, cache_sizes=CacheSizes(page, state))
    made = KvMemory.of(assembly, given_, free=given_, why="", most=most)
    capped = most is not None and made.pages == most
    if not state:
        pages = given_ // page if most is None else min(most, given_ // page)
        assert (made.snapshots, made.states, made.pages) == (0, 0, pages)
        return
    assert made.states == rows + 1 + made.snapshots, "a block per row, and a spare one"
    if not radix:
        assert made.snapshots == 0
    elif count is None:
        assert 100 * made.snapshots * state <= 15 * made.total
        more = (made.snapshots + 2) * state  # a page less to hold a snapshot more
        assert not made.pages or 100 * more > 15 * (made.total - page)
    else:
        assert made.snapshots == count
    if made.pages:
        assert made.total <= given_
        assert capped or given_ < made.total + page
    fewer = KvMemory.of(assembly, given_ // 2, free=given_, why="", most=most)
    least = made.fewest([made, fewer])
    assert (least.pages, least.snapshots) == (fewer.pages, fewer.snapshots)
    assert least.states == fewer.states


def test_snapshots_are_a_share_of_a_capped_cache():
    """64 GB are given, 1 GB of pages is all that contexts need: 15 % of 1.2 GB, not of 64."""
    assembly = SimpleNamespace(config=EngineConfig(), cache_sizes=CacheSizes(10**6, 10**6))
    made = KvMemory.of(assembly, 64 * 10**9, free=64 * 10**9, why="", most=1000)
    assert (made.pages, made.snapshots, made.states) == (1000, 187, 64 + 1 + 187)


def test_states_that_leave_no_page_are_named():
    assembly = SimpleNamespace(
        config=EngineConfig(state_snapshots=900), cache_sizes=CacheSizes(10**6, 10**6)
    )
    made = KvMemory.of(assembly, 900 * 10**6, free=10**9, why="your setting gives")
    assert made.pages == 0
    said = str(made.too_small(0, 160))
    for part in (
        "besides 965.0 MB of states (--max-running-requests 64, --state-snapshots 900)",
        "lower --state-snapshots or --max-running-requests, raise --kv-memory",
    ):
        assert part in said
