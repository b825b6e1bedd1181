"""Cache groups are exact: a history of one entry per four tokens, and a window of 16 as state.

The toy runs over the real scheduler, ledger, prefix cache, snapshots and step inputs; every answer
is compared with a computation that has no cache.
"""

from __future__ import annotations

import pytest
from fake_device import LONG, VOCAB, asked
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler_random import Traffic
from toy_model import ToyDevice, narrower, toy

from ds_runtime.kv import snapshots
from examples import examples

MANY = [number * 7 % VOCAB for number in range(100)]


@given(
    length=st.integers(1, 60),
    chunk=st.integers(1, 40),
    step=st.integers(4, 64),
    page=st.sampled_from([4, 8, 12]),
    drafts=st.sampled_from([0, 1, 3]),
)
@settings(max_examples=examples(40), deadline=None)
def test_chunks_of_any_size_give_the_same_answer(length, chunk, step, page, drafts):
    chunk = max(chunk, drafts + 1)
    rig = toy(96, page, prefill_chunk=chunk, max_step_tokens=step, drafts=drafts)
    asked(rig, "a", MANY[:length], max_tokens=10)
    assert all(w.length <= chunk for p in rig.plans for w in p.works if w.tokens)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("overlap", [0, 1])
def test_a_prompt_goes_on_from_a_snapshot(drafts, overlap):
    """At the last page of the prompt that it does not fill, and at the last of an answer."""
    rig = toy(drafts=drafts, overlap=overlap)
    assert asked(rig, "first", LONG) == 0
    assert asked(rig, "again", LONG) == 36
    assert asked(rig, "longer", [*LONG, 7, 7, 7]) == 36
    said = LONG + rig.answers["first"].tokens  # 45 tokens, of which the last was never computed
    assert asked(rig, "turn", [*said, 9]) == 44


@pytest.mark.parametrize("length", range(2, 20))
def test_an_answer_leaves_one_at_its_last_whole_page(length):
    """Whether it ends there or goes on behind it."""
    rig = toy()
    asked(rig, "a", LONG, max_tokens=length)
    said = LONG + rig.answers["a"].tokens
    assert asked(rig, "turn", [*said, 9]) == (len(said) - 1) // 4 * 4


def test_a_hit_of_pages_without_a_snapshot_is_computed_anew():
    """From the last snapshot in front of it, or from the start; pages that were there stay."""
    rig = toy()
    asked(rig, "a", LONG)
    cached = rig.prefix.num_cached
    assert len(rig.prefix.find(LONG[:21]).pages) == 5
    assert asked(rig, "inner", [*LONG[:21], 9]) == 0
    assert rig.prefix.num_cached - cached < 5, "equal pages are there once"
    none = toy(snapshots=0)
    asked(none, "a", LONG)
    assert asked(none, "again", LONG) == 0 and not any(p.copies for p in none.plans)


def test_long_prompts_have_more_than_one(monkeypatch):
    monkeypatch.setattr(snapshots, "TOKENS", 30)  # rounded up to pages: 32
    rig = toy()
    asked(rig, "a", MANY)
    assert asked(rig, "early", [*MANY[:70], 9]) == 64
    assert asked(rig, "late", [*MANY[:98], 9]) == 96


def test_those_used_last_stay():
    rig = toy(64, snapshots=2)
    for number in range(3):  # each leaves one, at its end alone: its prompt is shorter than a page
        asked(rig, str(number), [number], max_tokens=6)
    assert asked(rig, "kept", [2, *rig.answers["2"].tokens]) == 4
    assert asked(rig, "gone", [0, *rig.answers["0"].tokens]) == 0


@pytest.mark.parametrize(("blocks", "running"), [(4, 5), (4, 8), (6, 8), (9, 8)])
def test_answers_under_way_push_no_beginning_out(blocks, running):
    """As many as there are blocks, and more; each goes on from what they all begin with."""
    rig = toy(200, snapshots=blocks, max_running=running)
    asked(rig, "beginning", MANY[:9], max_tokens=1)
    asked(rig, "warm", [*MANY[:9], 33, 34], max_tokens=1)
    for turn in range(4):
        for number in range(running):
            prompt = [*MANY[:9], turn, *[number] * 8]
            rig.submit(f"{turn} {number}", prompt, max_tokens=12)
        rig.run()
        rig.check_end()
        cached = [rig.cached[f"{turn} {number}"] for number in range(running)]
        assert cached == [8] * running


@pytest.mark.parametrize("blocks", range(9))
def test_answers_have_half_of_the_blocks(blocks):
    """The others are for prompts, also where nobody has gone on from one yet."""
    rig = toy(200, snapshots=blocks)
    asked(rig, "prompt", LONG, max_tokens=1)
    for number in range(8):
        rig.submit(str(number), [number] * 3, max_tokens=20)
    most = 0
    while rig.scheduler.has_work:
        rig.step()
        most = max(most, sum(r.snapshot >= 0 for r in rig.scheduler.running))
    assert most == blocks // 2
    rig.check_end()
    assert rig.ranks[0].snapshots.num_kept <= blocks


def test_hits_and_losses_are_counted():
    rig = toy(64, snapshots=2)
    for number in range(3):
        asked(rig, str(number), [number], max_tokens=6)
    asked(rig, "kept", [2, *rig.answers["2"].tokens], max_tokens=1)
    asked(rig, "gone", [0, *rig.answers["0"].tokens], max_tokens=1)
    made = rig.ranks[0].snapshots
    stats = rig.scheduler.stats()
    assert (made.num_hits, made.num_evicted, made.num_kept) == (1, 2, 2)
    told = stats.snapshots_total, stats.snapshots_kept, stats.snapshot_hits, stats.snapshots_evicted
    assert told == (2, 2, 1, 2)


def test_with_no_block_left_requests_run_without():
    rig = toy(64, snapshots=1)
    for number in range(4):
        rig.submit(str(number), [number] * 9, max_tokens=9)
    rig.run()
    rig.check_end()


def test_a_preempted_request_goes_on_from_its_last_page():
    rig = toy(14, snapshots=8, max_running=4)
    for number in range(3):
        rig.submit(str(number), [number] * 10, max_tokens=24)
    rig.run()
    rig.check_end()
    assert rig.scheduler.stats().preemptions > 0
    again = [w for p in rig.plans for w in p.works if w.tokens and w.start + w.length > 10]
    assert again and all(w.start >= 8 for w in again)


def test_a_flush_forgets_snapshots():
    rig = toy()
    asked(rig, "a", LONG)
    kept = rig.ranks[0].snapshots
    assert kept.num_kept == 2
    rig.scheduler.flush()
    assert kept.num_kept == 0 and kept.pool.num_free == 16
    assert asked(rig, "again", LONG) == 0


def test_a_request_reads_no_snapshot_of_another_realm():
    rig = toy()
    asked(rig, "a", LONG, salt="a")
    assert asked(rig, "b", LONG, salt="b") == 0
    assert asked(rig, "c", LONG, salt="a") == 36


def test_what_broke_leaves_no_snapshot():
    """Not even where its pages were good: nobody else has computed from what it kept there."""
    rig = toy()
    asked(rig, "a", LONG)
    rig.submit("b", [*LONG, 8])
    rig.step()
    request = rig.scheduler.running[0]
    rig.scheduler._break(request, 38)
    assert rig.ranks[0].snapshots.num_kept == 1, "that of a's answer, which b did not read"
    assert len(rig.prefix.find([*LONG, 8]).pages) == 9
    assert rig.prefix.match([*LONG, 8]).pages == []


SETTINGS = [
    # pages, page size, max_running, max_step_tokens, prefill_chunk, prefix, overlap, drafts,
    # ranks, snapshots
    (64, 4, 8, 64, 16, True, 0, 0, 1, 12),
    (14, 4, 6, 24, 8, True, 1, 0, 1, 3),
    (14, 4, 6, 24, 8, True, 2, 3, 1, 40),
    (13, 4, 6, 5, 3, True, 1, 2, 1, 0),
    (30, 4, 12, 7, 7, False, 2, 4, 1, 0),
    (24, 8, 6, 24, 8, True, 1, 3, 2, 5),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: "-".join(map(str, s)))
def test_random_traffic_is_exact(setting):
    pages, size, rows, step, chunk, prefix, overlap, drafts, ranks, count = setting
    rig = toy(
        pages,
        size,
        snapshots=count,
        prefix=prefix,
        overlap=overlap,
        drafts=drafts,
        ranks=ranks,
        max_running=rows,
        max_step_tokens=step,
        prefill_chunk=chunk,
        context_length=70,
        queue_limit=20,
    )
    traffic = Traffic(rig, seed=SETTINGS.index(setting))
    while traffic.num_submitted < 120:
        traffic.act()
        rig.step()
    rig.run()
    rig.check_end()
    stats = rig.scheduler.stats()
    assert (stats.cached_tokens > 0) == (prefix and count > 0)
    assert (stats.accepted_tokens > 0) == bool(drafts)
    assert stats.accepted_tokens < stats.draft_tokens or not drafts
    rig.scheduler.flush()
    assert rig.scheduler.holdings.num_free == pages * ranks


class Lost(ToyDevice):
    loses_copies = True


class Undone(ToyDevice):
    undo = 0  # no entries for tokens that are taken back


@pytest.mark.parametrize(("make", "drafts"), [(Lost, 3), (Undone, 3), (narrower(), 0)])
def test_a_fault_shows(make, drafts):
    rig = toy(make=make, drafts=drafts)
    with pytest.raises((AssertionError, StopIteration, TypeError)):
        for number in range(8):
            asked(rig, f"a{number}", [number, *LONG], max_tokens=30)
            asked(rig, f"b{number}", [number, *LONG], max_tokens=30)
