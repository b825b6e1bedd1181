"""Decode of the demo model on a shared machine: threads, waiting policies, and busy neighbours.

python benchmarks/cpu_threads.py [--threads 2] [--busy 0 2]. Every measurement is a process of its
own: 60 tokens from a prompt of six, five times after a warm-up. `--busy N` runs N endless loops
beside it. The policies are environment variables of the process, as the CPU platform's
`process_env` sets them for the processes of an engine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

TOKENS = 60
POLICIES: dict[str, dict[str, str]] = {
    "libgomp's own": {},
    "GOMP_SPINCOUNT=2000": {"GOMP_SPINCOUNT": "2000"},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
}


def decode(threads: int) -> None:
    """Print the rates of five runs."""
    from ds_runtime import LLM, SamplingParams

    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    with LLM(model="demo", platform="cpu", threads=threads, kv_memory=50_000_000) as llm:
        llm.generate("12+30=", params)
        for _ in range(5):
            begin = time.perf_counter()
            llm.generate("12+30=", params)
            print(TOKENS / (time.perf_counter() - begin))


def measure(threads: int, busy: int, env: dict[str, str]) -> str:
    """The rates of one process beside `busy` loops, as a sentence."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--decode", "--threads", str(threads)],
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
            timeout=120,
        )
    except subprocess.TimeoutExpired:
        return f"not done after 120 s: under {6 * TOKENS / 120:.0f} tokens/s"
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    rates = [float(line) for line in done.stdout.split()]
    return f"median {statistics.median(rates):.0f}, {min(rates):.0f} to {max(rates):.0f} tokens/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--decode", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.decode:
        return decode(args.threads)
    for busy in args.busy:
        for threads in sorted({1, args.threads}):
            for name, env in POLICIES.items():
                load = os.getloadavg()[0]
                said = measure(threads, busy, env)
                print(
                    f"busy {busy}, threads {threads}, {name}: {said} (load {load:.1f})", flush=True
                )
                if threads == 1:
                    break  # one thread waits for nobody


if __name__ == "__main__":
    main()
