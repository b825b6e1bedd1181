"""What the demo model answers in few bits, on the CPU's kernels: over a part of the held-out set in
each run, over all of it before a release.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from ds_runtime import LLM
from ds_runtime.checkpoint.hub import resolve_model
from ds_runtime_bench.engine import accuracy
from ds_runtime_convert.run import convert
from parts import some_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LOSS = {  # points, of sums and calls together
    **dict.fromkeys(("fp8", "int8", "mxfp8"), 0.5),
    **dict.fromkeys(("w4a16", "w4afp8", "nvfp4", "mxfp4"), 3.0),
}


@cache
def share(folder: str) -> float:
    """Of sums and tool calls together, how many are right, in percent."""
    held, _ = accuracy.load_heldout(resolve_model("demo") / "heldout.json")
    # As many threads as this run of the tests may use: two that wait for each other take longer.
    with LLM(folder, platform="cpu", threads=torch.get_num_threads()) as llm:
        parts = [
            accuracy.score(llm, Path(folder), kind, some_of(held[kind], count))[0]
            for kind, count in (("sums", 120), ("tools", 80))
        ]
    return 100 * sum(s["right"] for s in parts) / sum(s["of"] for s in parts)


@pytest.mark.parametrize("name", LOSS)
def test_a_format_loses_no_more_than_its_rounding(tmp_path, name):
    convert(resolve_model("demo"), name, tmp_path / name)
    whole = share(str(resolve_model("demo")))
    assert whole > 99
    assert share(str(tmp_path / name)) >= whole - LOSS[name]
