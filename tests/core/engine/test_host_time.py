"""What a step costs on the host: 64 running requests, no device work."""

from __future__ import annotations

import statistics
import time

import torch

from ds_runtime.engine.messages import Submit
from ds_runtime.engine.schedule.limits import SchedulerLimits
from ds_runtime.engine.schedule.scheduler import Scheduler
from ds_runtime.engine.step.inputs import StepInputs, read_last_tokens
from ds_runtime.engine.step.plan import StepResult, WorkResult
from ds_runtime.engine.step.transfer import Upload
from ds_runtime.kv.pages import PagePool
from ds_runtime.kv.prefix import PrefixCache
from ds_runtime.kv.rank_pages import Pages
from ds_runtime.sampling_params import SamplingParams


class Stateless(Pages):
    """Of a model whose requests keep nothing beside pages."""

    def advance(self, request):
        raise AssertionError("no decode step asks whether a snapshot is due")

    def reach(self, request, length):
        assert not request.on_device, "no decode step asks where it has to end"
        return super().reach(request, length)


def test_scheduling_64_requests_is_cheap():
    limits = SchedulerLimits(context_length=4096, vocab_size=1000, page_size=16)
    scheduler = Scheduler(limits, [Stateless(PagePool(64 * 256), PrefixCache(16), 16)])
    for i in range(64):
        prompt = [(i * 7 + j) % 1000 for j in range(1000)]
        params = SamplingParams(max_tokens=200)
        scheduler.submit(Submit(rid=str(i), prompt=prompt, params=params, seed=0))
    last_tokens = torch.zeros(64, dtype=torch.int64)
    inputs, seconds = StepInputs(16, 256, 4096, last_tokens, 4096), []
    while scheduler.has_work:
        before = time.thread_time()
        plan = scheduler.schedule()
        sent = Upload(torch.device("cpu"))
        added = inputs.add(plan.works, sent)
        sent.send()
        batch = added.batch(sent, {})
        read_last_tokens(batch, last_tokens, batch.num_decode)
        works = [WorkResult(rid=w.rid, tokens=[7] * w.draws) for w in plan.works]
        scheduler.update(plan, StepResult(step=plan.step, works=works))
        if batch.num_decode == 64:
            seconds.append(time.thread_time() - before)
    assert len(seconds) > 100
    # 0.28 ms on two shared cores, of the 0.5 ms that a whole step may take; others may be slower.
    assert statistics.median(seconds) < 1e-3
