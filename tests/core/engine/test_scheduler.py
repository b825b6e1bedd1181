"""What the scheduler promises, case by case, on the fake device."""

from __future__ import annotations

import pytest
from fake_device import EOS, VOCAB, Rig, prompt

from ds_runtime.engine.schedule import scheduler
from ds_runtime.engine.schedule.limits import check_prompt
from ds_runtime.engine.step.plan import StepResult, WorkResult
from ds_runtime.errors import QueueFullError, RequestError


def test_one_request_alone():
    rig = Rig()
    rig.submit("a", prompt(10), max_tokens=5)
    rig.run()
    rig.check_end()
    assert len(rig.plans) == 5
    first, second = rig.plans[0].works[0], rig.plans[1].works[0]
    assert (first.start, first.length, first.tokens) == (0, 10, prompt(10))
    assert (second.start, second.length, second.tokens) == (10, 1, None)
    assert [i.row for p in rig.plans for i in p.init] == [0]


def test_decodes_go_before_chunks_and_chunks_before_admissions():
    rig = Rig(max_step_tokens=7, prefill_chunk=5, max_running=4)
    rig.submit("a", prompt(5))
    rig.submit("b", prompt(12, 7))
    rig.submit("c", prompt(9, 20))
    shares = []
    for _ in range(5):
        plan = rig.step()
        shares.append([(w.rid, w.start, w.length) for w in plan.works])
    assert shares == [
        [("a", 0, 5), ("b", 0, 2)],
        [("a", 5, 1), ("b", 2, 5), ("c", 0, 1)],
        [("a", 6, 1), ("b", 7, 5), ("c", 1, 1)],
        [("a", 7, 1), ("b", 12, 1), ("c", 2, 5)],
        [("a", 8, 1), ("b", 13, 1), ("c", 7, 2)],
    ]
    rig.run()
    rig.check_end()


def test_no_more_rows_than_max_running():
    rig = Rig(max_running=3)
    for i in range(9):
        rig.submit(str(i), prompt(5, i))
    while rig.scheduler.has_work:
        rig.step()
        assert len(rig.scheduler.running) <= 3
    rig.check_end()


@pytest.mark.parametrize(("policy", "order"), [("fifo", "abcd"), ("priority", "cbda")])
def test_right_of_way(policy, order):
    rig = Rig(max_running=1, policy=policy)
    for rid, priority in zip("abcd", (0, 1, 2, 1), strict=True):
        rig.submit(rid, prompt(6, ord(rid)), priority=priority)
    rig.run()
    started = [w.rid for p in rig.plans for w in p.works if w.start == 0]
    assert "".join(started) == order
    rig.check_end()


def test_a_whole_cached_prompt_still_computes_its_last_token():
    rig = Rig(page_size=4)
    rig.submit("a", prompt(8))
    rig.run()
    rig.submit("b", prompt(8))
    rig.submit("c", prompt(9))
    rig.run()
    rig.check_end()
    assert rig.cached == {"a": 0, "b": 4, "c": 8}


@pytest.mark.parametrize("ranks", [1, 2])
def test_nobody_reads_pages_under_another_salt(ranks):
    rig = Rig(ranks=ranks)
    for n, salt in enumerate(["", "a", "b", "a", "", "b"]):
        rig.submit(f"r{n}", prompt(9), salt=salt)
        rig.run()
    assert [rig.cached[f"r{n}"] for n in range(6)] == [0, 0, 0, 8, 8, 8]
    tokens = [rig.answers[f"r{n}"].tokens for n in range(6)]
    assert tokens == tokens[:1] * 6  # and the answer is the same
    rig.submit("c0", prompt(8, 30), salt="c", choice=0)
    rig.submit("c1", prompt(8, 30), salt="c", choice=1)
    rig.run()
    assert rig.cached["c1"] == 4  # choices of one prompt share it, as ever
    rig.check_end()


def test_output_is_cached_for_the_next_turn():
    rig = Rig(page_size=4)
    rig.submit("a", prompt(6), max_tokens=7)
    rig.run()
    turn = prompt(6) + rig.answers["a"].tokens + [1, 2]
    rig.submit("b", turn)
    rig.run()
    rig.check_end()
    assert rig.cached["b"] == 12  # the last sampled token was never computed


def test_equal_prompts_side_by_side_end_up_on_the_same_pages():
    rig = Rig(num_pages=32, page_size=4)
    rig.submit("a", prompt(13), max_tokens=3)
    rig.submit("b", prompt(13), max_tokens=3, seed=1, prompt_logprobs=0)  # it reads no cache
    rig.step()
    a, b = rig.scheduler.running
    assert a.pages[:3] == b.pages[:3] and a.num_shared == b.num_shared == 3
    assert rig.pool.num_free == 32 - 3 - 2
    rig.run()
    rig.check_end()


def test_choices_wait_for_the_first_one_and_then_share_its_prompt():
    rig = Rig(page_size=4, prefill_chunk=5)
    for i in range(4):
        rig.submit(f"x{i}", prompt(11), choice=i)
    rig.submit("other", prompt(6, 30))
    rig.run()
    rig.check_end()
    assert [rig.cached[f"x{i}"] for i in range(4)] == [0, 8, 8, 8]
    together = [{w.rid for w in p.works} for p in rig.plans]
    assert together[0] == {"x0", "other"} and together[3] >= {"x1", "x2", "x3"}


def test_choices_wait_for_one_that_scores_the_prompt():
    rig = Rig(page_size=4)
    rig.submit("x0", prompt(11), choice=0, prompt_logprobs=0)
    rig.submit("x1", prompt(11), choice=1)
    rig.run()
    rig.check_end()
    assert rig.cached == {"x0": 0, "x1": 8}


def test_a_sibling_takes_the_lead_when_the_first_choice_is_aborted():
    rig = Rig(page_size=4, prefill_chunk=5)
    for i in range(3):
        rig.submit(f"x{i}", prompt(11), choice=i)
    rig.step()
    rig.abort("x0")
    rig.run()
    rig.check_end()
    assert rig.cached == {"x1": 4, "x2": 8}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("chunk", [3, 16, 64])
def test_sessions_that_start_together_compute_their_common_beginning_once(ranks, chunk):
    """64 prompts with a system text of 40 tokens: on each rank it is computed once."""
    rig = Rig(num_pages=600, page_size=4, prefill_chunk=chunk, ranks=ranks, max_running=64)
    for n in range(64):
        rig.submit(f"s{n}", [*prompt(40), n % 8, n // 8, n % 8], max_tokens=4)
    rig.run()
    rig.check_end()
    computed = sum(w.length for p in rig.plans for w in p.works if w.tokens is not None)
    assert computed == ranks * 40 + 64 * 3
    assert sorted(rig.cached.values()) == [0] * ranks + [40] * (64 - ranks)
    assert rig.scheduler.stats().prefix_waits == 63


def test_nobody_waits_for_another_salt_or_for_less_than_a_page():
    rig = Rig(page_size=4, prefill_chunk=4)
    rig.submit("a", prompt(17))
    rig.submit("salted", prompt(17), salt="s")
    rig.submit("short", [*prompt(3), 30, 31, 32])
    rig.step()
    assert {r.rid for r in rig.scheduler.running} == {"a", "salted", "short"}
    rig.run()
    rig.check_end()
    assert rig.scheduler.stats().prefix_waits == 0


def test_one_waits_only_for_what_it_has_in_common():
    """The first computes 40 tokens in ten steps; what shares 8 of them begins after two."""
    rig = Rig(page_size=4, prefill_chunk=4, overlap=0)
    rig.submit("a", prompt(40))
    rig.submit("b", [*prompt(8), 37, 38, 39])
    began = {}
    for step in range(6):
        plan = rig.step()
        began |= {w.rid: step for w in plan.works if w.rid not in began}
    assert began == {"a": 0, "b": 2}
    rig.run()
    rig.check_end()
    assert rig.cached == {"a": 0, "b": 8}


def test_right_of_way_is_not_given_to_who_waits_longer():
    """A request of higher priority does not wait for one that may be put off."""
    rig = Rig(page_size=4, prefill_chunk=4, policy="priority")
    rig.submit("low", prompt(40))
    rig.step()
    rig.submit("high", prompt(40), priority=1)
    rig.step()
    assert {r.rid for r in rig.scheduler.running} == {"low", "high"}
    rig.run()
    rig.check_end()


def test_what_is_evicted_or_flushed_meanwhile_is_computed_anew():
    rig = Rig(page_size=4, prefill_chunk=4, overlap=0)
    rig.submit("a", prompt(40))
    rig.submit("b", prompt(40))
    rig.step()
    rig.step()
    rig.scheduler.flush()
    rig.run()
    rig.check_end()
    assert set(rig.cached) == {"a", "b"}


def test_decode_preempts_the_latest_request_which_keeps_its_output():
    rig = Rig(num_pages=9, page_size=4, prefix=False)
    rig.submit("a", prompt(12), max_tokens=16)
    rig.submit("b", prompt(12, 9), max_tokens=16)
    rig.run()
    rig.check_end()
    assert rig.scheduler.stats().preemptions >= 1
    inits = [i for p in rig.plans for i in p.init]
    assert [len(i.prompt) for i in inits] == [12] * len(inits) and len(inits) >= 3
    assert inits[-1].output == rig.answers["b"].tokens[: len(inits[-1].output)] != []
    resumed = [w for p in rig.plans for w in p.works if w.rid == "b" and w.tokens is not None]
    assert resumed[-1].tokens == prompt(12, 9) + inits[-1].output
    assert rig.plans[-1].works[0].rid == "b"


@pytest.mark.parametrize("overlap", [False, True])
def test_the_oldest_request_is_never_held_up(overlap):
    rig = Rig(num_pages=8, page_size=2, max_running=4, overlap=overlap)
    for i in range(6):
        rig.submit(f"r{i}", prompt(5, i), max_tokens=11)
    while rig.answers["r0"].finish is None:
        plan = rig.step()
        assert plan is None or plan.works[0].rid == "r0"
    assert sum(w.rid == "r0" for p in rig.plans for w in p.works) == 11
    assert rig.scheduler.stats().preemptions > 0
    rig.run()
    rig.check_end()


def test_admission_leaves_a_page_for_each_running_request():
    rig = Rig(num_pages=9, page_size=4)
    rig.submit("a", prompt(12), max_tokens=4)
    rig.submit("b", prompt(24, 9), max_tokens=1)
    rig.run()
    rig.check_end()
    assert rig.scheduler.stats().preemptions == 0
    assert [len(p.works) for p in rig.plans] == [1, 1, 1, 1, 1]


def test_lower_priority_is_preempted_first():
    rig = Rig(num_pages=9, page_size=4, policy="priority", prefix=False)
    rig.submit("low", prompt(12), max_tokens=16, priority=0)
    rig.submit("high", prompt(12, 9), max_tokens=16, priority=5)
    rig.run()
    rig.check_end()
    assert rig.scheduler.stats().preemptions >= 1
    assert [i.prompt[0] for p in rig.plans for i in p.init][:2] == [9, 0]
    assert rig.plans[-1].works[0].rid == "low"


def test_a_request_that_fills_the_pool_alone_ends_with_length():
    rig = Rig(num_pages=3, page_size=4)
    rig.submit("a", prompt(12), max_tokens=50)
    rig.submit("b", prompt(7, 5), max_tokens=50)
    rig.run()
    rig.check_end()
    assert len(rig.answers["a"].tokens) == 1 and rig.answers["a"].finish == "length"
    assert len(rig.answers["b"].tokens) == 6 and rig.answers["b"].finish == "length"


def test_the_context_ends_a_request():
    rig = Rig(context_length=10)
    rig.submit("a", prompt(7), max_tokens=None)
    rig.submit("b", prompt(9), max_tokens=99)
    rig.run()
    rig.check_end()
    assert [len(rig.answers[r].tokens) for r in "ab"] == [3, 1]


def test_stop_ids_eos_and_min_tokens():
    rig = Rig(max_running=64, num_pages=400, queue_limit=99)
    for i in range(20):
        rig.submit(f"eos{i}", prompt(5, i), max_tokens=100, ignore_eos=False)
        rig.submit(
            f"min{i}",
            prompt(6, i),
            max_tokens=60,
            min_tokens=30,
            ignore_eos=False,
            stop_token_ids=(1, 5, 8),
        )
        rig.submit(f"all{i}", prompt(7, i), max_tokens=100)
    rig.run()
    rig.check_end()
    ends = [rig.answers[f"eos{i}"] for i in range(20)]
    assert any(a.finish == "stop" for a in ends)
    assert all(a.stop_token == a.tokens[-1] == EOS for a in ends if a.finish == "stop")
    for i in range(20):
        answer = rig.answers[f"min{i}"]
        assert not {1, 5, 8, EOS} & set(answer.tokens[:30])
        assert answer.finish != "stop" or len(answer.tokens) > 30
    assert {rig.answers[f"all{i}"].finish for i in range(20)} == {"length"}


def test_a_stop_id_before_min_tokens_does_not_stop():
    rig = Rig()
    rig.submit("a", prompt(5), max_tokens=4, min_tokens=2, ignore_eos=False)
    for finish in (None, None, "stop"):
        plan = rig.scheduler.schedule()
        works = [WorkResult(rid="a", tokens=[EOS])]
        (message,) = rig.scheduler.update(plan, StepResult(step=plan.step, works=works))
        assert message.finish == finish
    assert not rig.scheduler.has_work


def test_prompt_logprobs_come_once_and_read_no_cache():
    rig = Rig(page_size=4, prefill_chunk=3)
    rig.submit("a", prompt(10))
    rig.run()
    rig.submit("b", prompt(10), prompt_logprobs=2, logprobs=1)
    rig.submit("one", prompt(1), prompt_logprobs=0)
    rig.run()
    rig.submit("c", prompt(10))
    rig.run()
    rig.check_end()
    assert rig.cached == {"a": 0, "b": 0, "one": 0, "c": 8}
    assert len(rig.answers["b"].prompt_logprobs) == 10 and len(rig.answers["b"].logprobs) == 8
    assert rig.answers["one"].prompt_logprobs == [None]
    assert rig.answers["a"].prompt_logprobs is None


def test_prompt_logprobs_alone_fill_the_cache():
    rig = Rig(page_size=4)
    rig.submit("a", prompt(10), prompt_logprobs=2)
    rig.run()
    rig.submit("b", prompt(10))
    rig.run()
    rig.check_end()
    assert rig.cached["b"] == 8


def test_prompt_logprobs_survive_a_preemption_in_mid_prompt():
    rig = Rig(num_pages=10, page_size=4, prefill_chunk=2, prefix=False)
    rig.submit("a", prompt(14), max_tokens=20)
    for _ in range(7):
        rig.step()
    rig.submit("b", prompt(17, 9), max_tokens=2, prompt_logprobs=0)
    rig.run()
    rig.check_end()
    assert rig.scheduler.stats().preemptions == 1
    b = [w for p in rig.plans for w in p.works if w.rid == "b" and w.prompt_logprobs is not None]
    assert sum(w.start == 0 for w in b) == 2


def test_flush_forgets_what_nobody_reads_and_hides_the_rest():
    rig = Rig(num_pages=32, page_size=4)
    rig.submit("old", prompt(9))
    rig.run()
    assert rig.scheduler.flush() == 4 and rig.pool.num_free == 32
    rig.submit("a", prompt(9), max_tokens=20)
    rig.step()
    rig.step()
    assert rig.scheduler.flush() == 0
    rig.submit("b", prompt(9), max_tokens=3)
    rig.run()
    rig.check_end()
    assert rig.cached == {"old": 0, "a": 0, "b": 0}
    rig.submit("c", prompt(9))
    rig.run()
    assert rig.cached["c"] == 8
    rig.scheduler.flush()
    assert rig.pool.num_free == 32 and rig.prefix.num_cached == 0


def test_eviction_takes_the_least_recently_used():
    rig = Rig(num_pages=9, page_size=4)
    for rid, start in (("a", 0), ("b", 10), ("a2", 0)):
        rig.submit(rid, prompt(9, start), max_tokens=1)
        rig.run()
    rig.submit("c", prompt(25, 20), max_tokens=1)  # 7 pages: those of b, and no page of a
    rig.run()
    rig.submit("a3", prompt(9, 0), max_tokens=1)
    rig.submit("b2", prompt(9, 10), max_tokens=1)
    rig.run()
    rig.check_end()
    assert (rig.cached["a3"], rig.cached["b2"]) == (8, 0)


def test_overlap_decodes_a_token_that_the_host_has_not_seen():
    rig = Rig(overlap=True)
    rig.submit("a", prompt(5), max_tokens=4)
    first = rig.scheduler.schedule()
    second = rig.scheduler.schedule()
    assert [w.tokens for w in first.works] == [prompt(5)]
    assert [(w.start, w.tokens, w.sample) for w in second.works] == [(5, None, True)]
    assert rig.scheduler.has_work


def test_overlap_runs_over_the_end_and_drops_it():
    rig = Rig(overlap=True, max_running=2)
    for i in range(12):
        rig.submit(f"r{i}", prompt(4, i), max_tokens=60, ignore_eos=False)
    rig.run()
    rig.check_end()
    assert any(a.finish == "stop" for a in rig.answers.values())


def test_overlap_counts_tokens_on_their_way():
    rig = Rig(overlap=True)
    rig.submit("a", prompt(5), max_tokens=4)
    rig.run()
    rig.check_end()
    assert len(rig.plans) == 4


def test_abort_in_flight_drops_the_result_even_if_the_id_comes_back():
    rig = Rig(overlap=True)
    rig.submit("a", prompt(9), max_tokens=6)
    rig.step()
    rig.abort("a", "unknown")
    assert not rig.scheduler.running and rig.scheduler.has_work
    rig.submit("a", prompt(7, 3), max_tokens=6)
    rig.run()
    rig.check_end()
    assert len(rig.answers["a"].tokens) == 6


def test_abort_while_waiting():
    rig = Rig(max_running=1)
    rig.submit("a", prompt(5))
    rig.submit("b", prompt(5, 3))
    rig.step()
    rig.abort("b")
    rig.run()
    rig.check_end()


def test_queue_limit():
    rig = Rig(queue_limit=2)
    rig.submit("a", prompt(3))
    rig.submit("b", prompt(3))
    with pytest.raises(QueueFullError, match=r"limit is 2 \(--max-queued-requests\)"):
        rig.submit("c", prompt(3))
    rig.run()
    rig.submit("c", prompt(3))
    rig.run()
    rig.check_end()


@pytest.mark.parametrize(
    ("tokens", "params", "said"),
    [
        ([], {}, "prompt is empty"),
        (prompt(20), {}, r"20 tokens, the context 20 \(--context-length\)"),
        (prompt(17), {}, r"17 tokens, the KV cache holds 16: .* --kv-memory"),
        ([1, VOCAB], {}, f"prompt holds id {VOCAB}: ids are 0 to {VOCAB - 1}"),
        ([1, -1], {}, "prompt holds id -1"),
        ([1], {"stop_token_ids": (VOCAB,)}, f"stop_token_ids holds id {VOCAB}"),
        ([1], {"logit_bias": {VOCAB + 5: 1.0}}, f"logit_bias holds id {VOCAB + 5}"),
    ],
)
def test_impossible_requests_get_a_sentence(tokens, params, said):
    rig = Rig(num_pages=4, page_size=4, context_length=20)
    with pytest.raises(RequestError, match=said):
        rig.submit("a", tokens, **params)
    assert not rig.scheduler.has_work


def test_an_id_in_use_is_refused():
    rig = Rig()
    rig.submit("a", prompt(3))
    with pytest.raises(RequestError, match="'a' is in use"):
        rig.submit("a", prompt(4))


def test_stats():
    rig = Rig(num_pages=32, page_size=4, max_running=1)
    rig.submit("a", prompt(9), max_tokens=3)
    rig.submit("b", prompt(9), max_tokens=3)
    rig.step()
    now = rig.scheduler.stats()
    assert (now.running, now.waiting, now.pages_total) == (1, 1, 32)
    assert (now.pages_cached, now.pages_free) == (0, 32 - 3)  # "a" reads what it has cached
    rig.run()
    end = rig.scheduler.stats()
    assert (end.prompt_tokens, end.generated_tokens, end.cached_tokens) == (18, 6, 8)
    assert (end.steps, end.preemptions, end.running, end.waiting) == (6, 0, 0, 0)
    assert end.pages_cached > 0 and end.pages_cached + end.pages_free == 32


@pytest.mark.parametrize("overlap", [0, 1])
def test_reasoning_stays_out_of_the_prefix_cache_where_that_is_asked(overlap):
    def cached(text, **more):
        """Pages of 4 tokens in the cache after one request with 8 of output."""
        rig = Rig(overlap=overlap)
        rig.submit("a", text, **more)
        rig.run()
        rig.check_end()
        return rig.prefix.num_cached, rig.answers["a"].tokens

    plain, output = cached(prompt(10))
    assert plain == 4  # 10 + 8 tokens, the last of which is never computed
    absent = next(t for t in range(VOCAB) if t not in output + prompt(10))
    assert cached(prompt(10), think=absent) == (4, output)
    assert cached(prompt(10), think=prompt(10)[-1]) == (2, output)  # the prompt opens it
    assert cached(prompt(10), think=prompt(10)[0]) == (4, output)  # an earlier turn did
    later = next(i for i, t in enumerate(output) if t not in output[:i] + prompt(10) and i > 1)
    assert cached(prompt(10), think=output[later]) == ((10 + later) // 4, output)


def test_the_prompt_of_many_choices_is_checked_once(monkeypatch):
    checked = []

    def check(prompt, limits, pool_tokens):
        checked.append(prompt)
        check_prompt(prompt, limits, pool_tokens)

    monkeypatch.setattr(scheduler, "check_prompt", check)
    rig = Rig(max_running=4)
    shared, other = prompt(9), prompt(9)
    for rid, one in (("s", shared), ("o", other)):
        for n in range(20):
            rig.submit(f"{rid}{n}", one, choice=n)
    rig.submit("alone", shared)
    assert [id(one) for one in checked] == [id(shared), id(other), id(shared)]
    with pytest.raises(RequestError, match="holds id"):  # another list is another prompt
        rig.submit("wrong", [*prompt(8), VOCAB], choice=20)
    with pytest.raises(RequestError, match="stop_token_ids"):
        rig.submit("stop", shared, choice=21, stop_token_ids=(VOCAB,))
    rig.run()
    rig.check_end()
