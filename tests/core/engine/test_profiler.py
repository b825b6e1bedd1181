"""Traces of the engine: written where it was said, one at a time."""

from __future__ import annotations

import gzip
import json

import pytest
import torch

from ds_runtime.engine.process.profiler import Profiler
from ds_runtime.errors import RequestError


def test_a_trace_holds_what_ran_between(tmp_path):
    profiler = Profiler()
    with pytest.raises(RequestError, match="no profile is running"):
        profiler.stop()
    profiler.start(str(tmp_path / "new"))
    with pytest.raises(RequestError, match="a profile is running: stop it first"):
        profiler.start(str(tmp_path))
    torch.ones(8, 8) @ torch.ones(8, 8)
    path = profiler.stop()
    assert path.startswith(str(tmp_path / "new"))
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    assert any(e["name"] == "aten::matmul" for e in events)
    profiler.start(str(tmp_path))  # and again
    profiler.stop()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="--profile-dir"):
        Profiler().start(str(tmp_path / "file" / "x"))
