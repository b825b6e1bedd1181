"""When each request is sent: as a rate says, whatever comes back, or as others end.

A load is of sessions. That of a single prompt is a request.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from ds_runtime_bench.serving.answer import Answer
from ds_runtime_bench.serving.prompts import Prompt
from ds_runtime_bench.serving.sessions import Session, follow

Send = Callable[[Prompt, float], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class Load:
    """`rate`: sessions per second, infinite for all at once; `concurrency`: at most this many run.

    Gaps of a finite rate are drawn from a gamma distribution of shape `burstiness`: 1 is a Poisson
    process, less comes in bursts, more is even.
    """

    rate: float = math.inf
    concurrency: int | None = None
    burstiness: float = 1.0
    seed: int = 0


async def run(load: Load, sessions: Sequence[Session], send: Send) -> list[Answer]:
    """Every turn's answer, in the sessions' order. A turn that fails ends its session."""
    if math.isinf(load.rate):
        found = await _closed(load.concurrency or len(sessions), sessions, send)
    else:
        found = await _open(load, sessions, send)
    for number, answers in enumerate(found):
        for turn, answer in enumerate(answers):
            answer.session, answer.turn = number, turn
    return [answer for answers in found for answer in answers]


async def _turns(session: Session, late: float, send: Send) -> list[Answer]:
    """One session's answers, turn by turn."""
    prompt = session.first
    answers = [await send(prompt, late)]
    for step in session.steps:
        if answers[-1].error is not None:
            break
        await asyncio.sleep(step.pause)
        prompt = follow(prompt, answers[-1], step)
        answers.append(await send(prompt, 0.0))
    return answers


async def _closed(workers: int, sessions: Sequence[Session], send: Send) -> list[list[Answer]]:
    answers: list[list[Answer]] = [[] for _ in sessions]
    left = iter(enumerate(sessions))

    async def work() -> None:
        for index, session in left:
            answers[index] = await _turns(session, 0.0, send)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(workers, len(sessions))):
            group.create_task(work())
    return answers


async def _open(load: Load, sessions: Sequence[Session], send: Send) -> list[list[Answer]]:
    slots = asyncio.Semaphore(load.concurrency or len(sessions))
    begin = time.perf_counter()

    async def one(session: Session, due: float) -> list[Answer]:
        async with slots:
            return await _turns(session, time.perf_counter() - due, send)

    async with asyncio.TaskGroup() as group:
        tasks = []
        for session, offset in zip(sessions, arrivals(load), strict=False):
            due = begin + offset
            await asyncio.sleep(due - time.perf_counter())
            tasks.append(group.create_task(one(session, due)))
    return [task.result() for task in tasks]


def arrivals(load: Load) -> Iterator[float]:
    """Seconds after the beginning at which sessions are due, without end."""
    draw, at = random.Random(load.seed), 0.0
    while True:
        yield at
        at += draw.gammavariate(load.burstiness, 1 / (load.rate * load.burstiness))
