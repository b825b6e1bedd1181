"""Two engines of one model: one computes a prompt, the other reads its pages and goes on."""

from __future__ import annotations

from ds_runtime.assembly.assemble import assemble
from ds_runtime.config import EngineConfig
from ds_runtime.engine.device.runner import Runner
from ds_runtime.engine.engine import Engine
from ds_runtime.engine.messages import Submit
from ds_runtime.kv.transfer import HostTransfer
from ds_runtime.parallel.group import SoloCommunicator
from ds_runtime.parallel.mesh import Mesh
from ds_runtime.parallel.world import World
from ds_runtime.sampling_params import SamplingParams

SETTINGS = {"platform": "cpu", "dtype": "float32", "kv_memory": 2_000_000, "threads": 1}
PROMPT = [n * 5 % 97 + 3 for n in range(70)]


def made(tiny):
    config = EngineConfig(model=str(tiny), **SETTINGS)
    assembly = assemble(config, SETTINGS)
    runner = Runner(assembly, World(Mesh(), SoloCommunicator()), poison=True)
    return Engine(assembly, runner), runner


def asked(engine):
    params, said, cached = SamplingParams(max_tokens=20, ignore_eos=True), [], 0
    assert engine.submit(Submit(rid="r", prompt=PROMPT, params=params, seed=0)) is None
    while engine.has_work:
        for message in engine.step():
            said += message.tokens
            cached = message.cached_tokens
    return said, cached


def test_an_answer_over_pages_of_another_engine_is_the_same(tiny):
    (first, one), (second, two) = made(tiny), made(tiny)
    net: dict = {}
    here, there = HostTransfer("here", b"root", net), HostTransfer("there", b"root", net)
    here.register(two.caches, two.num_pages)
    there.register(one.caches, one.num_pages)
    here.attach(there.describe())
    wanted, _ = asked(first)
    own, other = second.scheduler.holdings.groups[0], first.scheduler.holdings.groups[0]
    remote = other.prefix.find(PROMPT).pages
    local = own.pool.alloc(len(remote))
    ticket = here.read("there", local, remote, "r")
    assert here.poll() == ([ticket], [])
    own.prefix.lock(root := own.prefix.root())
    path, twins = own.prefix.extend(root, PROMPT[: 16 * len(local)], local)
    own.prefix.unlock(path.node)
    assert twins == [] and asked(second) == (wanted, 64)
    assert own.pool.num_free + own.num_cached == own.pool.num_pages, "free = total − tree"
    first.close()
    second.close()
