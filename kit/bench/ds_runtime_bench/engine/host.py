"""Host time per step: a whole engine on the null platform, whose kernels do no maths.

What remains is scheduling, building batches, the model's Python and the kernels' call overhead.
Only steps that decode for every request are counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_runtime.checkpoint.hub import resolve_model
from ds_runtime.config import EngineConfig
from ds_runtime.description.hf import load_config
from ds_runtime.errors import ConfigError
from ds_runtime.sampling_params import SamplingParams
from ds_runtime_bench.engine.one_batch import random_prompts
from ds_runtime_bench.record import environment

if TYPE_CHECKING:
    from ds_runtime.engine.engine import Engine


_FIXED = ("platform", "plugins", "max_running_requests", "kv_memory")


def _config(settings: Mapping[str, Any], num_running: int) -> EngineConfig:
    """With a KV cache for every request's whole context: one byte per token and layer here."""
    config = EngineConfig(**settings)
    model = load_config(resolve_model(config.model))
    context = config.context_length or model.max_positions
    kv_memory = num_running * model.layers * (context + config.page_size)
    return replace(
        config,
        platform="null",
        plugins=("null",),
        max_running_requests=num_running,
        kv_memory=kv_memory,
    )


def run(
    settings: Mapping[str, Any], num_running: int = 64, input_len: int = 512, steps: int = 200
) -> dict[str, Any]:
    """Load the model on the null platform and decode for `num_running` requests.

    `settings` are EngineConfig fields; platform, plugins, rows and KV memory are set here.
    Milliseconds: the whole step, and its share outside the model. Raises ConfigError for figures
    below 1, and when contexts are full before `steps` full decode steps were seen.
    """
    for name, value in (("running", num_running), ("input-len", input_len), ("steps", steps)):
        if value < 1:
            raise ConfigError(f"--{name} {value}: must be at least 1")
    from ds_runtime.engine.messages import Submit
    from ds_runtime.engine.process.rankspec import RankSpec
    from ds_runtime.engine.process.start import start_engine

    engine = start_engine(
        RankSpec(_config(settings, num_running), (*settings, *_FIXED), (), Path(), 0)
    )
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    vocab = engine.assembly.model.vocab_size
    for i, prompt in enumerate(random_prompts(num_running, input_len, vocab)):
        refused = engine.submit(Submit(rid=str(i), prompt=prompt, params=params, seed=i))
        if refused is not None:
            raise ConfigError(f"bench host: {refused.message}")
    whole, around = _time_decodes(engine, num_running, steps)
    engine.close()
    if len(whole) < steps:
        raise ConfigError(
            f"bench host: contexts were full after {len(whole)} of {steps} decode steps: lower "
            "--input-len or --steps"
        )
    return {
        "bench": "host",
        "model": engine.assembly.config.model,
        "running": num_running,
        "input_len": input_len,
        "steps": len(whole),
        "step_ms": statistics.median(whole) * 1e3,
        "scheduler_ms": statistics.median(around) * 1e3,
        **environment(),
    }


def _time_decodes(engine: Engine, num_running: int, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each full decode step: the whole of it, and the scheduler's part."""
    whole: list[float] = []
    around: list[float] = []
    while engine.has_work and len(whole) < steps:
        start = time.perf_counter()
        plan = engine.scheduler.schedule()
        assert plan is not None
        launched = time.perf_counter()
        result = engine.runner.collect(engine.runner.launch(plan))
        collected = time.perf_counter()
        engine.scheduler.update(plan, result)
        end = time.perf_counter()
        if len(plan.works) == num_running and all(w.tokens is None for w in plan.works):
            whole.append(end - start)
            around.append(end - start - (collected - launched))
    return whole, around


def render(report: Mapping[str, Any]) -> str:
    """The report for people."""
    return (
        f"{report['model']}: {report['running']} running requests, median of {report['steps']} "
        f"decode steps: {report['step_ms']:.2f} ms on the host, of which "
        f"{report['scheduler_ms']:.2f} ms are scheduling"
    )
