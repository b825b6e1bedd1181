"""From launch to first token, with empty and with full caches of kernels, and where the time goes.

    ds-runtime bench make-checkpoint --shape v3-slice --dtype fp8 --config-only DIR
    python benchmarks/device_start.py DIR [--runs N] [--out FILE]

Without --config-only the files of the weights are read, too: once before, so that they lie in the
page cache. Each start is a process of its own; the first finds caches (of Triton and of DeepGEMM)
that are empty, the others what it left.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ds_runtime_bench.record import append, environment, load_format

CACHES = ("TRITON_CACHE_DIR", "DG_JIT_CACHE_DIR")
START = """
import json, sys, time
began = float(sys.argv[2])
marks = {}
def mark(what):
    marks[what] = round(time.time() - began, 2)
import torch
mark("torch imported")
import ds_runtime.engine.device.runner as runner
from ds_runtime import LLM, SamplingParams
mark("runtime imported")
def timed(owner, name, what):
    was = getattr(owner, name)
    def call(*args, **named):
        mark(f"{what} begins")
        try:
            return was(*args, **named)
        finally:
            mark(f"{what} ends")
    setattr(owner, name, call)
timed(runner, "load_model", "loading")
timed(runner.Runner, "warm_up", "warm-up")
timed(runner.Programs, "capture", "capturing")
with LLM(sys.argv[1], load_format=sys.argv[3]) as llm:
    mark("ready")
    llm.generate([[1, 2, 3, 4, 5, 6, 7, 8]], SamplingParams(max_tokens=1, ignore_eos=True))
    mark("first token")
print(json.dumps(marks))
"""


def start(folder: Path, caches: str) -> dict[str, float]:
    """Seconds since launch of what happened."""
    own = {name: f"{caches}/{name}" for name in CACHES}
    command = [sys.executable, "-c", START, str(folder), str(time.time()), load_format(folder)]
    done = subprocess.run(
        command, env={**os.environ, **own}, check=True, stdout=subprocess.PIPE, text=True
    )
    marks: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return marks


def main() -> int:
    """Measure, record and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="a checkpoint")
    parser.add_argument("--runs", type=int, default=2, metavar="N", help="warm ones (default: 2)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="add a line of JSON to it")
    args = parser.parse_args()
    for file in sorted(args.folder.glob("*.safetensors")):
        with file.open("rb") as handle:
            while handle.read(1 << 24):
                pass
    row: dict[str, Any] = {
        "bench": "device_start",
        "model": args.folder.name,
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "processors": os.cpu_count(),
    }
    with tempfile.TemporaryDirectory() as caches:
        row["cold"] = start(args.folder, caches)
        print("cold", row["cold"], flush=True)
        row["warm"] = []
        for _ in range(args.runs):
            row["warm"].append(start(args.folder, caches))
            print("warm", row["warm"][-1], flush=True)
    if args.out:
        append(args.out, {**row, **environment()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
