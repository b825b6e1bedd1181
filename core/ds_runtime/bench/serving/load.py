"""When each request is sent: as a rate says, whatever comes back, or as others end."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from ds_runtime.bench.serving.client import Answer
from ds_runtime.bench.serving.prompts import Prompt

Send = Callable[[Prompt, float], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class Load:
    """`rate`: requests per second, infinite for all at once; `concurrency`: at most so many run.

    Gaps of a finite rate are drawn from a gamma distribution of shape `burstiness`: 1 is a Poisson
    process, less comes in bursts, more is even.
    """

    rate: float = math.inf
    concurrency: int | None = None
    burstiness: float = 1.0
    seed: int = 0


async def run(load: Load, prompts: Sequence[Prompt], send: Send) -> list[Answer]:
    """Every prompt's answer, in the prompts' order."""
    if math.isinf(load.rate):
        return await _closed(load.concurrency or len(prompts), prompts, send)
    return await _open(load, prompts, send)


async def _closed(workers: int, prompts: Sequence[Prompt], send: Send) -> list[Answer]:
    answers: list[Answer | None] = [None] * len(prompts)
    left = iter(enumerate(prompts))

    async def work() -> None:
        for index, prompt in left:
            answers[index] = await send(prompt, 0.0)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(workers, len(prompts))):
            group.create_task(work())
    return [a for a in answers if a is not None]


async def _open(load: Load, prompts: Sequence[Prompt], send: Send) -> list[Answer]:
    slots = asyncio.Semaphore(load.concurrency or len(prompts))
    begin = time.perf_counter()

    async def one(prompt: Prompt, due: float) -> Answer:
        async with slots:
            return await send(prompt, time.perf_counter() - due)

    async with asyncio.TaskGroup() as group:
        tasks = []
        for prompt, offset in zip(prompts, arrivals(load), strict=False):
            due = begin + offset
            await asyncio.sleep(due - time.perf_counter())
            tasks.append(group.create_task(one(prompt, due)))
    return [task.result() for task in tasks]


def arrivals(load: Load) -> Iterator[float]:
    """Seconds after the beginning at which requests are due, without end."""
    draw, at = random.Random(load.seed), 0.0
    while True:
        yield at
        at += draw.gammavariate(load.burstiness, 1 / (load.rate * load.burstiness))
