"""An engine in a process of its own, timed on request: JSON lines in, JSON lines out.

    python -m ds_runtime_bench.engine.interleaved ds-runtime|transformers

The first line holds its settings, every further one a request: `limits`, `read`, or `seconds` of a
batch. It loads once and waits between its turns, so that engines can take turns without loading
again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol, TextIO

from ds_runtime.engine.process.entry import set_environment
from ds_runtime.errors import DsRuntimeError
from ds_runtime.ops.contract import load_attr
from ds_runtime.ops.table import OPS
from ds_runtime_bench.engine.one_batch import generate_seconds, random_prompts


class Engine(Protocol):
    """What can take turns."""

    vocab: int

    def about(self) -> dict[str, Any]:
        """What it is, for the record."""

    def limits(self, steps: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Measured ceilings, and bytes that decode steps of (batch, context) must read."""

    def read_rate(self) -> float:
        """Bytes per second that memory gives right now; 0 if it cannot tell."""

    def seconds(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Time to generate exactly `tokens` tokens for every prompt, without an early end."""


class Ours:
    """This runtime with its prefix cache off."""

    def __init__(self, settings: Mapping[str, Any], rows: int, context: int) -> None:
        from ds_runtime.assembly.assemble import assemble
        from ds_runtime.config import EngineConfig

        wanted = {"disable_radix_cache": True, "max_running_requests": rows, **settings}
        wanted.setdefault("context_length", context)
        self._assembly = assemble(EngineConfig(**wanted), tuple(wanted))
        set_environment(self._assembly.platform.process_env())
        from ds_runtime import LLM
        from ds_runtime.checkpoint.hub import resolve_model
        from ds_runtime.description.hf import load_config
        from ds_runtime_bench.ops.step_work import step_bytes

        start = time.perf_counter()
        self._llm = LLM(**wanted)
        self._loaded_in = time.perf_counter() - start
        self._step_bytes = step_bytes
        self.vocab = load_config(resolve_model(str(wanted["model"]))).vocab_size

    def about(self) -> dict[str, Any]:
        import torch

        plan = self._llm.plan
        heavy = [name for name, op in OPS.items() if op.heavy]
        return {
            "arch": plan.arch,
            "dtype": plan.dtype,
            "kernels": {op: [r.kernel for r in plan.rows if r.op == op] for op in heavy},
            "load_s": self._loaded_in,
            "threads": torch.get_num_threads(),
        }

    def limits(self, steps: Sequence[tuple[int, int]]) -> dict[str, Any]:
        found = [self._step_bytes(self._assembly, (b,), context)[b] for b, context in steps]
        return {
            "ceilings": asdict(self._assembly.platform.ceilings(0)),
            "step_bytes": [sum(work.nbytes for work in step.values()) for step in found],
        }

    def read_rate(self) -> float:
        return self._assembly.platform.read_rate(0)

    def seconds(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        return generate_seconds(self._llm, prompts, tokens)


ENGINES: Mapping[str, str] = {
    "ds-runtime": "ds_runtime_bench.engine.interleaved:Ours",
    "transformers": "ds_runtime_kit.models.eager:Eager",
}


def answer(engine: Engine, request: Mapping[str, Any]) -> dict[str, Any]:
    """One request's answer, with the processor seconds that this process has used so far."""
    found: dict[str, Any] = {}
    if request["do"] == "limits":
        found = engine.limits(request["steps"])
    elif request["do"] == "read":
        found = {"read": engine.read_rate()}
    else:
        batch, length, tokens = request["batch"], request["input_len"], request["output_len"]
        prompts = random_prompts(batch, length, engine.vocab)
        engine.seconds(prompts, 1)  # while the other engine had its turn, the machine forgot us
        first = engine.seconds(prompts, 1)
        found = {"first": first, "whole": engine.seconds(prompts, 1 + tokens) if tokens else first}
    used = os.times()
    return found | {"cpu": used.user + used.system}


def main(name: str, lines: TextIO, out: TextIO) -> int:
    """Load, say what was loaded, and answer until the input ends."""

    def say(what: Mapping[str, Any]) -> None:
        print(json.dumps(what), file=out, flush=True)

    wanted = json.loads(lines.readline())
    try:
        engine: Engine = load_attr(ENGINES[name])(
            wanted["settings"], wanted["rows"], wanted["context"]
        )
    except DsRuntimeError as e:
        say({"error": str(e)})
        return 2
    engine.seconds(random_prompts(1, 1, engine.vocab), 2)  # what is made on first use
    say({"about": engine.about()})
    for line in lines:
        say(answer(engine, json.loads(line)))
    return 0


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints goes to the terminal, not between the answers
    try:
        sys.exit(main(sys.argv[1], sys.stdin, answers))
    except KeyboardInterrupt:  # that of the terminal, which the other end tells of
        sys.exit(130)
