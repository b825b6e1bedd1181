"""What `plan` says beforehand of DeepSeek-V3, whole or as many of its layers as fit: the part of
`v3_whole.py` that needs no device.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
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
from ds_runtime_bench.ops.step_work import step_bytes
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
