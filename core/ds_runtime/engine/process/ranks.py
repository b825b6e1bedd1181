"""What every rank does at start: join the group, compare plans, load, warm up.

Rank 0 sends step plans to the others over private sockets, because a rank that waits there may
idle for days, which a collective may not.
"""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from ds_runtime.assembly.plan import Plan, difference
from ds_runtime.assembly.result import Assembly
from ds_runtime.engine.device.runner import Runner
from ds_runtime.engine.process.failure import bounded, during
from ds_runtime.engine.process.rankspec import RankSpec
from ds_runtime.engine.process.transport import bind_pull, connect_push, ipc
from ds_runtime.engine.step.plan import PutAdapter, StepPlan
from ds_runtime.errors import CheckpointError, ConfigError, EngineDeadError, UnsupportedError
from ds_runtime.parallel.mesh import Mesh
from ds_runtime.parallel.world import World
from ds_runtime.platform.contract import Communicator

_LEAVE = b""
_PARTING = 2.0  # seconds for a communicator to close whose other ranks are gone


def join(spec: RankSpec, assembly: Assembly, met: Callable[[], None] = lambda: None) -> World:
    """Enter the groups of this rank. met: called when this rank can, before it waits for others."""
    config = assembly.config
    spec.check_device(assembly.platform)
    assembly.platform.local_rank = spec.local_rank
    assembly.platform.init_worker(spec.local_rank, spec.local_ranks, config.threads)
    met()
    if spec.size == 1:
        return World.alone()
    init_method = f"file://{spec.folder / 'rendezvous'}"
    comm = assembly.platform.communicator(spec.rank, spec.size, init_method, config.dist_timeout)
    if config.attn_dp > 1 and not hasattr(comm, "reduce_scatter"):
        comm.close()
        raise UnsupportedError(
            f"--enable-dp-attention: the communicator of platform {assembly.platform.name} has no "
            "reduce_scatter, so ranks that divide sequences cannot share FFNs: leave it out"
        )
    try:
        return World(Mesh.of(config), comm)
    except BaseException:
        comm.close()
        raise


def start_runner(
    spec: RankSpec, assembly: Assembly, world: World, *, poison: bool = False
) -> Runner:
    """Compare plans, load, allocate and run one step."""
    with during("while it loaded the model"):
        compare_plans(assembly.plan, world.everyone)
        runner = Runner(assembly, world, spec.local_rank, spec.local_ranks, poison=poison)
    with during("in its first steps"):
        runner.warm_up()
    gc.freeze()  # what is loaded stays: a collection that walks it takes a tenth of a second
    return runner


def compare_plans(plan: Plan, comm: Communicator) -> None:
    """Raise ConfigError, on every rank alike, listing how plans differ from rank 0's."""
    if comm.size == 1:
        return
    own = json.loads(json.dumps(plan.to_dict(), default=list))
    plans = comm.gather_objects(own)
    said = []
    for rank, other in enumerate(plans):
        if other["digest"] != plans[0]["digest"]:
            changes = difference(plans[0], other) or ["other notes, ranks or refusals"]
            said += [f"\n  rank {rank} (there) against rank 0 (here): {x}" for x in changes]
    if said:
        raise ConfigError(
            "the ranks decided differently, so they cannot work together; give every rank the "
            "same packages, devices and flags:" + "".join(said)
        )


class Leader:
    """Rank 0's end of the sockets to the other ranks."""

    def __init__(self, folder: Path, size: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = bind_pull(self._context, ipc(folder, "ranks"))
        self._peers = [connect_push(self._context, ipc(folder, f"rank{r}")) for r in range(1, size)]
        self._encoder = msgspec.msgpack.Encoder()

    def wait(self, timeout: float, check: Callable[[], str | None]) -> None:
        """Until every rank has said hello. `check` gives the reason when one has died."""
        missing = {str(r) for r in range(1, len(self._peers) + 1)}
        deadline = time.monotonic() + timeout
        while missing:
            if self._inbox.poll(100):
                missing.discard(self._inbox.recv().decode())
            elif (reason := check()) is not None:
                raise EngineDeadError(reason)
            elif time.monotonic() > deadline:
                names = ", ".join(sorted(missing))
                raise EngineDeadError(
                    f"rank {names} did not start within {timeout:.0f} s (--dist-timeout)"
                )

    def send(self, plan: StepPlan | PutAdapter) -> None:
        """Have every other rank do the same."""
        if self._peers:
            data = self._encoder.encode(plan)
            for peer in self._peers:
                peer.send(data)

    def close(self) -> None:
        """Tell the others to leave."""
        for peer in self._peers:
            peer.send(_LEAVE)
        self._context.destroy(linger=200)

    def part(self, group: World | Runner | None) -> None:
        """Let go of others that have been ended: a communicator may wait for them for ever."""
        self._context.destroy(linger=0)
        if group is not None:
            bounded(group.close, _PARTING)


def follow(spec: RankSpec) -> None:
    """The life of a rank other than 0: do what rank 0 does, until it says to leave."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox = bind_pull(context, ipc(spec.folder, f"rank{spec.rank}"))
    with during("at the start"):
        assembly = spec.assemble()
        hello = connect_push(context, ipc(spec.folder, "ranks"))
        world = join(spec, assembly, lambda: hello.send(str(spec.rank).encode()))
    runner = start_runner(spec, assembly, world)
    decoder = msgspec.msgpack.Decoder(StepPlan | PutAdapter)
    while data := inbox.recv():
        message = decoder.decode(data)
        if isinstance(message, StepPlan):
            runner.launch(message)
        else:
            with contextlib.suppress(CheckpointError):  # rank 0 has it, too, and tells
                runner.put_adapter(message)
    with during("while it closed"):
        runner.close()
    context.destroy(linger=0)
