"""The host tier through the offline API: the same answers with fewer tokens to compute."""

from __future__ import annotations

import random

import pytest

from ds_runtime import LLM, SamplingParams
from ds_runtime.engine.step.result import Handle
from ds_runtime.errors import ConfigError
from ds_runtime.kv.tiers.copies import HostCopies
from ds_runtime.platform.page_copies import TorchPageCopies

SETTINGS = {
    "platform": "cpu",
    "dtype": "float32",
    "kv_memory": "230KB",
    "context_length": 160,
    "threads": 1,
}
GREEDY = SamplingParams(max_tokens=6, logprobs=2, ignore_eos=True)


def sessions(length, top):
    draw = random.Random(3)
    return [[draw.randrange(2, top) for _ in range(length)] for _ in range(6)]


def turns(llm, rounds=3, length=100, top=258):
    """Each session in turn, each prompt behind the last answer: (tokens, logprobs), cached."""
    said, cached, tiers, prompts = [], [], [], sessions(length, top)
    for _ in range(rounds):
        for number, prompt in enumerate(prompts):
            (output,) = llm.generate(prompt, GREEDY)
            said.append((output.token_ids, [e.logprob for e in output.logprobs]))
            cached.append(output.usage.cached_tokens)
            tiers.append(output.usage.cached_by_tier)
            prompts[number] = [*prompt, *output.token_ids, 7, 8, 9]
    return said, cached, tiers


def test_results_start_for_the_host_in_front_of_the_wait_for_saves(tiny, monkeypatch):
    """Of every step that saves, so that no first token waits for pages of others."""
    order, end, download = list[str](), HostCopies.end, Handle.download

    def ended(copies):
        order.append("saves" if copies._saving is not None else "none")
        end(copies)

    def downloads(handle):
        order.append("results")
        download(handle)

    monkeypatch.setattr(HostCopies, "end", ended)
    monkeypatch.setattr(Handle, "download", downloads)
    with LLM(tiny, **SETTINGS, enable_hierarchical_cache=True, hicache_ratio=8) as llm:
        order.clear()
        turns(llm, rounds=1)
    waits = [n for n, what in enumerate(order) if what == "saves"]
    assert len(waits) >= 6
    assert {order[n - 1] for n in waits} == {"results"}


SPARSE = {**SETTINGS, "context_length": 400, "kv_memory": "6MB"}


@pytest.fixture(scope="module")
def plain_sparse():
    with LLM("demo-v32", **SPARSE) as llm:
        said, cached, _ = turns(llm, length=300, top=250)
    assert max(cached) == 0, "the device has no room for what returns"
    return said


@pytest.fixture(scope="module")
def plain(tiny):
    with LLM(tiny, **SETTINGS) as llm:
        return turns(llm)


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_answers_are_those_without_it(tiny, plain, policy):
    more = {"enable_hierarchical_cache": True, "hicache_ratio": 8, "hicache_write_policy": policy}
    with LLM(tiny, **SETTINGS, **more) as llm:
        said, cached, tiers = turns(llm)
    assert max(plain[1]) == 0, "the device has no room for what returns"
    assert cached[:6] == [0] * 6
    assert cached[6:] == [0] * 12 if policy == "write_through_selective" else min(cached[6:]) >= 96
    assert all(sum(tier.values()) == n for tier, n in zip(tiers, cached, strict=True))
    found = sum(tier["host"] for tier in tiers)
    assert found == sum(cached), "the device has none of it"
    assert all(tier is None for tier in plain[2])
    for mine, theirs in zip(said, plain[0], strict=True):
        assert mine[0] == theirs[0]
        assert mine[1] == pytest.approx(theirs[1], abs=1e-4)


@pytest.mark.parametrize("more", [{}, {"enable_dp_attention": True}])
def test_every_rank_keeps_its_own(tiny, plain, more):
    settings = {**SETTINGS, **more, "enable_hierarchical_cache": True, "hicache_ratio": 16}
    with LLM(tiny, **settings, tp=2) as llm:
        said, cached, tiers = turns(llm)
    assert [tokens for tokens, _ in said] == [tokens for tokens, _ in plain[0]]
    assert min(cached[6:]) >= 96
    assert sum(tier["host"] for tier in tiers) > 600


def test_index_keys_of_sparse_attention_come_back(plain_sparse):
    """Its cache is another group's, and pages of both travel."""
    with LLM("demo-v32", **SPARSE, enable_hierarchical_cache=True, hicache_ratio=8) as llm:
        again, cached, tiers = turns(llm, length=300, top=250)
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in plain_sparse]
    assert min(cached[6:]) >= 288 and sum(tier["host"] for tier in tiers) == sum(cached)


class Late:
    """Copying that copies nothing before somebody waits for it."""

    def __init__(self, copy, layers):
        self.copy, self.layers, self.done, self.waits = copy, layers, 0, []

    def ended(self, layer):
        return self.done > layer

    def finish(self):
        self.copy(self.layers)
        self.done = len(self.layers)

    def wait(self, layer):
        self.waits.append(layer)
        if not self.ended(layer):
            self.copy(self.layers[self.done : layer + 1])
            self.done = layer + 1


def test_a_step_waits_layer_by_layer_for_what_comes(tiny, plain, monkeypatch):
    """And no page is saved before its step has run, nor after the next has begun."""
    queued = {"save": [], "load": []}
    for way, made in queued.items():
        copy = getattr(TorchPageCopies, way)

        def late(self, layers, copy=copy, made=made):
            made.append(Late(lambda some: copy(self, some), layers))
            return made[-1]

        monkeypatch.setattr(TorchPageCopies, way, late)
    with LLM(tiny, **SETTINGS, enable_hierarchical_cache=True, hicache_ratio=8) as llm:
        said, _, _ = turns(llm)
        stats = llm.stats()
    assert [tokens for tokens, _ in said] == [tokens for tokens, _ in plain[0]]
    loads = [one for one in queued["load"] if one.waits]  # without those that were measured
    assert all(one.done == len(one.layers) for one in (*loads, *queued["save"]))
    assert len(loads) == 12 and all(one.waits[0] + 1 < len(one.layers) for one in loads)
    sizes = [sum(layer.host.numel() for layer in one.layers) for one in loads]
    assert stats.host_loaded_bytes == sum(sizes)
    assert 0 < stats.host_pages_kept <= stats.host_pages_total


def test_what_cannot_be(tiny):
    with pytest.raises(ConfigError, match="--disable-radix-cache"):
        LLM(tiny, **SETTINGS, enable_hierarchical_cache=True, disable_radix_cache=True)
    with pytest.raises(ConfigError, match=r"--hicache-ratio 0\.001"):
        LLM(tiny, **SETTINGS, enable_hierarchical_cache=True, hicache_ratio=0.001)
    with pytest.raises(ConfigError, match="--hicache-ratio -1"):
        LLM(tiny, **SETTINGS, hicache_ratio=-1.0)
