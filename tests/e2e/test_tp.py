"""Two ranks over Gloo: the same results, the same decisions, one fate."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from served import rests

from ds_runtime import LLM, OutputRules, SamplingParams
from ds_runtime.assembly.assemble import assemble
from ds_runtime.common.progress import Progress
from ds_runtime.config import EngineConfig
from ds_runtime.description.structure import stored_modules
from ds_runtime.errors import ConfigError, EngineDeadError
from ds_runtime.ops.binding.bound import BoundOps
from ds_runtime.parallel.group import SoloCommunicator, TorchCommunicator
from ds_runtime.parallel.mesh import Mesh
from ds_runtime.parallel.world import World
from ds_runtime.weights import load as weights
from ds_runtime_kit.models.answers import check_float32
from tiny_models import byte_prompts

SETTINGS = {
    "platform": "cpu",
    "dtype": "float32",
    "kv_memory": "2MB",
    "threads": 1,
    "dist_timeout": 60,
}
PARAMS = SamplingParams(max_tokens=10, logprobs=2)
GUIDED = [  # masks that both ranks apply
    SamplingParams(max_tokens=30, rules=OutputRules(regex="(a|bc){5,9}")),
    SamplingParams(
        max_tokens=30, rules=OutputRules(choice=("alpha", "beta")), temperature=1.0, seed=2
    ),
]


def prompts(count):
    return byte_prompts(count, 1, 50)


def test_two_ranks_give_the_tokens_and_logprobs_of_one_and_wait_without_work(tiny):
    with LLM(tiny, **SETTINGS) as single:
        expected = single.generate(prompts(6), PARAMS)
        outputs = single.generate(prompts(2), GUIDED)
    guided = [o.token_ids for o in outputs]
    assert re.fullmatch("(a|bc){5,9}", outputs[0].text) and outputs[1].text in ("alpha", "beta")
    with LLM(tiny, **SETTINGS, tp=2) as pair:
        check_float32(pair.generate(prompts(6), PARAMS), expected)
        drawn = SamplingParams(max_tokens=8, temperature=1.0, seed=4, repetition_penalty=1.2)
        twice = [pair.generate(prompts(3), drawn) for _ in range(2)]
        assert [o.token_ids for o in twice[0]] == [o.token_ids for o in twice[1]]
        assert [o.token_ids for o in pair.generate(prompts(2), GUIDED)] == guided
        with pytest.raises(ConfigError, match="close the other engine first"):
            TorchCommunicator("gloo", 0, 2, "file:///nowhere")
        child = psutil.Process(pair.pids[0])
        assert rests(child)
        assert pair.generate([5])[0].token_ids
    assert not psutil.pid_exists(child.pid)


def test_each_rank_reads_only_its_share_of_the_weights(tiny, monkeypatch):
    class Rank(SoloCommunicator):
        def __init__(self, rank, size):
            self.rank, self.size = rank, size

        def gather_objects(self, value):
            return [value] * self.size

    class Count(Progress):
        def __enter__(self):
            counts.append(self)
            return self

    counts = []
    monkeypatch.setattr(weights, "Progress", Count)
    for size in (1, 2):
        config = EngineConfig(model=str(tiny), platform="cpu", dtype="float32", tp=size)
        for rank in range(size):
            assembly = assemble(config)
            bound = BoundOps(assembly.binding)
            world = World(Mesh(size), Rank(rank, size))
            weights.load_model(assembly, bound, world, torch.device("cpu"))
    whole, first, second = (c.done for c in counts)
    stored = stored_modules(assembly.model, lambda module: "dense").values()
    # Rows are read one rank's share at a time; columns in strips, of which each keeps its part.
    shares = [
        4 * math.prod(m.shape) * (0.5 if m.cut is not None and m.cut.dim == 0 else 1)
        for m in stored
    ]
    assert whole == sum(4 * math.prod(m.shape) for m in stored)
    assert first == second == sum(shares) < 0.7 * whole


def test_different_decisions_stop_the_start_with_a_list(tiny, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("plugins")))
    import lopsided

    try:
        with pytest.raises(ConfigError, match=r"ranks decided differently") as caught:
            LLM(tiny, **SETTINGS, tp=2, extra_plugins=[lopsided])
    finally:
        del sys.modules["lopsided"]
    lines = str(caught.value).splitlines()[1:]
    assert lines and all(line.startswith("  rank 1 ") for line in lines)
    assert any("silu_mul" in line and "lopsided" in line for line in lines)


def test_a_killed_rank_ends_the_engine_within_seconds_and_says_which(tiny):
    engine = LLM(tiny, **SETTINGS, tp=2)
    stream = engine.stream([5, 6, 7], SamplingParams(max_tokens=150, ignore_eos=True))
    next(stream)
    (pid,) = engine.pids
    os.kill(pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match="rank 1 was ended by SIGKILL"):
        for _ in stream:
            pass
    assert time.monotonic() - start < 30, "half of --dist-timeout"
    assert not psutil.pid_exists(pid)
    with pytest.raises(EngineDeadError, match="rank 1"):
        engine.generate("x")
    engine.close()


def test_a_model_that_cannot_be_cut_is_refused_before_anything_starts(tiny):
    with pytest.raises(ConfigError, match="--tp 3: num_attention_heads 4"):
        LLM(tiny, **SETTINGS, tp=3)


@pytest.mark.parametrize("guarded", [False, True])
def test_a_script_that_makes_it_outside_main_is_told_so(tmp_path, guarded):
    """The processes of ranks import it, and would make more."""
    lines = (
        'llm = LLM("demo", platform="cpu", dtype="float32", kv_memory="200MB", tp=2)',
        'print("answered", len(llm.generate([[5, 6, 7]])))',
        "llm.close()",
    )
    head = ["from ds_runtime import LLM", *['if __name__ == "__main__":'] * guarded]
    text = "\n".join([*head, *("    " * guarded + line for line in lines)])
    (tmp_path / "script.py").write_text(text)
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if guarded:
        assert (done.returncode, done.stdout) == (0, "answered 1\n"), done.stderr
        return
    assert done.returncode == 1 and "answered" not in done.stdout
    said = done.stderr.strip().splitlines()
    assert said[-1].endswith(
        "ConfigError: LLM(tp=2): the processes of its ranks import the script that makes it, and "
        'would make more: put what the script does under if __name__ == "__main__":'
    )
    assert "bootstrapping" not in done.stderr  # which Python says
