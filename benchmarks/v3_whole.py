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
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from device_decode import value

from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.crossing import Crossing
from ds_runtime.assembly.estimate import needed_bytes
from ds_runtime.assembly.result import Assembly
from ds_runtime.assembly.room import reserve
from ds_runtime.config import EngineConfig
from ds_runtime.kv.budget import KvMemory, Room, kv_memory
from ds_runtime_bench.engine.one_batch import random_prompts
from ds_runtime_bench.ops.step_work import step_bytes
from ds_runtime_bench.record import append, environment
from ds_runtime_bench.shapes import config_of

# By model: the shape that has its widths, its layers, those that are dense, tokens of its prompts.
MODELS = {
    "v3": ("v3-slice", 61, 3, [512, 8192]),
    "v3.2": ("v32-slice", 61, 3, [65536]),
    "tiny-v3": ("tiny-v3", 3, 1, [64]),
    "tiny-v32": ("tiny-v32", 3, 1, [64]),
}
ARMS = ("tp", "ep", "tp-drafts", "ep-drafts")
LARGEST, MOST = "largest", 4096  # requests at once
COUNTS = [*range(1, 8), *range(8, MOST + 1, 8)]
EXPERTS = ("experts", "experts_limited")  # whose rows are those of all ranks' sequences


def config_json(model: str, layers: int, dtype: str) -> dict[str, Any]:
    """A checkpoint's config.json, of its first layers and the one for drafts."""
    shape, _, dense, _ = MODELS[model]
    found = {**config_of(shape, dtype), "num_nextn_predict_layers": 1}
    return {**found, "num_hidden_layers": layers, "first_k_dense_replace": dense}


class Arm:
    """One engine. layers: of its model; settings: fields of EngineConfig but for `model`."""

    def __init__(self, args: argparse.Namespace, model: str, name: str, layers: int) -> None:
        self.args, self.model, self.name, self.layers = args, model, name, layers
        self.groups = args.ranks if name.startswith("ep") else 1
        self.prompts: list[int] = sorted(args.prompts or MODELS[model][3])
        self.drafts = int(name.endswith("drafts"))
        self.settings: dict[str, Any] = {
            "tp": args.ranks,
            "load_format": "dummy",
            "context_length": self.prompts[-1] + args.answer + 1 + self.drafts,
        }
        if self.groups > 1:
            self.settings |= {"enable_dp_attention": True, "ep": args.ranks}
        if self.drafts:
            self.settings |= {"speculative_algorithm": "NEXTN", "speculative_num_steps": 1}
        self.settings |= {key: value(text) for key, text in (s.split("=", 1) for s in args.set)}

    def decided(self, most: int, sizes: Sequence[int] = ()) -> Assembly:
        """By `plan`, for so many requests at once. sizes: the batches that are measured."""
        self.settings |= {
            "max_running_requests": most,
            "graph_sizes": tuple(sorted({-(-n // self.groups) for n in [*sizes, most]})),
        }
        with tempfile.TemporaryDirectory() as folder:
            write_config(Path(folder), self.model, self.layers, self.args.dtype)
            config = EngineConfig(model=folder, **self.settings)
            return assemble(config, {*self.settings}, device=self.args.device)

    def takes(self, prompt: int, batch: int, page: int) -> int:
        """Pages of the group that has the most requests of a batch."""
        each = -(-(prompt + self.args.answer + 1 + self.drafts) // page)
        return -(-batch // self.groups) * each

    def cases(self) -> tuple[list[tuple[int, int]], Assembly]:
        """(tokens of a prompt, requests) of all that has room, and what is decided for these."""
        counts = [int(b) for b in self.args.batches if b != LARGEST]
        found = self.decided(max([*counts, 1]))
        page, shortest = found.config.page_size, self.prompts[0]

        def full(count: int) -> bool:
            sizes = tuple(sorted({*(found.config.graph_sizes or ()), -(-count // self.groups)}))
            config = replace(found.config, max_running_requests=count, graph_sizes=sizes)
            pages = kv_pages(replace(found, config=config)).pages
            return pages < self.takes(shortest, count, page)

        most = COUNTS[max(1, bisect_left(COUNTS, True, key=full)) - 1]
        if LARGEST not in self.args.batches:
            most = max([n for n in counts if n <= most], default=1)
        found = self.decided(most, [n for n in counts if n < most])
        pages, asked, last = kv_pages(found).pages, [], []
        for prompt in self.prompts:
            fit = [n for n in COUNTS if n <= most and self.takes(prompt, n, page) <= pages]
            here = sorted({n for n in counts if fit and n <= fit[-1]})
            asked += [(prompt, n) for n in here]
            if LARGEST in self.args.batches and fit and fit[-1] not in here:
                last.append((prompt, fit[-1]))
        return asked + last, found

    def predicted(self) -> dict[str, Any]:
        """The line of this arm, without what is measured."""
        cases, found = self.cases()
        kv, kept, weights = kv_pages(found), reserve(found), needed_bytes(found)
        memory = {
            "weights_bytes": weights,
            "kv_bytes": kv.total,
            "kv_tokens": kv.pages * found.config.page_size * self.groups,
            "steps_bytes": kept.activations,
            "captured_bytes": kept.captured,
            "communication_bytes": kept.communication,
        }
        about = {"model": self.model, "arm": self.name, "layers": self.layers}
        return {
            "bench": "v3-whole",
            **about,
            "of_layers": MODELS[self.model][1],
            "dtype": self.args.dtype,
            "ranks": self.args.ranks,
            "device": found.device.name,
            "bandwidth": found.device.bandwidth,
            "link_bandwidth": found.device.link_bandwidth,
            "answer": self.args.answer,
            "settings": self.settings,
            "plan": found.plan.digest(),
            "predicted": memory,
            "measured": None,
            "cases": [
                {
                    "prompt": prompt,
                    "batch": batch,
                    "predicted": self.step(found, prompt, batch),
                    "measured": None,
                }
                for prompt, batch in cases
            ],
        }

    def step(self, found: Assembly, prompt: int, batch: int) -> dict[str, Any]:
        """What one rank must read and receive in a decode step, halfway through the answers."""
        context, own = prompt + self.args.answer // 2, -(-batch // self.groups)
        rows = batch * (1 + self.drafts)
        by_op = step_bytes(found, [own], context)[own]
        by_op |= step_bytes(found, [rows], context, EXPERTS)[rows]
        read = sum(work.nbytes for work in by_op.values())
        wire = Crossing.of(found).wire(found.model.layers, own * (1 + self.drafts))
        crosses = wire.row * own * (1 + self.drafts) * self.groups
        rate, link = found.device.bandwidth, found.device.link_bandwidth
        seconds = read / rate if rate else None
        return {
            "read_bytes": round(read),
            "wire_bytes": round(crosses),
            "read_ms": None if seconds is None else round(seconds * 1e3, 3),
            "wire_ms": round(crosses / link * 1e3, 3) if link else None,
            "tokens_per_s_limit": None if seconds is None else round(batch / seconds, 1),
        }


def write_config(folder: Path, model: str, layers: int, dtype: str) -> None:
    """A folder that `--load-format dummy` reads."""
    (folder / "config.json").write_text(json.dumps(config_json(model, layers, dtype)))


def kv_pages(found: Assembly) -> KvMemory:
    """What one rank's KV cache will hold on a device that nobody uses, as starting finds it."""
    memory = found.platform.memory()
    sharing = 1 if found.platform.own_memory else found.config.tp
    total, free = memory.total // sharing, memory.free // sharing
    context = found.config.context_length
    assert context is not None
    return kv_memory(found, Room(total, free, free - needed_bytes(found)), context)


def most_layers(args: argparse.Namespace, model: str) -> int:
    """As many as every arm has room for beside the KV cache of one whole context."""
    whole, dense = MODELS[model][1:3]

    def fits(layers: int) -> bool:
        for name in args.arms:
            arm = Arm(args, model, name, layers)
            found = arm.decided(1)
            if needed_bytes(found) > found.platform.memory().free:
                return False
            kv = kv_pages(found)
            if kv.pages * found.config.page_size < arm.settings["context_length"]:
                return False
        return True

    counts = list(range(whole, 0, -1))
    at = bisect_left(counts, True, key=fits)
    if at == len(counts) or counts[at] <= dense:
        raise SystemExit(
            f"--ranks {args.ranks}: no more than the {dense} dense layers of {model} fit: give more"
        )
    return counts[at]


def predictions(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A line per arm."""
    found = []
    for model in args.models:
        layers = args.layers or most_layers(args, model)
        found += [Arm(args, model, name, layers).predicted() for name in args.arms]
    return found


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
