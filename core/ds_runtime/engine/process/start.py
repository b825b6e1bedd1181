"""Rank 0's start: assemble, gather the other ranks, load, and build the engine."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Protocol

from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.result import Assembly
from ds_runtime.common import garbage
from ds_runtime.common.patience import PARTING
from ds_runtime.engine.banner import warnings
from ds_runtime.engine.engine import Engine
from ds_runtime.engine.process.failure import bounded, described, during, leave
from ds_runtime.engine.process.ranks import differences, join, start_runner
from ds_runtime.engine.process.rankspec import RankSpec
from ds_runtime.parallel.link.leader import Leader
from ds_runtime.platform.compilations import serving


class OtherRanks(Protocol):
    """The processes of all ranks but this one."""

    def start(self) -> None:
        """Start them."""
        ...

    def poll(self) -> str | None:
        """Returns why one of them failed, or None."""
        ...

    def fail(self, error: BaseException) -> BaseException | None:
        """This rank has failed: end them. Returns their failure, if it was first."""
        ...


def start_engine(
    spec: RankSpec, plugins: Sequence[ModuleType] = (), others: OtherRanks | None = None
) -> Engine:
    """An engine, loaded and warm, with the other ranks at work.

    `others`: their processes, to be started here once the settings are known to be good; None
    when somebody else starts and watches them, or when there are none. `plugins`: modules that
    `spec` names.
    """
    serving(False)
    assembly = assemble(spec.config, spec.explicit, plugins) if plugins else spec.assemble()
    for line in warnings(assembly):
        print(line, file=sys.stderr, flush=True)
    leader, world = None, None
    try:
        with during("at the start"):
            if spec.size > 1:
                own = spec.hello(assembly)
                leader = Leader(spec.address, own, differences, spec.nodes, spec.keys)
            if others is not None:
                others.start()
            decided = assembly
            world = join(spec, decided, lambda: _meet(spec, leader, decided, others))
            assembly = decided.summing(world.sums)
        runner = start_runner(spec, assembly, world)
        with during("while it built the engine"):
            engine = Engine(assembly, runner, leader)
    except BaseException as e:
        if leader is not None:
            tell(leader, spec, e)
        if others is not None:  # else whoever watches this process ends the others
            others.fail(e)
            if leader is not None:
                leader.part()
            if world is not None:
                bounded(world.close, PARTING)
        raise
    garbage.settle()
    engine.settled = weakref.finalize(engine, garbage.unsettle)  # also of one that is only dropped
    engine.settled.atexit = False
    serving(True)
    return engine


def _meet(
    spec: RankSpec, leader: Leader | None, assembly: Assembly, others: OtherRanks | None
) -> str:
    meeting = spec.meeting()
    if leader is not None:
        if spec.nodes:
            print(
                f"ds-runtime: rank 0 waits at {leader.address} for the ranks of other nodes, which "
                f"then meet at {meeting}",
                file=sys.stderr,
                flush=True,
            )
        check = (lambda: None) if others is None else others.poll
        leader.wait(meeting, assembly.config.dist_timeout, check)
        leader.watch(partial(leave, spec))  # as long as one may wait for the others
    return meeting


def tell(leader: Leader, spec: RankSpec, error: BaseException) -> None:
    """Rank 0 has failed: the ranks of other nodes get to know why."""
    if spec.nodes:
        leader.fail(described(error, spec.rank))
