"""DeepSeek-V3 whole, or as many of its layers as fit: what `plan` predicts, and what is measured.

python benchmarks/v3_whole.py [--ranks N] [--models v3 v3.2] [--arms tp ep tp-drafts ep-drafts]
    [--layers N] [--prompts N ...] [--batches N ... largest] [--answer N] [--device X]
    [--predict | --predicted FILE] [--limit SECONDS] [--set NAME=VALUE ...] [--out FILE]

Random weights in FP8. `tp` divides every layer by --tp N; `ep` has --enable-dp-attention and --ep N
beside it; `-drafts` draft one token a step with the layer of the checkpoint that is made for it.
--predict writes one JSON line per arm: what a rank holds, how many tokens the KV cache holds, and
for every case what a decode step must read and receive. --predicted FILE measures what it has of
these models, arms and ranks, and writes the same lines with `measured` beside `predicted`; without
it both are made in one run. Every
arm is an engine in a process of its own, which --limit ends: cases that it had not measured are
null. A batch for which the plan finds no room is no case; `largest` is the largest with room.

Measured of an arm: `ready_s` since its process began, tokens of the KV cache, memory that each rank
has taken by then. Of a case: prompts come all at once and end with their first token, whose times
are `first_token_s` (median) and `last_first_token_s`; then they come again and find all but their
last page in the prefix cache, so that all decode together. `step_ms` is the median of the times
between such steps, `tokens_per_s` their tokens over their time, `tokens_a_step` those of one
request. `bytes_share` is the time that the device needs to read what a step must, by the bandwidth
that the plugin says, over `step_ms`. `batch` is less than the case's where the KV cache turned out
smaller than the plan says. Drafts of random weights are hardly ever right: with them
`step_ms` is what a cycle costs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from v3_predicted import ARMS, LARGEST, MODELS, predictions, write_config

from ds_runtime_bench.engine.one_batch import random_prompts
from ds_runtime_bench.record import append, environment


def used(ranks: int) -> list[int]:
    """Bytes that are taken on the device of every rank, as a process of its own finds them: what it
    takes itself is the same each time."""
    command = [sys.executable, __file__, "--look", "--ranks", str(ranks)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: list[int] = json.loads(done.stdout)
    return found


def look(ranks: int) -> list[int]:
    """That, in this process; nothing where ranks share the memory of the host."""
    from ds_runtime.plugins.manager import load_plugins
    from ds_runtime.plugins.select_platform import select_platform

    platform, _ = select_platform(load_plugins())
    if not platform.own_memory:
        return []
    every = [platform.memory(rank) for rank in range(ranks)]
    return [memory.total - memory.free for memory in every]


def resident(pids: Sequence[int]) -> list[int]:
    """Bytes of these processes in the host's memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    return [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page for pid in pids]


class Run:
    """One generate(): when its results came."""

    def __init__(self, llm: Any, prompts: Sequence[list[int]], tokens: int) -> None:
        from ds_runtime import SamplingParams

        self.first: dict[str, float] = {}
        self.ends = list[tuple[float, int]]()  # of steps in which all decode: seconds, tokens
        runner = llm._alive().runner
        collect, start = runner.collect, time.perf_counter()

        def timed(handle: Any) -> Any:
            result, now = collect(handle), time.perf_counter() - start
            works = handle.plan.works
            for work in result.works:
                if work.tokens:
                    self.first.setdefault(work.rid, now)
            if len(works) == len(prompts) and all(work.tokens is None for work in works):
                self.ends.append((now, sum(len(work.tokens) for work in result.works)))
            return result

        runner.collect = timed
        try:
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
            llm.generate(list(prompts), params)
        finally:
            del runner.collect


def measured(llm: Any, prompt: int, batch: int, answer: int) -> dict[str, Any]:
    """Figures of one case."""
    step, vocab = llm._alive().runner.config.max_step_tokens, llm.vocab_size
    llm.flush_cache()
    few = min(batch, step // prompt + 1)  # what steps of these sizes compile is not timed
    Run(llm, random_prompts(few, prompt, vocab, seed=1), 3)
    llm.flush_cache()
    prompts = random_prompts(batch, prompt, vocab, seed=2)
    first = sorted(Run(llm, prompts, 1).first.values())
    ends = Run(llm, prompts, answer).ends
    llm.flush_cache()
    found: dict[str, Any] = {
        "first_token_s": round(statistics.median(first), 4),
        "last_first_token_s": round(first[-1], 4),
        "prompt_tokens_per_s": round(batch * prompt / first[-1], 1),
        "steps": len(ends),
    }
    if len(ends) < 3:
        return {**found, "why": "hardly a step in which all requests decode"}
    spent, tokens = ends[-1][0] - ends[0][0], sum(count for _, count in ends[1:])
    return {
        **found,
        "step_ms": round(statistics.median(b[0] - a[0] for a, b in pairwise(ends)) * 1e3, 3),
        "tokens_per_s": round(tokens / spent, 1),
        "tokens_a_step": round(tokens / (len(ends) - 1) / batch, 3),
    }


def tell(row: dict[str, Any]) -> None:
    """Print a line, of which another process may read."""
    print(json.dumps(row), flush=True)


def run(line: dict[str, Any], began: float) -> None:
    """One arm, in this process: a line of the arm's figures, then one of each case."""
    from ds_runtime import LLM

    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), line["model"], line["layers"], line["dtype"])
        settings = dict(line["settings"], graph_sizes=tuple(line["settings"]["graph_sizes"]))
        with LLM(folder, **settings) as llm:
            ready = time.time() - began
            runner, groups = llm._alive().runner, llm._alive().assembly.mesh.attn_dp
            page, draft = runner.config.page_size, runner.draft
            drafting = 0 if draft is None else draft.packed_bytes
            taken = used(line["ranks"]) if runner.platform.own_memory else []
            tell(
                {
                    "device": llm._alive().assembly.device.name,
                    "ready_s": round(ready, 1),
                    "weights_bytes": runner.model.packed_bytes + drafting,
                    "kv_bytes": runner.memory.total,
                    "kv_tokens": runner.num_pages * page * groups,
                    "used": taken or resident([os.getpid(), *llm.pids]),
                }
            )
            for case in line["cases"]:
                prompt, answer = case["prompt"], line["answer"]
                each = -(-(prompt + answer + runner.width) // page)
                batch = min(case["batch"], runner.num_pages // each * groups)
                tell({"batch": batch, **measured(llm, prompt, batch, answer)})


def measure(line: dict[str, Any], idle: list[int], limit: float) -> int:
    """Fill in what is measured, in a process that is ended after `limit` seconds. Its status."""
    with tempfile.TemporaryDirectory() as folder:
        (given := Path(folder) / "line.json").write_text(json.dumps(line))
        command = [sys.executable, __file__, "--run", str(given), "--began", str(time.time())]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        over = threading.Timer(limit, os.killpg, (child.pid, signal.SIGKILL))
        over.start()
        try:
            assert child.stdout is not None
            told = [json.loads(text) for text in child.stdout if text.startswith("{")]
            status = child.wait()
        finally:
            over.cancel()
    if told:
        taken = told[0].pop("used")
        before = idle or [0] * len(taken)
        told[0]["memory_bytes"] = [b - a for a, b in zip(before, taken, strict=True)]
        line["measured"] = told[0]
    for case, figures in zip(line["cases"], told[1:], strict=False):
        read = case["predicted"]["read_ms"]
        if read is not None and "step_ms" in figures:
            figures["bytes_share"] = round(read / figures["step_ms"], 3)
        case["measured"] = figures
    if status:
        line["ended"] = f"after {limit:g} s" if status == -signal.SIGKILL else f"status {status}"
    return status


def parsed() -> argparse.Namespace:
    """Flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["v3", "v3.2"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--layers", type=int, help="(default: the most that fit, by the plan)")
    parser.add_argument("--dtype", choices=["fp8", "bfloat16"], default="fp8")
    parser.add_argument("--prompts", type=int, nargs="+", metavar="N", help="tokens of a prompt")
    parser.add_argument("--batches", nargs="+", default=["1", "32", "128", "512", LARGEST])
    parser.add_argument(
        "--answer", type=int, default=128, metavar="N", help="tokens (default: 128)"
    )
    parser.add_argument("--device", metavar="X", help="predict for a described device, like h200")
    parser.add_argument("--predict", action="store_true", help="measure nothing")
    parser.add_argument("--predicted", type=Path, metavar="FILE", help="of --predict")
    parser.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="of an arm")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path, help="add the lines to this file")
    parser.add_argument("--look", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parsed()
    if args.look:
        print(json.dumps(look(args.ranks)))
        return
    if args.run:
        run(json.loads(args.run.read_text()), args.began)
        return
    if args.device and not args.predict:
        raise SystemExit("--device describes one that is not here: give --predict beside it")
    lines = lines_of(args)
    of_this_run = {"command": " ".join(sys.argv), **environment()}
    idle = [] if args.predict else used(lines[0]["ranks"])
    failed = 0
    for line in lines:
        if not args.predict:
            failed |= int(measure(line, idle, args.limit) != 0)
        line |= of_this_run
        tell(line)
        if args.out:
            append(args.out, line)
    sys.exit(failed)


def lines_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Predictions. Nothing of this process may hold memory of a device that is measured."""
    if args.predicted:
        lines = [json.loads(text) for text in args.predicted.read_text().splitlines()]
        wanted = {"model": args.models, "arm": args.arms, "ranks": [args.ranks]}
        found = [line for line in lines if all(line[k] in among for k, among in wanted.items())]
        if not found:
            said = ", ".join(f"{key} {among}" for key, among in wanted.items())
            raise SystemExit(f"--predicted {args.predicted}: has no line of {said}")
        return found
    if args.predict:
        return predictions(args)
    command = [sys.executable, __file__, *sys.argv[1:], "--predict"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "predicted.jsonl"
        subprocess.run([*command, "--out", str(out)], check=True, stdout=subprocess.DEVNULL)
        return [json.loads(text) for text in out.read_text().splitlines()]


if __name__ == "__main__":
    main()
