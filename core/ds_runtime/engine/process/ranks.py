"""What every rank does at start: meet the others, join the group, load, warm up."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from functools import partial

import msgspec

from ds_runtime.assembly.plan import difference
from ds_runtime.assembly.result import Assembly
from ds_runtime.common import garbage
from ds_runtime.engine.device.runner import Runner
from ds_runtime.engine.process.entry import enter
from ds_runtime.engine.process.failure import during, leave
from ds_runtime.engine.process.rankspec import RankSpec
from ds_runtime.engine.step.plan import PutAdapter, StepPlan
from ds_runtime.errors import CheckpointError, UnsupportedError
from ds_runtime.kv.tiers.disks import check_folder, follower_of
from ds_runtime.kv.tiers.linked import DiskFollower, DiskJob
from ds_runtime.parallel.link.member import Member
from ds_runtime.parallel.world import World

_LOOK = 2  # milliseconds between two looks at files that rank 0 waits for


def join(spec: RankSpec, assembly: Assembly, met: Callable[[], str] | None = None) -> World:
    """Enter the groups of this rank. met: called when this rank can, before it waits for others;
    returns the address at which they meet.
    """
    config = assembly.config
    spec.check_device(assembly.platform)
    enter(assembly.platform, spec.local_rank, spec.local_ranks, config.threads)
    init_method = spec.meeting() if met is None else met()
    if spec.size == 1:
        return World.alone()
    comm = assembly.platform.communicator(spec.rank, spec.size, init_method, config.dist_timeout)
    if spec.mesh.attn_dp > 1 and not hasattr(comm, "reduce_scatter"):
        comm.close()
        raise UnsupportedError(
            f"--enable-dp-attention: the communicator of platform {assembly.platform.name} has no "
            "reduce_scatter, so ranks that divide sequences cannot share FFNs: leave it out"
        )
    if assembly.halves is not None and not hasattr(comm, "all_reduce_async"):
        comm.close()
        raise UnsupportedError(
            "--enable-two-batch-overlap: the communicator of platform "
            f"{assembly.platform.name} has no all_reduce_async, so no sum overlaps anything: leave "
            "it out"
        )
    try:
        shares = not config.disable_custom_all_reduce
        return World(spec.mesh, comm, config.batch_invariant, assembly.sums, shares)
    except BaseException:
        comm.close()
        raise


def start_runner(spec: RankSpec, assembly: Assembly, world: World) -> Runner:
    """Load, allocate and run one step."""
    check_folder(assembly.config)  # loading may take minutes
    with during("while it loaded the model"):
        runner = Runner(assembly, world, spec.local_rank, spec.local_ranks)
    with during("in its first steps"):
        runner.warm_up()
    return runner


def differences(here: str, there: str) -> list[str]:
    """How two plans differ in what ranks must have in common, as JSON."""
    try:
        mine, other = json.loads(here), json.loads(there)
    except ValueError:
        other = None
    if not isinstance(other, dict):
        return ["a plan that cannot be read"]
    if mine["digest"] == other.get("digest"):
        return []
    return difference(mine, other) or ["other notes, ranks or refusals"]


def follow(spec: RankSpec, member: Member) -> None:
    """The life of a rank other than 0: do what rank 0 does, until it says to leave."""
    with during("at the start"):
        assembly = spec.assemble()
        own, timeout = spec.hello(assembly), assembly.config.dist_timeout

    def met() -> str:
        meeting = member.greet(own, timeout)
        member.watch(partial(leave, spec))  # as long as this one may wait for others
        return meeting

    with during("at the start"):
        world = join(spec, assembly, met)
        assembly = assembly.summing(world.sums)
    runner = start_runner(spec, assembly, world)
    garbage.settle()
    disk: DiskFollower | None = None
    if assembly.config.disk_cache is not None and runner.below is not None:
        disk = follower_of(assembly.config, spec.rank, runner.below)
    decoder = msgspec.msgpack.Decoder(StepPlan | PutAdapter | DiskJob)
    while (data := member.receive(_LOOK if disk is not None and disk.busy else None)) != b"":
        if data is not None:
            _do(decoder.decode(data), runner, disk)
            for told in runner.waits.take():
                member.waited(told)
        for answer in () if disk is None else disk.answers():
            member.tell(answer)
    with during("while it closed"):
        if disk is not None:
            disk.close()
        runner.close()


def _do(
    message: StepPlan | PutAdapter | DiskJob, runner: Runner, disk: DiskFollower | None
) -> None:
    if isinstance(message, StepPlan):
        do = runner.launch if message.works else runner.copy
        do(message)
    elif isinstance(message, DiskJob):
        assert disk is not None, "rank 0 has a disk"
        disk.take(message)
    else:
        with contextlib.suppress(CheckpointError):  # rank 0 has it, too, and tells
            runner.put_adapter(message)
