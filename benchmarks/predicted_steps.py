"""Steps as `plan` predicts them, and how far off measured ones are.

python benchmarks/predicted_steps.py --costs FILE [--device NAME] [--without FEATURE ...]
    [--shapes v2-lite v3-slice] [--dtype fp8] [--requests 1 8 32 64 128 256 512] [--ranks 2]
    [--out FILE] [--against FILE ...] [--whole FILE ...]

Nothing runs on a device. The arms are those of `benchmarks/device_ranks.py`, whose lines --against
takes, and `one`, a single device. Requests have as many cached tokens as the steps that it times
have on average. A line has `predicted_ms` and, with --against, `measured_ms` and `off`, the share
by which the prediction is too high. `fits`: whether the KV cache holds all requests to the end.

--whole takes lines of `benchmarks/v3_whole.py`, and adds a line for each measured case but those
with drafts: its decode step, and `predicted_tokens_per_s` of its prompts, step by step. Prompts
that do not fill a step, and cached beginnings where attention is dense, are not predicted.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from v3_predicted import write_config

from ds_runtime.assembly import room
from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.result import Assembly
from ds_runtime.config import EngineConfig
from ds_runtime.measured.costs import Costs
from ds_runtime.predict import step as steps
from ds_runtime_bench.record import append
from ds_runtime_bench.shapes import config_of

LONGEST = 256 + 97  # tokens of a request at its end
CONTEXT = 256 + (33 + 97) // 2  # a prompt, and half of what is timed behind it
ARMS = ("one", "heads", "sequences", "experts")


def settings_of(arm: str, ranks: int, requests: list[int]) -> dict[str, Any]:
    """Of the engine of an arm, as device_ranks sets it."""
    found: dict[str, Any] = {"max_running_requests": max(requests), "context_length": 1024}
    count = 1 if arm == "one" else ranks
    found["graph_sizes"] = tuple(sorted({n for one in requests for n in (one, -(-one // count))}))
    if arm != "one":
        found["tp"] = ranks
    if arm in ("sequences", "experts"):
        found |= {"enable_dp_attention": True, "dp": ranks}
    if arm == "experts":
        found["ep"] = ranks
    return found


def assembled(folder: Path, shape: str, args: argparse.Namespace, arm: str) -> Assembly:
    """The assembly of an arm on the described device."""
    named = folder / shape
    named.mkdir(exist_ok=True)
    config = {**config_of(shape, args.dtype), "num_nextn_predict_layers": 0}
    (named / "config.json").write_text(json.dumps(config))
    settings = settings_of(arm, args.ranks, args.requests)
    settings |= {"model": str(named), "load_format": "dummy"}
    settings["kv_memory"] = 6 * 10**9
    return assemble(
        EngineConfig(**settings), set(settings), device=args.device, without=args.without
    )


def fits(assembly: Assembly, requests: int) -> bool:
    """Whether the KV cache holds all requests to the end; else a measured step is none of all."""
    tokens, page = room.cached_tokens(assembly), assembly.config.page_size
    return tokens is None or requests * -(-LONGEST // page) * page <= tokens


def measured(files: list[Path]) -> dict[tuple[str, str, str, int], float]:
    """Milliseconds of decode steps, by shape, dtype, arm and requests."""
    found = {}
    for file in files:
        for text in file.read_text().splitlines():
            line = json.loads(text) if text.startswith("{") else {}
            if line.get("bench") == "device-ranks" and line["figure"] == "step_ms":
                key = line["shape"], line["dtype"], line["arm"], line["requests"]
                found[key] = line["value"]
    return found


def lines(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A prediction per shape, arm and number of requests."""
    costs, known = Costs.read(args.costs), measured(args.against)
    with tempfile.TemporaryDirectory() as folder:
        for shape in args.shapes:
            for arm in ARMS:
                assembly = assembled(Path(folder), shape, args, arm)
                for requests in args.requests:
                    found = steps.predict(assembly, costs, steps.decode(requests, CONTEXT))
                    line = {
                        "bench": "predicted-steps",
                        "shape": shape,
                        "dtype": args.dtype,
                        "arm": arm,
                        "device": costs.device,
                        "costs": costs.date,
                        "ranks": assembly.mesh.size,
                        "requests": requests,
                        "predicted_ms": round(found.seconds * 1e3, 3),
                        "parts_ms": {k: round(v * 1e3, 3) for k, v in found.by.items()},
                        "unmeasured": sorted(found.unmeasured),
                        "fits": fits(assembly, requests),
                    }
                    took = known.get((shape, args.dtype, arm, requests))
                    if took is not None:
                        line["measured_ms"] = took
                        line["off"] = round(found.seconds * 1e3 / took - 1, 3)
                    yield line


def prompts_seconds(assembly: Assembly, costs: Costs, prompt: int, batch: int) -> float | None:
    """Of prompts that fill whole steps; None for others. A group has its share of a step."""
    groups = assembly.mesh.attn_dp
    most = min(assembly.config.max_step_tokens, assembly.config.chunked_prefill_size)
    own = most // groups
    if prompt <= own:
        step = steps.predict(assembly, costs, steps.prefill(most, prompt))
        return None if batch * prompt < most else batch * prompt / most * step.seconds
    if assembly.model.indexing is None:
        return None
    at_once = min(batch, groups)
    chunks = [steps.prefill(at_once * own, own, at) for at in range(0, prompt, own)]
    each = sum(steps.predict(assembly, costs, chunk).seconds for chunk in chunks)
    return -(-batch // groups) * each


def whole(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line per measured case of `v3_whole.py`."""
    costs = Costs.read(args.costs)
    found = [json.loads(text) for file in args.whole for text in file.read_text().splitlines()]
    for line in found:
        about = {key: line[key] for key in ("model", "arm", "layers", "dtype", "ranks")}
        if line["arm"].endswith("drafts") or line["dtype"] != args.dtype:
            continue
        with tempfile.TemporaryDirectory() as folder:
            write_config(Path(folder), line["model"], line["layers"], line["dtype"])
            given = {**line["settings"], "model": folder}
            given["graph_sizes"] = tuple(given["graph_sizes"])
            config = EngineConfig(**given)
            assembly = assemble(config, set(given), device=args.device, without=args.without)
        for case in line["cases"]:
            if (took := case["measured"]) is None or "step_ms" not in took:
                continue
            prompt, batch = case["prompt"], took["batch"]
            step = steps.decode(batch, prompt + line["answer"] // 2)
            made = steps.predict(assembly, costs, step)
            seconds = prompts_seconds(assembly, costs, prompt, batch)
            rate = None if seconds is None else batch * prompt / seconds
            yield {
                "bench": "predicted-whole",
                **about,
                "costs": costs.date,
                "prompt": prompt,
                "requests": batch,
                "predicted_ms": round(made.seconds * 1e3, 3),
                "measured_ms": took["step_ms"],
                "off": round(made.seconds * 1e3 / took["step_ms"] - 1, 3),
                "predicted_tokens_per_s": None if rate is None else round(rate, 1),
                "measured_tokens_per_s": took["prompt_tokens_per_s"],
                "parts_ms": {k: round(v * 1e3, 3) for k, v in made.by.items()},
                "unmeasured": sorted(made.unmeasured),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--costs", type=Path, required=True)
    parser.add_argument("--device", default="h200")
    about = "features that the device lacks, as of plan"
    parser.add_argument("--without", nargs="*", default=[], help=about)
    parser.add_argument("--shapes", nargs="+", default=["v2-lite", "v3-slice"])
    parser.add_argument("--dtype", default="fp8")
    sizes = [1, 8, 32, 64, 128, 256, 512]
    parser.add_argument("--requests", type=int, nargs="+", default=sizes)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--against", type=Path, nargs="+", default=[])
    parser.add_argument("--whole", type=Path, nargs="+", default=[])
    parser.add_argument("--out", type=Path, help="add the lines to this file")
    args = parser.parse_args()
    for line in chain(lines(args), whole(args)):
        print(json.dumps(line))
        sys.stdout.flush()
        if args.out is not None:
            append(args.out, line)


if __name__ == "__main__":
    main()
