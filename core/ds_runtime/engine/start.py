"""Rank 0's start: assemble, gather the other ranks, load, and build the engine."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from types import ModuleType

from ds_runtime.assemble import assemble
from ds_runtime.engine.banner import warnings
from ds_runtime.engine.engine import Engine
from ds_runtime.engine.launch import RankGroup
from ds_runtime.engine.ranks import Leader, join, start_runner
from ds_runtime.engine.rankspec import RankSpec


def start_engine(
    spec: RankSpec, plugins: Sequence[ModuleType] = (), others: RankGroup | None = None
) -> Engine:
    """An engine, loaded and warm, with the other ranks at work.

    `others`: their processes, to be started here once the settings are known to be good; None
    when somebody else starts and watches them, or when there are none. `plugins`: modules that
    `spec` names.
    """
    assembly = assemble(spec.config, spec.explicit, plugins) if plugins else spec.assemble()
    for line in warnings(assembly):
        print(line, file=sys.stderr, flush=True)
    with contextlib.ExitStack() as undo:
        leader = None
        if spec.size > 1:
            leader = Leader(spec.folder, spec.size)
            undo.callback(leader.close)
            if others is not None:
                others.start()
            check = (lambda: None) if others is None else others.poll
            leader.wait(assembly.config.dist_timeout, check)
        comm = join(spec, assembly)
        undo.callback(comm.close)
        engine = Engine(assembly, start_runner(spec, assembly, comm), leader)
        undo.pop_all()
    return engine
