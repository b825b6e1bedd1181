"""Search of configurations for the Triton kernels on the accelerator that is here.

python benchmarks/triton_tune.py OUT [OP …]. Candidates are compiled by all cores first, without the
device; then each is checked against the first and timed in a capture over copies of its weights
that no cache holds. One JSON line per problem goes to OUT: every candidate with its microseconds.
`benchmarks/triton_choose.py` makes configuration files of them. The environment's WORKERS says how
many processes compile, SECONDS_EACH how long one problem may take, TOKENS which sizes of experts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from triton_problems import Call, Config, Problem, problems


class NoDevice:
    """What Triton asks of a driver when it only compiles."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def _compile(task: tuple[set[str], list[tuple[int, int]]]) -> int:
    """In a process of its own: compile candidates into Triton's cache."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(NoDevice(GPUTarget("cuda", 90, 32)))
    seen: set[str] = set()

    def getitem(self: Any, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            seen.add(self.run(*args, grid=grid, warmup=True, **kwargs).hash)

        return launch

    JITFunction.__getitem__ = getitem
    wanted, places = task
    every = list(problems(wanted))
    calls: dict[int, Call] = {}
    for number, candidate in places:
        problem = every[number]
        if number not in calls:
            calls.clear()
            calls[number] = problem.make("cpu")[0]
        config = problem.candidates[candidate]
        if "TORCH" in config:
            continue
        try:
            calls[number](config)
        except Exception as e:
            print("compile", problem.op, problem.shape, config, str(e)[-200:], flush=True)
    return len(seen)


def compile_all(wanted: set[str], workers: int) -> None:
    """Kernels are specialised by size and divisibility only: few problems cover them all."""
    every, places, known = list(problems(wanted)), [], set()
    for number, problem in enumerate(every):
        for candidate, config in enumerate(problem.candidates):
            key = (problem.op, problem.size == 1, problem.size, json.dumps(config))
            if problem.op in ("linear_fp8", "linear_dense", "mla_decode"):
                small = problem.size == 1
                key = (problem.op, small, problem.shape.split()[0] * (problem.op == "mla_decode"),
                       json.dumps(config))  # fmt: skip
            if key not in known:
                known.add(key)
                places.append((number, candidate))
    begin = time.time()
    tasks = [(wanted, places[i :: workers * 4]) for i in range(workers * 4)]
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        total = sum(pool.map(_compile, tasks))
    print(f"{len(places)} candidates, {total} kernels compiled in {time.time() - begin:.0f} s")


def measure(calls: list[Call], config: Config, runs: int = 8) -> float:
    """Microseconds per call: the median of replays of a capture of all copies."""
    for call in calls:
        call(config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call(config)
    graph.replay()
    times = []
    for _ in range(runs):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times)[runs // 2]


def search(problem: Problem, seconds: float) -> None:
    """Time every candidate; those that differ from the first are said and left out."""
    calls, first, begin = problem.make("cuda"), None, time.time()
    for config in problem.candidates:
        if time.time() - begin > seconds:
            print("out of time", problem.op, problem.shape, problem.size, len(problem.found))
            return
        try:
            out = calls[0](config).float()
            if first is None:
                first = out
            error = float((out - first).norm() / first.norm())
            if not error < 0.03:
                print("WRONG", problem.op, problem.shape, problem.size, config, error)
                continue
            problem.found.append((measure(calls, config), config))
        except Exception as e:
            if "CUDA error" in str(e):
                raise
            print("failed", problem.op, config, str(e)[-150:].replace("\n", " "))


def main() -> None:
    out, wanted = sys.argv[1], set(sys.argv[2:])
    workers = int(os.environ.get("WORKERS", os.cpu_count() or 1))
    compile_all(wanted, workers)
    if os.environ.get("COMPILE_ONLY"):
        return
    print(torch.cuda.get_device_name(), torch.__version__)
    with open(out, "a") as lines:
        for problem in problems(wanted):
            search(problem, float(os.environ.get("SECONDS_EACH", "8")))
            problem.found.sort(key=lambda pair: pair[0])
            if not problem.found:
                continue
            us, best = problem.found[0]
            rate = f"{problem.nbytes / us / 1e6:.2f} TB/s {problem.flops / us / 1e6:.0f} TF"
            print(f"{problem.op} {problem.shape} {problem.size}: {us:.1f} us {rate} {best}",
                  flush=True)  # fmt: skip
            row = {"op": problem.op, "shape": problem.shape, "size": problem.size,
                   "nbytes": problem.nbytes, "flops": problem.flops,
                   "found": problem.found}  # fmt: skip
            lines.write(json.dumps(row) + "\n")
            lines.flush()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
