"""An LLM that is dropped without close() is freed, and the collector's settings come back. Each in
a process of its own: pytest's has frozen objects, of which an engine's are none then."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

DROPPED = """
import gc, json, sys, weakref
from ds_runtime import LLM, SamplingParams

how, beside, frozen = sys.argv[2:]
if frozen == "frozen":
    gc.freeze()
    own = gc.get_freeze_count()
settings = dict(platform="cpu", dtype="float32", kv_memory="2MB", threads=1)
before = gc.get_threshold()

def made():
    llm = LLM(sys.argv[1], **settings)
    assert len(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2))) == 1
    return llm

other = made() if beside == "beside" else None
serving = gc.get_threshold()
kept = []
for _ in range(3):
    llm = made()
    refs = [weakref.ref(llm._engine), weakref.ref(llm._engine.runner)]
    refs += map(weakref.ref, [llm._engine.runner.model, *llm._engine.runner.caches])
    if how == "closed":
        llm.close()
        llm.close()
    del llm
    gc.collect()
    kept.append(sum(ref() is not None for ref in refs))
    assert gc.get_threshold() == serving, (gc.get_threshold(), serving)
assert len(refs) > 3
if other is not None:
    assert serving != before
    other.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
    ref = weakref.ref(other._engine.runner)
    del other
    gc.collect()
    kept.append(ref() is not None)
left = gc.get_freeze_count()
as_before = left > 0.99 * own if frozen == "frozen" else left == 0
print(json.dumps([kept, gc.get_threshold() == before, as_before]))
"""


@pytest.mark.parametrize("frozen", ["-", "frozen"])
@pytest.mark.parametrize("beside", ["alone", "beside"])
@pytest.mark.parametrize("how", ["dropped", "closed"])
def test_one_that_is_dropped_is_freed(tiny, how, beside, frozen):
    """Several in a row, also beside another, which keeps its settings until it goes as well."""
    command = [sys.executable, "-c", DROPPED, str(tiny), how, beside, frozen]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr
    kept = [0] * (3 + (beside == "beside"))
    assert json.loads(ran.stdout) == [kept, True, True], ran.stderr
