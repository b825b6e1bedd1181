"""The offline API on a tiny checkpoint: results do not depend on company, chunks or preemption."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import weakref

import pytest
import torch

from ds_runtime import LLM, SamplingParams
from ds_runtime.errors import CheckpointError, ConfigError, EngineDeadError, RequestError
from ds_runtime_kit.models.answers import check_float32
from tiny_models import byte_prompts

SETTINGS = {"platform": "cpu", "dtype": "float32", "kv_memory": "2MB", "threads": 1}
GREEDY = SamplingParams(max_tokens=12, logprobs=3)


def prompts(count, seed=0, low=1, high=60):
    return byte_prompts(count, seed, high, low)


@pytest.fixture(scope="module")
def llm(tiny):
    with LLM(tiny, **SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(llm):
    """Greedy results of five prompts, each generated alone and without cached prefixes."""
    results = []
    for prompt in prompts(5):
        llm.flush_cache()
        results += llm.generate(prompt, GREEDY)
    return results


def test_greedy_tokens_and_logprobs_are_those_of_transformers(tiny, alone):
    from transformers import DeepseekV3ForCausalLM

    model = DeepseekV3ForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    for output in alone[:4]:
        ids = output.prompt_token_ids + output.token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0].double()
        start = len(output.prompt_token_ids) - 1
        expected = torch.log_softmax(logits[start:-1], -1)
        assert output.token_ids == expected.argmax(-1).tolist()
        for entry, row in zip(output.logprobs, expected, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
            best = torch.sort(row, descending=True)
            assert [t for t, _ in entry.top] == best.indices[:3].tolist()
            assert [v for _, v in entry.top] == pytest.approx(best.values[:3].tolist(), abs=1e-4)


def test_a_batch_equals_each_alone(llm, alone):
    llm.flush_cache()
    check_float32(llm.generate(prompts(5), GREEDY), alone)


def test_cached_prefixes_change_nothing(llm, alone):
    llm.generate(prompts(5), GREEDY)
    again = llm.generate(prompts(5), GREEDY)
    check_float32(again, alone)
    for output in again:
        expected = (len(output.prompt_token_ids) - 1) // 16 * 16
        assert output.usage.cached_tokens == expected


def test_chunks_and_pages_of_any_size_change_nothing(tiny, alone):
    sizes = {"page_size": 4, "chunked_prefill_size": 11, "max_step_tokens": 32, "prefix_chunk": 5}
    with LLM(tiny, **SETTINGS, **sizes) as engine:
        check_float32(engine.generate(prompts(5), GREEDY), alone)


def test_preemption_changes_nothing(tiny, alone):
    long = SamplingParams(max_tokens=24)
    asked = prompts(5)
    with LLM(tiny, **SETTINGS, disable_radix_cache=True) as engine:
        calm = engine.generate(asked, long)
        assert engine.stats().preemptions == 0
    # 40 float32 numbers per token and layer: room for one context and a little.
    tight = {"context_length": 112, "kv_memory": 4 * 40 * 3 * 16 * 10, "disable_radix_cache": True}
    with LLM(tiny, **{**SETTINGS, **tight}) as engine:
        squeezed = engine.generate(asked, long)
        stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.pages_free == stats.pages_total == 10
    assert [o.token_ids for o in squeezed] == [o.token_ids for o in calm]


def test_seeds_give_the_same_text_alone_and_in_a_mixed_batch(llm):
    asked = prompts(4, seed=3)
    drawn = SamplingParams(max_tokens=10, temperature=0.9, top_p=0.95, seed=21)
    single = [llm.generate(p, drawn)[0].token_ids for p in asked]
    plain = SamplingParams(max_tokens=14)
    heavy = SamplingParams(max_tokens=9, temperature=1.5, repetition_penalty=1.2, seed=5)
    company = prompts(3, seed=4)
    mixed = llm.generate([*company, *asked], [plain, heavy, plain, *([drawn] * 4)])
    assert [o.token_ids for o in mixed[3:]] == single
    other = llm.generate(asked[0], SamplingParams(max_tokens=10, temperature=0.9, seed=22))[0]
    assert other.token_ids != single[0]


def test_choices_differ_and_are_reproducible(llm):
    params = SamplingParams(max_tokens=8, temperature=1.2, seed=1, n=3)
    first = llm.generate("abc", params)[0]
    second = llm.generate("abc", params)[0]
    tokens = [c.token_ids for c in first.outputs]
    assert tokens == [c.token_ids for c in second.outputs]
    assert len({tuple(t) for t in tokens}) == 3
    assert [c.index for c in first.outputs] == [0, 1, 2]
    assert first.usage.completion_tokens == 24


def test_no_seed_means_another_draw_each_time(llm):
    params = SamplingParams(max_tokens=12, temperature=1.5)
    assert llm.generate("x", params)[0].token_ids != llm.generate("x", params)[0].token_ids


def test_a_strong_bias_decides_and_a_ban_forbids(llm):
    ((favoured,),) = [llm.generate("x", SamplingParams(max_tokens=3, logit_bias={77: 100.0}))]
    assert favoured.token_ids == [77, 77, 77]
    greedy = llm.generate("x", SamplingParams(max_tokens=3))[0].token_ids
    banned = llm.generate("x", SamplingParams(max_tokens=3, logit_bias={greedy[0]: -100.0}))[0]
    assert greedy[0] not in banned.token_ids


def test_penalties_choose_as_the_formula_does(llm):
    params = SamplingParams(
        max_tokens=14,
        presence_penalty=1.5,
        frequency_penalty=2.0,
        logit_bias={77: 3.0},
        logprobs=20,
    )
    output = llm.generate([77, 78, 79], params)[0]
    seen, changed = [], 0
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        scores = {
            t: v - 2.0 * seen.count(t) - 1.5 * (t in seen) + 3.0 * (t == 77) for t, v in entry.top
        }
        assert token == max(scores, key=scores.__getitem__)
        changed += token != entry.top[0][0]
        seen.append(token)
    assert changed > 0  # else the penalties were not put to the test


def test_max_tokens_min_tokens_and_stop_ids(llm):
    greedy = llm.generate("hello", SamplingParams(max_tokens=10))[0]
    assert (len(greedy.token_ids), greedy.finish_reason) == (10, "length")
    at = next(i for i, t in enumerate(greedy.token_ids) if t not in greedy.token_ids[:i] and i > 2)
    stop = greedy.token_ids[at]
    stopped = llm.generate("hello", SamplingParams(max_tokens=10, stop_token_ids=(stop,)))[0]
    assert stopped.token_ids == greedy.token_ids[: at + 1]
    assert (stopped.finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)
    held = SamplingParams(max_tokens=10, min_tokens=at + 2, stop_token_ids=(stop,))
    assert stop not in llm.generate("hello", held)[0].token_ids[: at + 2]


def test_eos_ends_unless_ignored(llm):
    wanted = {1: 100.0}
    ended = llm.generate("x", SamplingParams(max_tokens=5, logit_bias=wanted))[0]
    assert (ended.token_ids, ended.finish_reason, ended.text) == ([1], "stop", "")
    assert ended.outputs[0].stop_reason is None
    going = llm.generate("x", SamplingParams(max_tokens=5, logit_bias=wanted, ignore_eos=True))[0]
    assert (going.token_ids, going.finish_reason) == ([1] * 5, "length")


def test_stop_strings_end_the_text_and_free_the_request(llm):
    letters = [llm.tokenizer.encode(c)[0] for c in "ab"]
    bias = dict.fromkeys(letters, 100.0)
    params = SamplingParams(
        max_tokens=30, logit_bias=bias, frequency_penalty=2.0, stop=("bab", "zzz")
    )
    output = llm.generate("x", params)[0]
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", "bab")
    assert "bab" not in output.text and len(output.token_ids) < 30
    assert llm.stats().running == llm.stats().waiting == 0


def test_prompt_logprobs_equal_those_of_generated_tokens(llm, alone):
    first = alone[3]
    ids = first.prompt_token_ids + first.token_ids
    llm.generate(ids, SamplingParams(max_tokens=1))  # in the cache, which must not be read
    scored = llm.generate(ids, SamplingParams(max_tokens=1, prompt_logprobs=3))[0]
    assert scored.prompt_logprobs[0] is None and len(scored.prompt_logprobs) == len(ids)
    assert [e.token for e in scored.prompt_logprobs[1:]] == ids[1:]
    tail = scored.prompt_logprobs[len(first.prompt_token_ids) :]
    assert [e.logprob for e in tail] == pytest.approx([e.logprob for e in first.logprobs], abs=1e-4)
    assert [[t for t, _ in e.top] for e in tail] == [[t for t, _ in e.top] for e in first.logprobs]
    assert scored.usage.cached_tokens == 0


def test_text_chat_and_stream_agree(llm):
    params = SamplingParams(max_tokens=6)
    from_text = llm.generate("Hi", params)[0]
    assert from_text.prompt_token_ids[0] == llm.tokenizer.bos_id
    assert from_text.text == llm.tokenizer.decode(from_text.token_ids)
    assert "".join(llm.stream("Hi", params)) == from_text.text
    talk = llm.chat([{"role": "user", "content": "Hi"}], params)[0]
    assert talk.prompt.endswith("<user>Hi<assistant>")
    assert talk.token_ids == llm.generate(talk.prompt_token_ids, params)[0].token_ids
    assert "".join(llm.stream("Hi", params, chat=True)) == talk.text


def test_leaving_a_stream_early_aborts_it(llm):
    stream = llm.stream("Hi", SamplingParams(max_tokens=40))
    next(stream)
    assert llm.stats().running == 1
    stream.close()
    stats = llm.stats()
    assert stats.running == 0 and stats.pages_free + stats.pages_cached == stats.pages_total


def test_calls_may_overlap(llm):
    """Two streams in turns, and whole generations inside a stream's loop, lose no token."""
    drawn = SamplingParams(max_tokens=30, temperature=1.0, seed=4)
    asked = ["Hi", "abc", "zz", "hello"]
    alone = [llm.generate(p, drawn)[0].text for p in asked]
    first, second = llm.stream(asked[0], drawn), llm.stream(asked[1], drawn)
    texts = ["", ""]
    for pieces in itertools.zip_longest(first, second, fillvalue=""):
        texts = [t + p for t, p in zip(texts, pieces, strict=True)]
    assert texts == alone[:2]
    outer, inner = "", []
    for piece in llm.stream(asked[2], drawn):
        outer += piece
        if len(inner) < 2:
            inner.append(llm.generate(asked[3], drawn)[0].text)
    assert outer == alone[2] and inner == [alone[3]] * 2
    assert llm.stats().running == llm.stats().waiting == 0


def test_overlapping_calls_share_the_queue(tiny):
    """Open streams fill the queue: others wait for them, and leaving one drops only its own."""
    params = SamplingParams(max_tokens=20)
    with LLM(tiny, **SETTINGS, max_queued_requests=2, max_running_requests=1) as engine:
        expected = engine.generate(["Hi", "abc"], params)
        streams = [engine.stream("Hi", params), engine.stream("abc", params)]
        begun = [next(s) for s in streams]
        left = engine.stream("zz", params)
        next(left)
        left.close()
        many = engine.generate(["Hi"] * 5, params)
        assert [o.text for o in many] == [expected[0].text] * 5
        texts = [b + "".join(s) for b, s in zip(begun, streams, strict=True)]
        assert texts == [o.text for o in expected]


def test_ctrl_c_during_a_step_leaves_a_working_engine(llm, monkeypatch):
    runner = llm._engine.runner
    collect = runner.collect

    def interrupted(handle):
        signal.raise_signal(signal.SIGINT)
        return collect(handle)

    expected = llm.generate("abc", GREEDY)[0].text
    open_stream = llm.stream("abc", GREEDY)
    begun = next(open_stream)
    monkeypatch.setattr(runner, "collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("Hi", SamplingParams(max_tokens=40))
    monkeypatch.undo()
    assert begun + "".join(open_stream) == expected  # the step's tokens for others are kept
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.stats().running == 0
    assert llm.generate("Hi", SamplingParams(max_tokens=4))[0].finish_reason == "length"


def test_a_step_that_fails_closes_the_engine_with_its_reason(tiny, monkeypatch):
    engine = LLM(tiny, **SETTINGS)
    runner = engine._engine.runner

    def broken(plan):
        raise ZeroDivisionError("no such luck")

    monkeypatch.setattr(runner, "launch", broken)
    with pytest.raises(ZeroDivisionError):
        engine.generate("Hi")
    with pytest.raises(EngineDeadError, match="no such luck"):
        engine.generate("Hi")


def test_more_prompts_than_the_queue_holds(tiny):
    with LLM(tiny, **SETTINGS, max_queued_requests=2, max_running_requests=3) as engine:
        outputs = engine.generate([[5 + i] for i in range(12)], SamplingParams(max_tokens=2))
        assert [o.prompt_token_ids for o in outputs] == [[5 + i] for i in range(12)]
        assert all(len(o.token_ids) == 2 for o in outputs)


def test_one_bad_prompt_leaves_nothing_behind(llm):
    with pytest.raises(RequestError, match="500 tokens"):
        llm.generate([[5, 6], [7] * 500], SamplingParams(max_tokens=4))
    stats = llm.stats()
    assert stats.running == stats.waiting == 0
    assert stats.pages_free + stats.pages_cached == stats.pages_total
    for prompt, match in (([], "empty"), ([9999], "9999"), ([-1], "-1")):
        with pytest.raises(RequestError, match=match):
            llm.generate([prompt], SamplingParams())
    with pytest.raises(RequestError, match="2 params for 1 prompts"):
        llm.generate("x", [SamplingParams(), SamplingParams()])
    assert llm.generate([], SamplingParams()) == []


def test_a_checkpoint_without_tokenizer_takes_ids(tiny_without_tokenizer, llm):
    with LLM(tiny_without_tokenizer, **SETTINGS) as engine:
        assert engine.generate([4, 5, 6])[0].token_ids == llm.generate([4, 5, 6])[0].token_ids
        with pytest.raises(RequestError, match=r"no tokenizer\.json: give token ids"):
            engine.generate("text")
        with pytest.raises(RequestError, match="use stop_token_ids"):
            engine.generate([4], SamplingParams(stop=("x",)))
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            _ = engine.tokenizer


def test_settings_are_checked(tiny):
    with pytest.raises(ConfigError, match="did you mean 'context_length'"):
        LLM(tiny, contxt_length=3)
    with pytest.raises(ConfigError, match=r"lower --context-length, e\.g\. to 16"):
        LLM(tiny, **{**SETTINGS, "kv_memory": 4 * 40 * 3 * 20})
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        LLM(tiny, **SETTINGS, context_length=100000)


def test_a_closed_engine_says_so(tiny):
    engine = LLM(tiny, **SETTINGS)
    engine.close()
    engine.close()
    with pytest.raises(EngineDeadError, match="closed"):
        engine.generate("x")


def test_a_closed_engine_frees_its_model(tiny):
    """At once: the next one finds the memory, also on a device, whatever the collector thinks."""
    engine = LLM(tiny, **SETTINGS)
    held = [weakref.ref(parameter) for parameter in engine._engine.runner.caches]
    assert held
    engine.close()
    assert not any(ref() is not None for ref in held)


def test_the_banner_names_platform_model_memory_and_kernels(llm):
    text = llm.banner
    for part in ("cpu", "DeepseekV3ForCausalLM", "3 layers", "KV cache", "mla_decode", "latent"):
        assert part in text
    ops = [line for line in text.splitlines() if line.startswith("op ")]
    assert len(ops) == len({r.op for r in llm.plan.rows})


@pytest.mark.slow
def test_the_demo_gives_equal_text_alone_and_in_mixed_batches():
    asked = [f"What is {a}+{b}?" for a, b in ((12, 30), (7, 8), (99, 1), (345, 678), (5, 5))]
    talks = [[{"role": "user", "content": text}] for text in asked]
    drawn = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.95, seed=9)
    with LLM("demo", dtype="float32", platform="cpu", kv_memory="400MB", threads=1) as engine:
        for params in (drawn, SamplingParams(max_tokens=40)):
            alone = []
            for talk in talks:
                engine.flush_cache()
                alone += engine.chat(talk, params)
            mixed = engine.chat(talks, params)
            assert [o.text for o in mixed] == [o.text for o in alone]
            assert [o.token_ids for o in mixed] == [o.token_ids for o in alone]


COLLECTIONS = """
import gc, sys
from ds_runtime import LLM, SamplingParams

if frozen := "frozen" in sys.argv:
    gc.freeze()
    own = gc.get_freeze_count()
full, settings = [], dict(platform="cpu", dtype="float32", kv_memory="2MB", threads=1)
before = gc.get_threshold()
waiting = [list(range(2, 10)) for _ in range(3000)]
with LLM(sys.argv[1], max_queued_requests=3000, **settings) as first:
    with LLM(sys.argv[1], **settings):
        pass
    gc.callbacks.append(lambda phase, info: full.append(info) if info["generation"] == 2 else None)
    first.generate(waiting, SamplingParams(max_tokens=2))
    gc.callbacks.pop()
left = gc.get_freeze_count()  # some of its own have been deleted meanwhile
print(len(full), gc.get_threshold() == before, left > 0.99 * own if frozen else left == 0)
"""


@pytest.mark.parametrize("own", [(), ("frozen",)])
def test_no_full_collection_while_prompts_wait_and_all_is_restored(tiny, own):
    """own: the process has frozen objects itself, which stay frozen."""
    command = [sys.executable, "-c", COLLECTIONS, str(tiny), *own]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.stdout.split() == ["0", "True", "True"], ran.stderr
