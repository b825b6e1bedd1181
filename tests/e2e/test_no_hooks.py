"""Hooks are for start-up: none is called while a model serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_runtime import LLM, SamplingParams
from ds_runtime.plugins.hookspecs import HOOKS
from ds_runtime.plugins.manager import Plugins


def test_no_hook_is_called_during_steps(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(model=str(tiny), platform="cpu", dtype="float32") as llm:
        plugins = llm._assembly.plugins
        before = plugins.calls
        assert before > 0

        def refuse(*args: object, **kwargs: object) -> None:
            raise AssertionError("a hook was called during a step")

        plugins.manager.add_hookcall_monitoring(refuse, refuse)
        monkeypatch.setattr(Plugins, "call", refuse)
        for hook in HOOKS:
            for implementation in getattr(plugins.manager.hook, hook).get_hookimpls():
                monkeypatch.setattr(implementation, "function", refuse)
        outputs = llm.generate(["one", "another prompt"], SamplingParams(max_tokens=8, n=2))
        assert all(len(c.token_ids) == 8 for o in outputs for c in o.outputs)
        assert plugins.calls == before
