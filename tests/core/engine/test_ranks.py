"""How the ranks of several engines on one machine are numbered, and what they write."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_runtime.assembly.assemble import assemble
from ds_runtime.config import EngineConfig
from ds_runtime.engine.device.runner import Runner
from ds_runtime.engine.process.launch import _events
from ds_runtime.engine.process.ranks import join
from ds_runtime.engine.process.rankspec import RankSpec
from ds_runtime.engine.step.plan import PutAdapter
from ds_runtime.errors import ConfigError, UnsupportedError
from ds_runtime.parallel.sums.halves import Halves
from ds_runtime.parallel.sums.kinds import LIBRARY_SUMS
from ds_runtime_kit.models.tiny import write_tiny


class Devices:
    """A platform with three devices, which notes what it is told."""

    def __init__(self):
        self.told = []

    def info(self, rank=0):
        if rank >= 3:
            raise RuntimeError(f"there is no device {rank}, only 0 to 2")

    def init_worker(self, rank, size, threads=None):
        assert self.local_rank == rank
        self.told.append((rank, size))

    def communicator(self, rank, size, init_method, timeout):
        return SimpleNamespace(rank=rank, size=size, where=init_method)


def specs(tp, dp):
    config = EngineConfig(tp=tp, dp=dp)
    return [
        RankSpec(config, (), (), Path(f"/f{replica}"), rank, replica)
        for replica in range(dp)
        for rank in range(tp)
    ]


def test_devices_are_numbered_through_and_groups_by_themselves():
    platform = Devices()
    assembly = SimpleNamespace(
        platform=platform, config=EngineConfig(tp=2), sums=LIBRARY_SUMS, halves=None
    )
    every = specs(tp=2, dp=2)
    joined = [join(spec, assembly) for spec in every[:3]]
    assert platform.told == [(0, 4), (1, 4), (2, 4)]
    joined = [world.everyone for world in joined]
    assert [(one.rank, one.size) for one in joined] == [(0, 2), (1, 2), (0, 2)]
    assert joined[0].where == joined[1].where != joined[2].where  # replicas meet nowhere
    with pytest.raises(ConfigError, match="--dp 2 --tp 2: 4 devices are needed, and number 3"):
        join(every[3], assembly)
    with pytest.raises(ConfigError, match=r"^--tp 4: 4 devices .* only 0 to 2; give less"):
        join(specs(tp=4, dp=1)[3], assembly)


def test_a_communicator_that_starts_no_sums_is_refused_where_they_would_overlap():
    closed = []

    class Old(Devices):
        name = "old"

        def communicator(self, *given):
            made = super().communicator(*given)
            made.close = lambda: closed.append(made)
            return made

    config = EngineConfig(tp=2, enable_two_batch_overlap=True)
    assembly = SimpleNamespace(
        platform=Old(), config=config, sums=LIBRARY_SUMS, halves=Halves.of(config, hybrid=False)
    )
    said = r"--enable-two-batch-overlap: .* platform old has no all_reduce_async.*leave it out"
    with pytest.raises(UnsupportedError, match=said):
        join(specs(tp=2, dp=1)[0], assembly)
    assert len(closed) == 1


@pytest.mark.parametrize("nodes", [1, 2])
def test_what_a_rank_says_of_weights_follows_them_where_nodes_have_their_own(tmp_path, nodes):
    """The same config.json, and trained anew; on one machine all ranks read the same files."""
    found = []
    for name, seed in (("own", 0), ("copy", 0), ("other", 1)):
        write_tiny(tmp_path / name, "v3", seed=seed)
        there = {"nnodes": 2, "dist_init_addr": "127.0.0.1:9"} if nodes == 2 else {}
        config = EngineConfig(model=str(tmp_path / name), tp=2, platform="cpu", **there)
        spec = RankSpec(config, (), (), tmp_path, 0)
        found.append(spec.hello(assemble(config, ("tp", "platform"))))
    own, copy, other = found
    assert own.model == copy.model == other.model
    assert own.weights == copy.weights and (own.weights != other.weights) is (nodes == 2)
    assert bool(own.weights) is (nodes == 2)


@pytest.mark.parametrize("alone", [False, True])
def test_a_group_is_left_behind_what_other_ranks_have_run(alone):
    """They have queued drafts that rank 0 has put off; where they have ended it queues none."""
    done: list[str] = []
    runner = object.__new__(Runner)
    runner._unfinished = SimpleNamespace(arriving=1), lambda: done.append("drafts")
    runner.rank = 0
    runner.programs = SimpleNamespace(forget=lambda: done.append("forgets"))
    runner.world = SimpleNamespace(close=lambda: done.append("leaves"))
    runner.close(alone)
    assert done == [*["drafts"] * (not alone), "forgets", "leaves"]


def test_a_traceback_is_one_event():
    text = """warning: first
Traceback (most recent call last):
  File "a.py", line 1, in b
    c()
ValueError: d

last"""
    events = list(_events(text.split("\n")))
    assert events == ["warning: first", text[15:-6], "last"]


def test_an_adapter_is_read_behind_what_other_ranks_have_run():
    """Rank 0 drafts later than others: reading is collective, and comes behind drafting for all."""
    done: list[str] = []
    runner = object.__new__(Runner)
    handle = SimpleNamespace(arriving=1)
    runner._unfinished = handle, lambda: done.append("drafts")
    runner.rank, runner.comm = 0, None
    lora = SimpleNamespace(read=lambda slot, folder, comm: done.append(f"reads {slot}"))
    runner.model = SimpleNamespace(lora=lora)
    runner.put_adapter(PutAdapter(3, "there"))
    assert done == ["drafts", "reads 3"] and runner._unfinished is None
