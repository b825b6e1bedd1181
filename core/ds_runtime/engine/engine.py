"""Scheduler and runner together: requests in, messages out, one step at a time.

Used in process by the offline API and, through sockets, by `engine/process/loop.py`.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from ds_runtime.assembly.crossing import Crossing
from ds_runtime.assembly.estimate import absorbing_of
from ds_runtime.assembly.result import Assembly
from ds_runtime.checkpoint.base import part_of
from ds_runtime.checkpoint.eos import eos_ids
from ds_runtime.common.patience import PARTING
from ds_runtime.config import EngineConfig
from ds_runtime.config.paths import user_path
from ds_runtime.description.adapter import check_name
from ds_runtime.description.config import ModelConfig
from ds_runtime.engine.device.runner import Runner
from ds_runtime.engine.device.waits import EVERY
from ds_runtime.engine.messages import Failed, Stats, Submit, Tokens
from ds_runtime.engine.observers import Observers
from ds_runtime.engine.process.failure import bounded, during
from ds_runtime.engine.schedule.adapters import Adapters
from ds_runtime.engine.schedule.limits import SchedulerLimits
from ds_runtime.engine.schedule.scheduler import Scheduler
from ds_runtime.engine.speculate.draft_length import Pace
from ds_runtime.engine.step.halves import rows_of
from ds_runtime.engine.step.plan import PutAdapter, StepPlan
from ds_runtime.engine.step.result import Handle
from ds_runtime.errors import CheckpointError, ConfigError, QueueFullError, RequestError
from ds_runtime.grammar.guide import Guide
from ds_runtime.grammar.library import Grammars, PendingGrammar
from ds_runtime.kv.budget import KvMemory
from ds_runtime.kv.keys import Origin
from ds_runtime.kv.pages import PagePool
from ds_runtime.kv.prefix import PrefixCache, Realm
from ds_runtime.kv.rank_pages import Pages
from ds_runtime.kv.snapshots import Snapshots
from ds_runtime.kv.tiers.disks import Disks, disks_of
from ds_runtime.kv.tiers.host import HostTier, own_root
from ds_runtime.kv.tiers.room import HostRoom
from ds_runtime.kv.tiers.roots import SharedRoots
from ds_runtime.parallel.link.leader import Leader
from ds_runtime.parallel.skew import Skew
from ds_runtime.platform.compilations import counted, num_compiled

_COMPILE_WAIT = 0.002  # seconds that an idle step waits for a grammar
_DISK_WAIT = 0.002  # and for the disk
_DISK_IDLE = 0.02  # where there is no work at all
_MASK_WAIT = 0.002  # and for a mask


class Engine:
    """Rank 0's engine. `leader` reaches the other ranks, if there are any.

    Where the device computes in parallel with the host, a step is scheduled and launched before the
    results of the one before are awaited. What those change (an end, an abort) is seen a step late:
    the scheduler drops what a request got beyond its end.
    """

    def __init__(self, assembly: Assembly, runner: Runner, leader: Leader | None = None) -> None:
        config = assembly.config
        self.assembly = assembly
        self.runner = runner
        self.leader = leader
        self.settled: Callable[[], object] | None = None  # undoes `garbage.settle`, once
        limits = SchedulerLimits(
            context_length=runner.context_length,
            vocab_size=assembly.model.vocab_size,
            page_size=config.page_size,
            max_running=config.max_running_requests,
            max_step_tokens=config.max_step_tokens,
            prefill_chunk=config.chunked_prefill_size,
            queue_limit=config.max_queued_requests,
            policy=config.policy,
            eos=eos_tokens(assembly.folder, assembly.model),
            drafts=runner.width - 1,
            draft_room=runner.speculation.room if runner.speculation else 0,
            pace=Pace(runner.speculation) if runner.speculation else None,
            max_itl=(config.max_itl or 0.0) / 1000,
            prefill_sizes=runner.parts.exchange.sizes_of_steps(runner.programs.prefill_sizes),
            absorbing=absorbing_of(assembly),
        )
        self._grammars = Grammars(assembly.folder, assembly.model.vocab_size, limits.eos)
        self._compiling: list[tuple[Submit, PendingGrammar]] = []
        self.adapters = Adapters(assembly.lora, assembly.stamps)
        root: Callable[[Realm], bytes] = own_root
        if config.disk_cache is not None:
            root = SharedRoots(Origin.of(assembly), self.adapters.files)
        groups = range(runner.parts.exchange.groups)
        pools = [_pages(config, runner.memory, root) for _ in groups]
        self._tiers = [pages.below for pages in pools if pages.below is not None]
        self.disk = self._disks(config, runner)
        for tier in self._tiers:
            tier.pace = runner.pace
        self.scheduler = Scheduler(limits, pools)
        self._observers = Observers(assembly)
        self._launched: deque[_Launched] = deque()  # results not collected yet
        self._since: float | None = None  # the last result came, and there was work ever since
        overlaps = assembly.platform.asynchronous and not config.disable_overlap_schedule
        self._ahead = int(overlaps)  # steps launched before the oldest is collected
        self._step_seconds = self._wire_bytes = 0.0
        self._skew = Skew(runner.comm.size)
        self._sums, self._sum_bytes = Counter[str](), defaultdict[str, float](float)

    def _disks(self, config: EngineConfig, runner: Runner) -> Disks | None:
        """Where pages outlive the process."""
        if config.disk_cache is None or runner.below is None:
            return None
        link = None if self.leader is None else (self.leader.send, self.leader.told)
        made = disks_of(config, self._tiers, runner.below, link)
        if runner.pace is not None:
            runner.pace = runner.pace.with_disk(made.seconds(runner.below.page_bytes))
        return made

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self.scheduler.has_work or bool(self._compiling)

    def prepare(self) -> bool:
        """While there is no work: do a little of what later steps would have to wait for; whether
        there is more of it."""
        lags = self.disk is not None and self.disk.lags
        if self.disk is not None and lags:
            self.disk.go_on(_DISK_IDLE)  # which may hang: the rest goes on
        if self.disk is not None and self._settle(self.disk):
            return True
        return self.runner.programs.capture_one() or lags

    def submit(self, message: Submit) -> Failed | None:
        """Queue one choice, or say why not. With rules for its output it waits for their grammar;
        what is wrong with those comes out of a step.
        """
        if (rules := message.params.rules) is None:
            return self._queue(message, None)
        limit = self.scheduler.limits.queue_limit
        if len(self._compiling) + len(self.scheduler.waiting) >= limit:
            said = f"{limit} requests are waiting (--max-queued-requests): try again later"
            return Failed(message.rid, "queue_full", said)
        try:
            asked = self._grammars.ask(rules, message.client, message.salt)
            self._compiling.append((message, asked))
        except QueueFullError as e:
            return Failed(message.rid, "queue_full", str(e))
        return None

    def _queue(self, message: Submit, guide: Guide | None) -> Failed | None:
        try:
            adapter = self.adapters.find(message.adapter) if message.adapter else None
            self.scheduler.submit(message, guide, adapter)
        except QueueFullError as e:
            return Failed(message.rid, "queue_full", str(e))
        except RequestError as e:
            return Failed(message.rid, "invalid", e.said, e.param)
        return None

    def abort(self, rids: Iterable[str]) -> None:
        """Forget requests at once; unknown ids are ignored."""
        rids = set(rids)
        for message, asked in self._compiling:
            if message.rid in rids:
                self._grammars.leave(asked)
        self._compiling = [pair for pair in self._compiling if pair[0].rid not in rids]
        self.scheduler.abort(rids)

    def load_adapter(self, name: str, folder: str) -> None:
        """Load an adapter; requests under way continue. RequestError says why it cannot be."""
        try:
            check_name(name)
        except ConfigError as e:
            raise RequestError(str(e), "lora_name") from e
        try:
            held = self.adapters.place(name, user_path(folder, "lora_path").absolute())
            message = PutAdapter(held.slot, str(held.folder))
            if self.leader is not None:
                self.leader.send(message)
            self.runner.put_adapter(message)
        except (ConfigError, CheckpointError) as e:
            raise RequestError(str(e), "lora_path") from e
        self.adapters.add(held)

    def unload_adapter(self, name: str) -> None:
        """Free an adapter's place. RequestError if it is not loaded, or requests use it."""
        held = self.adapters.find(name)
        waiting = sum(message.adapter == name for message, _ in self._compiling)
        if users := self.scheduler.uses(held) + waiting:
            raise RequestError(
                f"adapter {name!r} is in use by {users} requests: wait until they end, or abort "
                "them",
                "lora_name",
            )
        self.adapters.remove(held)
        self.scheduler.holdings.forget(held.key)

    def flush(self) -> int:
        """Empty the prefix cache; returns the pages freed."""
        return self.scheduler.flush()

    def step(self) -> list[Tokens | Failed]:
        """Schedule, launch, collect; new tokens of every request that got some."""
        start = time.perf_counter()
        messages = self._compiled() if self._compiling else []
        messages += self.scheduler.followed()
        while self._launched and self.scheduler.awaits_token:
            messages += self._collect()
        plan = self.scheduler.schedule()
        if plan is not None:
            if self.leader is not None:
                self.leader.send(plan)
                self._count_received(plan)
            compiled, begin = num_compiled(), time.perf_counter()
            self._launched.append(_Launched(plan, self.runner.launch(plan), begin, compiled))
            if plan.step % EVERY == 0:
                self._hear_waits()
        if self.disk is not None:
            waits = plan is None and not self._launched
            self.disk.poll(idle=waits, seconds=_DISK_WAIT if waits else 0.0)
        stepped = bool(self._launched) and (plan is None or len(self._launched) > self._ahead)
        if stepped:
            messages += self._collect()
        elif plan is None:
            messages += self.scheduler.followed(_MASK_WAIT)
        if not self._launched and (plan is None or not self.has_work):
            self._since = None
            if self.disk is not None and not self.scheduler.has_work:
                self._rest(self.disk)
        self._step_seconds += time.perf_counter() - start
        if stepped and self._observers.seen:
            self._observers.tell(self.stats, messages)
        return messages

    def _rest(self, disk: Disks) -> None:
        """Nothing runs: what is noted goes to host memory, and from there to the disk, now."""
        plan = StepPlan(step=0, works=[])
        self.scheduler.holdings.drain(plan)
        if plan.saves or plan.loads or plan.copies:
            if self.leader is not None:
                self.leader.send(plan)
            self.runner.copy(plan)
        disk.poll(idle=True)

    def _settle(self, disk: Disks) -> bool:
        """Nothing runs: what only the device has goes to the disk, as much as may be on its way
        there; whether there was any."""
        found = sum(tier.settle() for tier in self._tiers)
        if found:
            self._rest(disk)
        return found > 0

    def _count_received(self, plan: StepPlan) -> None:
        """What comes from other ranks in a step."""
        groups = [0] * self.assembly.config.attn_dp
        for work in plan.works:
            groups[work.group] += work.length
        wanted = sum(work.logit_rows for work in plan.works)
        layers, most = self.assembly.model.layers, max(groups)
        if not most:
            return
        own = self.assembly.halves
        halves = () if own is None else rows_of(plan.works, own)
        self._wire_bytes += self._crossing.received(groups, wanted, layers, halves)
        whole = () if halves else (self._crossing.summed(most, layers),)
        kinds = (*whole, *self._crossing.overlapped(halves, layers))
        for kind, count, nbytes in kinds:
            if count:
                self._sums[kind] += count
                self._sum_bytes[kind] += nbytes

    def _hear_waits(self) -> None:
        """What ranks tell of measured steps."""
        if self.leader is not None:
            own = [(0, told) for told in self.runner.waits.take()]
            for rank, told in [*own, *self.leader.waited()]:
                self._skew.note(rank, told.step, told.seconds)

    @cached_property
    def _crossing(self) -> Crossing:
        return Crossing.of(self.assembly)

    def _collect(self) -> list[Tokens | Failed]:
        step = self._launched.popleft()
        result = self.runner.collect(step.handle)
        now, begin = time.perf_counter(), step.begin if self._since is None else self._since
        self._since = now
        if (pace := self.scheduler.limits.pace) is not None:
            pace.note(step.plan, result, now)
        # A step that compiled says nothing of the next.
        seconds = now - begin if num_compiled() == step.compiled else None
        return self.scheduler.update(step.plan, result, seconds)

    def _compiled(self) -> list[Tokens | Failed]:
        """Queue what has its grammar; with nothing else to do, wait a little for the next."""
        if not self.scheduler.has_work:
            wait([asked for _, asked in self._compiling], _COMPILE_WAIT, FIRST_COMPLETED)
        ready = [pair for pair in self._compiling if pair[1].done()]
        self._compiling = [pair for pair in self._compiling if not pair[1].done()]
        messages = list[Tokens | Failed]()
        for message, asked in ready:
            self._grammars.leave(asked)
            rules = message.params.rules
            assert rules is not None
            error = asked.exception()
            if error is None:
                failed = self._queue(message, self._grammars.guide(rules, asked.result()))
            elif isinstance(error, RequestError):
                failed = Failed(message.rid, "invalid", error.said, error.param)
            else:
                said = f" cannot be compiled: {type(error).__name__}: {error}"
                refused = RequestError.of(rules.param, said)
                failed = Failed(message.rid, "invalid", refused.said, rules.param)
            if failed is not None:
                messages.append(failed)
        return messages

    def stats(self) -> Stats:
        """Counters since start and gauges now."""
        stats = self.scheduler.stats()
        stats.step_seconds, stats.wire_bytes = self._step_seconds, self._wire_bytes
        stats.sums, stats.sum_bytes = dict(self._sums), dict(self._sum_bytes)
        self._hear_waits()
        stats.skew_steps, stats.skew_seconds = self._skew.steps, self._skew.seconds
        stats.rank_late = dict(self._skew.late) if self._skew.steps else {}
        if (below := self.runner.below) is not None:
            below.look()
            saved, loaded = below.saved, below.loaded
            stats.host_saved_bytes, stats.host_save_seconds = saved.nbytes, saved.seconds
            stats.host_loaded_bytes, stats.host_load_seconds = loaded.nbytes, loaded.seconds
        if (disk := self.disk) is not None:
            stats.disk_written_bytes, stats.disk_read_bytes = disk.bytes_written, disk.bytes_read
            stats.disk_stopped = int(bool(disk.stopped))
        if (counts := self.runner.model.counts) is not None:
            stats.expert_tokens = counts.read(now=not self.has_work)
        stats.waiting += len(self._compiling)
        stats.rules_waiting = self._grammars.waiting
        stats.compilations = {" ".join(key): count for key, count in counted().items()}
        return stats

    def close(self) -> None:
        """Let the other ranks go and leave the group."""
        if self.settled is not None:
            self.settled()
        self._grammars.close()
        self.scheduler.close()
        if (disk := self.disk) is not None:
            disk.close(lambda: self._settle(disk), lambda: sum(t.unsettled for t in self._tiers))
        if self.leader is not None:
            with during("while it closed"):
                self.leader.leave()
                self.runner.close()
                self.leader.close()

    def part(self) -> None:
        """Close where the other ranks have been ended."""
        if self.settled is not None:
            self.settled()
        self._grammars.close()
        self.scheduler.close()
        if self.leader is not None:
            self.leader.part()
            bounded(partial(self.runner.close, alone=True), PARTING)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step under way: when its launch began, and how many kernels had been compiled by then."""

    plan: StepPlan
    handle: Handle
    begin: float
    compiled: int


def _pages(config: EngineConfig, memory: KvMemory, root: Callable[[Realm], bytes]) -> Pages:
    """What one rank starts with, or all of them together."""
    size, marks, below = config.page_size, None, None
    if config.disable_radix_cache:
        return Pages(PagePool(memory.pages), None, size)
    if memory.states:
        marks = Snapshots(size, config.max_running_requests, memory.snapshots)
    if config.enable_hierarchical_cache:
        room = HostRoom.of(config, memory)
        below = HostTier(room.pages, room.states, config.hicache_write_policy, root, marks)
    return Pages(PagePool(memory.pages), PrefixCache(size, marks, below), size, marks, below)


def eos_tokens(folder: Path, model: ModelConfig) -> tuple[int, ...]:
    """The ids that end a text: generation_config.json's and config.json's together."""
    ids = dict.fromkeys([*eos_ids(part_of(folder, "generation_config.json")), *model.eos_tokens])
    return tuple(i for i in ids if 0 <= i < model.vocab_size)
