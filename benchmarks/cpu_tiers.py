"""A long prompt that returns after a restart, on the CPU: its first token from the disk.

    python benchmarks/cpu_tiers.py CHECKPOINT [--tokens 50000] [--more 16] [--times 3]
        [--folder DIR] [--computed] [--set NAME=VALUE ...] [--no-record]

A folder is filled with the pages of a prompt of --tokens random ids, as if a process before this
one had computed it: their names are right, and their contents are random latents, unless --computed
has a process compute them first. Then an engine starts and is asked for the prompt with --more new
ids behind it, --times times. Its caches are emptied in between, which leaves the disk, and the
files are synced and dropped from the page cache before each. Seconds are from the call to the first
token, and beside them this process's processor seconds and the share of the machine's processors
that others took meanwhile: what waits for these says little of an idle machine. Rows go to
benchmarks/results/cpu_tiers.jsonl with machine, versions and commit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from device_decode import value

from ds_runtime_bench.record import Neighbours, append, environment, load_format

if TYPE_CHECKING:
    from ds_runtime import LLM

RESULTS = Path(__file__).parent / "results" / "cpu_tiers.jsonl"


def drawn(args: argparse.Namespace, tokens: int, seed: int) -> list[int]:
    vocab = json.loads((args.checkpoint / "config.json").read_text())["vocab_size"]
    draw = random.Random(seed)
    return [draw.randrange(2, vocab) for _ in range(tokens)]


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The prompt fits on the device, and twice into host memory, half of which a request may fill
    from the disk."""
    given: dict[str, Any] = {n: value(v) for n, _, v in (s.partition("=") for s in args.set)}
    given = {"load_format": load_format(args.checkpoint), "platform": "cpu", **given}
    given = {"context_length": args.tokens + 1024, "hicache_ratio": 2.0, **given}
    return {**given, "enable_hierarchical_cache": True, "disk_cache": str(args.folder)}


def fill(args: argparse.Namespace) -> None:
    """Files for all whole pages of the prompt, with random numbers in place of latents."""
    import torch

    from ds_runtime.assembly.assemble import assemble
    from ds_runtime.config import EngineConfig
    from ds_runtime.kv.chain import page_keys
    from ds_runtime.kv.keys import Origin
    from ds_runtime.kv.tiers.folder import DiskFolder

    given = settings(args)
    config = EngineConfig(model=str(args.checkpoint), **given)
    assembly = assemble(config, tuple(given))
    assert not any(laid.group.per_request for laid in assembly.caches), "it keeps states, too"
    folder, size = DiskFolder(args.folder, config.disk_cache_size), assembly.config.page_size
    dtype = getattr(torch, assembly.caches[0].facts.dtype)
    for name in page_keys(Origin.of(assembly).root(), drawn(args, args.tokens, 5), size):
        parts = []
        for laid in assembly.caches:
            for _ in laid.group.layers:
                values = torch.randn(laid.page_bytes // dtype.itemsize).to(dtype)
                parts.append(memoryview(bytearray(values.view(torch.uint8).numpy().tobytes())))
        assert folder.write(name, "page", parts), folder.stopped


def uncached(folder: Path) -> None:
    """What is read from these files next comes from the disk."""
    os.sync()
    for path in folder.glob("*/*"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def asked(llm: LLM, prompt: list[int]) -> dict[str, Any]:
    """Seconds to the first token, where cached tokens were, and bytes that were read."""
    from ds_runtime import SamplingParams

    before, others = llm.stats().disk_read_bytes, Neighbours()
    used, begin = time.process_time(), time.perf_counter()
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    took = time.perf_counter() - begin
    read = llm.stats().disk_read_bytes - before
    return {
        "seconds": round(took, 3),
        "processor_seconds": round(time.process_time() - used, 3),
        "others": None if (share := others.share()) is None else round(share, 2),
        "cached": output.usage.cached_by_tier,
        "read_bytes": read,
    }


def measured(args: argparse.Namespace) -> dict[str, Any]:
    from ds_runtime import LLM

    row: dict[str, Any] = {}
    prompt, more = drawn(args, args.tokens, 5), drawn(args, args.more, 6)
    if args.computed:
        with LLM(args.checkpoint, **settings(args)) as llm:
            row["computed"] = asked(llm, prompt)
    else:
        fill(args)
    uncached(args.folder)
    with LLM(args.checkpoint, **settings(args)) as llm:
        row["returned"] = []
        for _ in range(args.times):
            row["returned"].append(asked(llm, prompt + more))
            print(row["returned"][-1], flush=True)
            llm.flush_cache()
            uncached(args.folder)
        pace = llm._alive().runner.pace
        assert pace is not None, "the start measures it"
        each = {"computed": pace.computed, "loaded": pace.loaded, "read": pace.read}
        row["page_us"] = {name: round(1e6 * took) for name, took in each.items()}
    times = [one["seconds"] for one in row["returned"]]
    return {**row, "median_seconds": statistics.median(times)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="its folder, or one of a config.json alone")
    for name, default in (("tokens", 50_000), ("more", 16), ("times", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path, help="for the pages, else a temporary one")
    parser.add_argument("--computed", action="store_true", help="pages are computed first")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        args.folder = args.folder or Path(made) / "pages"
        found = measured(args)
    row = {
        "bench": "cpu-tiers",
        "checkpoint": args.checkpoint.name,
        "settings": args.set,
        "tokens": args.tokens,
        "more": args.more,
        "pages": "computed" if args.computed else "random",
        **found,
        **environment(),
    }
    print(json.dumps({k: v for k, v in row.items() if k not in ("machine", "versions")}))
    if not args.no_record:
        append(RESULTS, row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
