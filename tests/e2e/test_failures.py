"""When an engine fails for a plugin's fault, the error says whose, where, and what was expected."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from ds_runtime import LLM, SamplingParams
from ds_runtime.errors import KernelError, PluginError

SETTINGS = {"dtype": "float32", "kv_memory": "2MB", "threads": 1, "disable_radix_cache": True}
# Those that the tiny model's first steps call where references serve; with parts of fusions.
OPS = (
    *("embed", "rms_norm", "add_rms_norm", "rope", "linear", "mla_prologue", "mla_absorb"),
    *("mha_prefill", "mla_decode", "silu_mul", "router_logits", "route", "experts"),
    *("sample", "logprobs"),
)
APART = {"rms_norm": ("add_rms_norm=off",), "rope": ("mla_prologue=off",)}
FORM = r"\[[\d, ]+\] (float|int)\d+( and \[[\d, ]+\] (float|int)\d+)*"


@pytest.fixture
def wrong(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("plugins")))
    import wrong

    yield wrong
    del sys.modules["wrong"]


def served(tiny, wrong, op, way, **settings):
    """A model with one wrong kernel."""
    wrong.BREAK = (op, way)
    given = {**SETTINGS, "disable_graph": True, **settings}
    if op in APART:
        given["fusion"] = APART[op]
    return LLM(tiny, platform="wrong", extra_plugins=[wrong], **given)


def check_named(said, op):
    """Kernel, plugin, op, site, and the command that looks further."""
    head = rf"kernel provider-of-wrong\.\w+ of plugin wrong, {op} at (layers\.\d+\.)?[\w.]+, "
    assert re.search(head, said), said
    assert f"ds-runtime conform wrong --op {op} --kernel provider-of-wrong." in said
    assert f"--pin {op}=KERNEL" in said and "\n" not in said


@pytest.mark.parametrize("way", ["shape", "dtype", "count"])
@pytest.mark.parametrize("op", OPS)
def test_a_kernel_that_gives_back_something_else_is_named(tiny, wrong, op, way):
    with pytest.raises(KernelError) as caught:
        served(tiny, wrong, op, way)
    said = str(caught.value)
    check_named(said, op)
    assert re.search(rf", gave {FORM}, expected {FORM};", said), said


@pytest.mark.parametrize("way", ["raise", "leave", "stray"])
@pytest.mark.parametrize("op", ["rms_norm", "linear", "mla_decode"])
def test_a_kernel_that_raises_anything_is_named(tiny, wrong, op, way):
    with pytest.raises(KernelError) as caught:
        served(tiny, wrong, op, way)
    said = str(caught.value)
    check_named(said, op)
    kind = {"raise": "ValueError", "leave": "SystemExit", "stray": "Stray"}[way]
    assert re.search(rf", given {FORM}, failed: {kind}: no reason;", said), said


@pytest.mark.parametrize("op", ["rms_norm", "linear", "mla_decode"])
@pytest.mark.parametrize("way", ["shape", "raise", "leave"])
def test_one_that_begins_to_while_it_serves_is_named(tiny, wrong, op, way, monkeypatch):
    monkeypatch.setattr(wrong, "ARMED", [False])
    with served(tiny, wrong, op, way) as llm:
        expected = llm.generate([[5, 6, 7]])[0].token_ids
        assert llm.generate([[5, 6, 7]])[0].token_ids == expected, "nothing of a check stays"
        wrong.ARMED[0] = True
        with pytest.raises(KernelError) as caught:
            llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4))
        check_named(str(caught.value), op)


def test_a_kernel_that_cannot_be_captured_is_named(tiny, wrong):
    with pytest.raises(KernelError) as caught:
        served(tiny, wrong, "rms_norm", "waits", disable_graph=False)
    said = str(caught.value)
    check_named(said, "rms_norm")
    assert "cannot be captured: kernel" in said and "waits for the device" in said
    assert said.endswith("; --disable-graph runs without")


def test_one_that_cannot_be_captured_late_is_named_in_the_log(tiny, wrong, monkeypatch, caplog):
    monkeypatch.setattr(wrong.Wrong, "capture_after", 2)
    with served(tiny, wrong, "rms_norm", "waits", disable_graph=False) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True))
    (said,) = [r.message for r in caplog.records if "continue op by op" in r.message]
    check_named(said, "rms_norm")


LOADERS = """
from ds_runtime.api import QuantLoader, hookimpl
from ds_runtime.weights.loaders.native import plain


class Stray(BaseException):
    pass


def fail(*args):
    raise {error}


def of_module(quantization):
    return fail


@hookimpl
def ds_quant_loaders(facts):
    given = dict(accepts=lambda q: True, encodings=plain, read=f"{{__name__}}:read", provider="p")
    given |= {change}
    return [QuantLoader("mine", **given)]


read = fail
"""
WHERE = {
    "accepts": "dict(accepts=fail)",
    "encodings": "dict(encodings=fail)",
    "encoding": "dict(encodings=of_module)",
    "read": "{}",
    "no read": 'dict(read="loaders:nothing")',
}


@pytest.mark.parametrize("error", ["KeyError('scale')", "SystemExit(3)", "Stray()", "OSError(5)"])
@pytest.mark.parametrize("where", WHERE)
def test_a_loader_that_raises_anything_is_named(tiny, tmp_path, monkeypatch, where, error):
    code = LOADERS.format(error=error, change=WHERE[where].replace("{}", "dict()"))
    (tmp_path / "loaders.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    import loaders

    try:
        with pytest.raises(PluginError) as caught:
            LLM(tiny, platform="cpu", **SETTINGS, extra_plugins=[loaders])
    finally:
        del sys.modules["loaders"]
    said = str(caught.value)
    assert re.match(r"loader mine of plugin (loaders|p)\b", said), said
    kind = "AttributeError" if where == "no read" else error.partition("(")[0]
    assert f" failed: {kind}" in said and "; ds-runtime " in said and "\n" not in said


HOOKS = """
from ds_runtime.api import hookimpl


class Stray(BaseException):
    pass


class Observer:
    def on_step(self, stats):
        raise {step}


@hookimpl
def ds_observer(config):
    {hook}
    return Observer()
"""


@pytest.mark.parametrize("error", ["SystemExit(3)", "Stray('oh')", "ValueError('oh')"])
@pytest.mark.parametrize("at", ["hook", "step"])
def test_an_observer_that_raises_anything_is_dropped(
    tiny, tmp_path, monkeypatch, capsys, at, error
):
    code = HOOKS.format(step=error, hook=f"raise {error}" if at == "hook" else "")
    (tmp_path / "observing.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    import observing

    try:
        with LLM(tiny, platform="cpu", **SETTINGS, extra_plugins=[observing]) as llm:
            assert llm.generate([[5, 6, 7]])[0].token_ids
    finally:
        del sys.modules["observing"]
    said = capsys.readouterr().err
    assert said.count("plugin observing: observer dropped: ") == 1
    assert error.partition("(")[0] in said


@pytest.mark.parametrize("at", ["hook", "step"])
def test_an_interrupt_out_of_a_plugin_says_where_it_came_from(tiny, tmp_path, monkeypatch, at):
    error = "KeyboardInterrupt"
    code = HOOKS.format(step=error, hook=f"raise {error}" if at == "hook" else "")
    (tmp_path / "observing.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    import observing

    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            LLM(tiny, platform="cpu", **SETTINGS, extra_plugins=[observing]).generate([[5, 6, 7]])
    finally:
        del sys.modules["observing"]
    assert any("plugin observing" in note for note in caught.value.__notes__)
