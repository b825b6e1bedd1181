"""A real runner over a model that is told to keep a state, too: its blocks, copies and memory.

The state is a window of the last ids, which the test writes and reads around the model's forward.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.result import Assembly
from ds_runtime.config import EngineConfig, with_changes
from ds_runtime.engine.device.runner import Runner
from ds_runtime.engine.engine import Engine
from ds_runtime.engine.messages import Submit
from ds_runtime.engine.step.plan import RowInit, StepPlan, Work
from ds_runtime.ops.contracts.attention.absorbing import Absorbing
from ds_runtime.ops.contracts.caches import LaidGroup, StateGroup
from ds_runtime.ops.reference.attention.cache import allocate_latent_pages
from ds_runtime.ops.reference.layouts import LATENT_PAGES
from ds_runtime.parallel.group import SoloCommunicator
from ds_runtime.parallel.mesh import Mesh
from ds_runtime.parallel.world import World
from ds_runtime.sampling_params import SamplingParams

WINDOW = 16
SETTINGS = {
    "platform": "cpu",
    "dtype": "float32",
    "kv_memory": 2_000_000,
    "threads": 1,
    "max_running_requests": 4,
    "chunked_prefill_size": 24,
}
own_caches = Assembly.caches.func


def with_window(assembly):
    """The groups of the model, and the window."""
    facts = assembly.binding.base
    group = StateGroup("near", (0,), rows=WINDOW)
    return *own_caches(assembly), LaidGroup(group, LATENT_PAGES, group.within(facts))


@pytest.fixture
def make(tiny, monkeypatch):
    def made(stateful=True, snapshots=None, **settings):
        if stateful:  # no model with states absorbs chunks
            monkeypatch.setattr(Absorbing, "of", lambda *_: None)
        monkeypatch.setattr(Assembly, "caches", property(with_window if stateful else own_caches))
        config = EngineConfig(model=str(tiny), **{**SETTINGS, **settings})
        assembly = assemble(config, SETTINGS)
        counted = with_changes(assembly.config, {"state_snapshots": snapshots})
        assembly = replace(assembly, config=counted)
        runner = Runner(assembly, World(Mesh(), SoloCommunicator()), poison=True)
        runner.warm_up()
        return Engine(assembly, runner), runner

    return made


def asked(engine, prompt):
    """Its answer, and how many tokens were cached."""
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    assert engine.submit(Submit(rid="r", prompt=prompt, params=params, seed=0)) is None
    said, cached = [], 0
    while engine.has_work:
        for message in engine.step():
            said += message.tokens
            cached = message.cached_tokens
    return said, cached


class Watch:
    """Around `forward`: writes ids to the blocks, and reads what stands in front of a step."""

    def __init__(self, runner) -> None:
        self.forward, self.read = runner.model.forward, []
        runner.model.forward = self

    def __call__(self, batch, caches, every=False):
        near, first = caches.of("near", 0), 0
        lens = [1] * batch.num_decode + list(batch.prefill.q_segs.lens if batch.prefill else ())
        for block, length in zip(batch.blocks.tolist(), lens, strict=True):
            rows = slice(first, first := first + length)
            start = int(batch.positions[rows][0])
            before = range(max(0, start - WINDOW), start)
            self.read.append((start, [int(near[block, p % WINDOW, 0]) for p in before]))
            for place, token in zip(batch.positions[rows], batch.input_ids[rows], strict=True):
                near[block, int(place) % WINDOW, 0] = token
        return self.forward(batch, caches, every)


def test_a_window_is_that_of_the_sequence_at_every_step(make):
    """Also where a request goes on from what another one has left."""
    engine, runner = make(disable_graph=True)
    watch, start = Watch(runner), [n * 5 % 97 + 3 for n in range(70)]
    first, _ = asked(engine, start)
    for prompt, known in ((start, 64), ([*start, *first, 8, 9], 80)):
        watch.read.clear()
        said, cached = asked(engine, prompt)
        assert cached == known == watch.read[0][0]
        sequence = prompt + said
        for at, found in watch.read:
            assert found == sequence[max(0, at - WINDOW) : at], f"in front of {at}"
    engine.close()


@pytest.mark.parametrize("graphs", [True, False])
def test_answers_are_those_without_a_state(make, graphs):
    """Steps are cut elsewhere, and prompts go on from snapshots alone."""
    prompts = [[5] * 9, list(range(3, 73)), [*range(3, 60), 7, 7]]
    plain, _ = make(stateful=False, disable_graph=not graphs)
    wanted = [asked(plain, p)[0] for p in prompts]
    plain.close()
    engine, _ = make(disable_graph=not graphs)
    assert [asked(engine, p)[0] for p in prompts] == wanted
    engine.close()


@pytest.mark.parametrize("asked_for", [None, 0, 3])
def test_blocks_are_those_of_rows_a_spare_one_and_snapshots(make, asked_for):
    engine, runner = make(snapshots=asked_for)
    memory, sizes = runner.memory, runner.assembly.cache_sizes
    near = runner.caches.of("near", 0)
    assert near.shape[:2] == (4 + 1 + memory.snapshots, WINDOW) and near.nbytes == (
        memory.states * sizes.state
    )
    if asked_for is None:
        share = 0.15 * memory.total
        assert memory.snapshots * sizes.state <= share < (memory.snapshots + 2) * sizes.state
    else:
        assert memory.snapshots == asked_for
    assert memory.total <= 2_000_000 < memory.total + sizes.page
    prompt = list(range(3, 43))
    assert [asked(engine, prompt)[1] for _ in range(2)] == [0, 0 if asked_for == 0 else 32]
    engine.close()


@pytest.mark.parametrize("graphs", [True, False])
def test_states_are_allocated_once(make, monkeypatch, graphs):
    """Warm-up and rehearsal run over the blocks of requests that are not there yet."""
    made = []

    def allocate_counted(blocks, facts, device):
        made.append(blocks)
        return allocate_latent_pages(blocks, facts, device)

    monkeypatch.setattr(__name__ + ".COUNTED", allocate_counted, raising=False)
    layout = replace(LATENT_PAGES, allocate=f"{__name__}:COUNTED")
    monkeypatch.setattr(f"{__name__}.LATENT_PAGES", layout)
    engine, runner = make(disable_graph=not graphs)
    assert made == [runner.memory.states]
    assert asked(engine, [5] * 40)[0]
    engine.close()


def test_copies_run_in_front_of_a_step(make):
    engine, runner = make(disable_graph=True)
    near = runner.caches.of("near", 0)
    near[:] = torch.arange(near.shape[0])[:, None, None]
    init = RowInit(row=0, params=SamplingParams(max_tokens=1), seed=0, choice=0, prompt=[5])
    work = Work(rid="r", row=0, start=0, length=1, pages=[0], tokens=[5])
    copies = [(0, 2, 5), (0, 5, 3), (1, 0, 4)]  # the last is another rank's
    runner.collect(runner.launch(StepPlan(step=0, works=[work], init=[init], copies=copies)))
    assert near[:6, 0, 0].tolist() == [0, 1, 2, 2, 4, 2]
    engine.close()
