"""Where the KV of a sequence lies when attention is divided by sequences: ranks are threads here,
so that the caches of all can be looked into.
"""

from __future__ import annotations

import json
import queue
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ds_runtime import SamplingParams
from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.estimate import lora_bytes, needed_bytes
from ds_runtime.assembly.plan import difference, render
from ds_runtime.config import EngineConfig
from ds_runtime.description.adapter import adaptable_modules
from ds_runtime.description.tree import Ranks
from ds_runtime.engine.device.runner import Runner
from ds_runtime.engine.engine import Engine
from ds_runtime.engine.messages import Submit
from ds_runtime.engine.process.ranks import join
from ds_runtime.engine.process.rankspec import RankSpec
from ds_runtime.errors import UnsupportedError
from ds_runtime.ops.contract import DeviceInfo
from ds_runtime.parallel.mesh import Mesh
from ds_runtime.parallel.world import World
from thread_members import in_threads


class Leader:
    """Reaches the other ranks through a queue each."""

    def __init__(self, queues):
        self.queues = queues

    def send(self, plan):
        for one in self.queues:
            one.put(plan)

    def waited(self):
        return []  # these communicators count nothing

    def leave(self):
        self.send(None)

    close = leave


def config_of(model, size, **more):
    """Op by op: collectives between threads are none that a step records."""
    more = {"disable_graph": True, **more}
    settings = {"platform": "cpu", "dtype": "float32", "kv_memory": 400_000, "threads": 1, **more}
    return EngineConfig(
        model=str(model), tp=size, enable_dp_attention=size > 1, chunked_prefill_size=16, **settings
    )


def serve(model, size, submits):
    """(tokens by id, every rank's runner) once all requests are over."""
    leader, runners = Leader([queue.Queue() for _ in range(size)]), [None] * size
    tokens = {submit.rid: [] for submit in submits}

    def rank(member):
        assembly = assemble(config_of(model, size))
        world = World(Mesh.of(assembly.config), member)
        runners[member.rank] = runner = Runner(assembly, world, poison=True)
        runner.warm_up()
        if member.rank:
            while plan := leader.queues[member.rank].get():
                runner.launch(plan)
            return
        engine = Engine(assembly, runner, leader)
        for submit in submits:
            assert engine.submit(submit) is None
        while engine.has_work:
            for message in engine.step():
                tokens[message.rid] += message.tokens
        engine.close()

    def told(member):
        try:
            rank(member)
        except BaseException:
            leader.close()
            raise

    in_threads(size, told)
    return tokens, runners


def written(runner):
    """Slots of each layer that hold something: the caches were full of NaN."""
    return [int((~cache.isnan().all(-1)).sum()) for cache in runner.caches]


def test_the_kv_of_a_sequence_lies_on_one_rank_only(tiny):
    lengths = {"a": (40, 9), "b": (7, 30), "c": (21, 3)}  # prompt, output
    submits = [
        Submit(
            rid=rid,
            prompt=[(17 * length + i) % 250 + 2 for i in range(length)],
            params=SamplingParams(max_tokens=count, ignore_eos=True),
            seed=1,
        )
        for rid, (length, count) in lengths.items()
    ]
    held = {rid: length + count - 1 for rid, (length, count) in lengths.items()}
    expected, (alone,) = serve(tiny, 1, submits)
    found, runners = serve(tiny, 4, submits)
    assert found == expected
    assert [written(r) for r in runners] == [[held.get(rid, 0)] * 3 for rid in "abc-"]
    assert all(r.kv_tokens == 4 * alone.kv_tokens for r in runners)
    assert all(r.memory.total == alone.memory.total for r in runners)


def test_weights_of_attention_are_whole_and_others_cut(tiny):
    def held(runner):
        attention = [block.attention for block in runner.model.blocks]
        linears = [x for a in attention for x in (a.inputs.joined, a.inputs.up, a.kv_b, a.o_proj)]
        return sum(x.packed.nbytes for x in linears), runner.model.embed.table.shape[0]

    _, (alone,) = serve(tiny, 1, [])
    (whole, rows), (_, runners) = held(alone), serve(tiny, 2, [])
    assert all(held(r) == (whole, rows // 2) for r in runners)
    assert [r.model.blocks[1].mlp.experts.packed.shape for r in runners] == [(9, 64, 16)] * 2


def plan_of(assembly):
    """One slot of rank 4 for every Linear."""
    return SimpleNamespace(modules=set(adaptable_modules(assembly.model)), slots=1, rank=4)


def test_the_estimate_counts_whole_weights_of_attention(tiny):
    divided = assemble(config_of(tiny, 2))
    by_heads = assemble(replace(divided.config, enable_dp_attention=False))
    copies = next(k.footprint.copies for s, k in divided.binding.choices if s.op == "mla_absorb")
    whole = 96 * 32 + copies * 128 * 32 + 64 * 64  # q_b, kv_b and o of a layer
    assert needed_bytes(divided) - needed_bytes(by_heads) == 3 * 4 * whole // 2
    slots = [lora_bytes(divided.model, plan_of(divided), "float32", Ranks(2, n)) for n in (1, 2)]
    # Outputs of q_b and kv_b and inputs of o, at rank 4.
    assert slots[0] - slots[1] == 3 * 4 * 4 * (96 + 128 + 64) // 2


def test_plans_differ_in_how_attention_is_divided(tiny):
    divided = assemble(config_of(tiny, 2))
    by_heads = assemble(replace(divided.config, enable_dp_attention=False))
    plans = [json.loads(json.dumps(a.plan.to_dict(), default=list)) for a in (divided, by_heads)]
    assert "--enable-dp-attention, groups: 2 here, 1 there" in difference(*plans)
    assert "tp 2, attention by sequences in 2 groups" in render(divided.plan)


def test_a_communicator_without_reduce_scatter_is_a_sentence(tiny, tmp_path):
    config = config_of(tiny, 2)
    assembly = assemble(config)
    old = SimpleNamespace(close=lambda: None)
    platform = SimpleNamespace(
        name="old",
        info=lambda rank: DeviceInfo("cpu", "x", "x"),
        init_worker=lambda *args: None,
        communicator=lambda *args: old,
    )
    fake = SimpleNamespace(config=config, platform=platform, plan=assembly.plan)
    with pytest.raises(UnsupportedError, match=r"platform old has no reduce_scatter.*leave it out"):
        join(RankSpec(config, (), (), tmp_path, 0), fake)
