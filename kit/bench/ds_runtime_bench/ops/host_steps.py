"""What the engine itself does on the host for a decode step, by requests: it schedules the step and
takes in its tokens. No device is used: kernels do no maths, and their calls do not count.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from ds_runtime.errors import DsRuntimeError
from ds_runtime_bench.ops.comm import rising
from ds_runtime_bench.shapes import config_of

REQUESTS = (1, 64, 128, 256, 512, 1024)
STEPS, PROMPT = 60, 16
_ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}


def measure(
    requests: Sequence[int] = REQUESTS, steps: int = STEPS
) -> tuple[tuple[int, float], ...]:
    """(requests, seconds) of a decode step, rising, each by an engine in a process of its own.

    Raises DsRuntimeError where such a process is killed.
    """
    context = multiprocessing.get_context("spawn")
    found = dict[int, float]()
    with tempfile.TemporaryDirectory() as folder:
        (model := Path(folder) / "tiny-v3").mkdir()
        raw = {**config_of("tiny-v3", "bfloat16"), **_ONE_LAYER}
        (model / "config.json").write_text(json.dumps(raw))
        for count in requests:
            with ProcessPoolExecutor(1, context) as pool:  # which tells where the process is killed
                try:
                    found[count] = pool.submit(_one, str(model), count, steps).result()
                except BrokenProcessPool as e:
                    raise DsRuntimeError(
                        f"tune host: the engine of {count} requests was killed, which is what "
                        "systems do when memory runs out; give fewer --requests"
                    ) from e
    return rising(found.items())


def _one(model: str, count: int, steps: int) -> float:
    """Median seconds, the runner's part left out."""
    from ds_runtime_bench.engine import host

    context = PROMPT + steps + 64
    settings = {"model": model, "load_format": "dummy", "context_length": context, "threads": 1}
    made: float = host.run(settings, count, PROMPT, steps)["scheduler_ms"]
    return made / 1e3
