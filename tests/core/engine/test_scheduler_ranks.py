"""Where attention is divided by sequences: which rank gets a request, and what it holds there."""

from __future__ import annotations

import pytest
from fake_device import Rig, prompt

from ds_runtime.errors import RequestError


def ranks(rig: Rig) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for plan in rig.plans:
        for work in plan.works:
            found.setdefault(work.rid, set()).add(work.group)
    return found


def test_requests_go_where_the_fewest_run_and_stay_there():
    rig = Rig(ranks=3, num_pages=16)
    for i in range(6):
        rig.submit(str(i), prompt(6 + i, 7 * i), max_tokens=9)
    rig.step()
    assert [p.num_running for p in rig.ranks] == [2, 2, 2]
    rig.run()
    rig.check_end()
    assert ranks(rig) == {str(i): {i % 3} for i in range(6)}


def test_the_emptiest_of_ranks_that_run_as_many():
    rig = Rig(ranks=2, num_pages=16, prefix=False)
    rig.submit("long", prompt(30), max_tokens=2)
    rig.submit("short", prompt(2, 9), max_tokens=2)
    rig.step()
    rig.submit("next", prompt(5, 3), max_tokens=2)
    rig.run()
    assert ranks(rig) == {"long": {0}, "short": {1}, "next": {1}}


def test_a_prompt_goes_to_the_rank_that_knows_most_of_it():
    rig = Rig(ranks=3, num_pages=16, page_size=4)
    for rid, start in (("a", 0), ("b", 10), ("c", 20)):
        rig.submit(rid, prompt(13, start), max_tokens=3)
    rig.run()
    rig.submit("b2", [*prompt(9, 10), 0, 1, 2], max_tokens=3)  # two pages of b
    rig.submit("b3", prompt(13, 10), max_tokens=3)  # three
    rig.submit("c2", prompt(13, 20), max_tokens=3)
    rig.run()
    rig.check_end()
    assert ranks(rig) == {"a": {0}, "b": {1}, "c": {2}, "b2": {1}, "b3": {1}, "c2": {2}}
    assert [rig.cached[rid] for rid in ("b2", "b3", "c2")] == [8, 12, 12]
    assert rig.scheduler.stats().pages_cached == sum(p.prefix.num_cached for p in rig.ranks) > 9


def test_a_beginning_that_all_have_does_not_crowd_one_rank():
    rig = Rig(ranks=2, num_pages=400, page_size=4, max_running=64)
    rig.submit("first", prompt(8), max_tokens=1)
    rig.run()
    for i in range(40):
        rig.submit(str(i), [*prompt(8), i], max_tokens=20)
    while rig.scheduler.waiting:  # the other rank's wait until it has computed the beginning
        rig.step()
    first, second = (p.num_running for p in rig.ranks)
    assert first + second == 40 and first <= second * 3 // 2 + 9
    rig.run()
    rig.check_end()


def test_a_rank_without_room_does_not_hold_up_others():
    rig = Rig(ranks=2, num_pages=8, page_size=4)
    rig.submit("a", prompt(25), max_tokens=7)
    rig.run()
    rig.submit("b", prompt(25), max_tokens=7)  # six pages of a, on rank 0, and two more
    rig.step()
    rig.submit("c", prompt(25), max_tokens=7)
    rig.step()
    assert [p.num_running for p in rig.ranks] == [1, 1]
    rig.run()
    rig.check_end()
    assert ranks(rig) == {"a": {0}, "b": {0}, "c": {1}} and rig.cached == {"a": 0, "b": 24, "c": 0}


def test_ranks_preempt_their_own_requests_only():
    rig = Rig(ranks=2, num_pages=9, page_size=4, prefix=False)
    for rid, length, most in (("a", 14, 20), ("b", 17, 2), ("c", 14, 20), ("d", 3, 9)):
        rig.submit(rid, prompt(length, length), max_tokens=most)
    rig.run()
    rig.check_end()
    assert rig.scheduler.stats().preemptions == 1, "c, not d, which came later"
    assert [ranks(rig)[rid] for rid in "abd"] == [{0}, {1}, {1}]
    assert ranks(rig)["c"] == {0, 1}, "preempted on rank 0, it goes on where there is room"


def test_the_ranks_hold_as_much_together_as_one_pool_of_all_their_pages():
    rig = Rig(ranks=4, num_pages=8, page_size=4, max_running=32)
    for i in range(8):
        rig.submit(str(i), prompt(12, i), max_tokens=3)
    rig.step()
    assert len(rig.scheduler.running) == 8 and rig.scheduler.stats().pages_total == 32
    with pytest.raises(RequestError, match="the prompt has 33 tokens, the KV cache holds 32"):
        rig.submit("x", prompt(33))
    rig.run()
    rig.check_end()
    rig.scheduler.flush()
    assert rig.scheduler.stats().pages_free == 32
