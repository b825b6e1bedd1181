"""What a plugin is asked: pure hooks once per process, slow ones by name, and no runtime within."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser
from collections import Counter
from pathlib import Path

import pytest
from faulty import TINY, install, module, tiny_config

from ds_runtime.assembly.assemble import assemble
from ds_runtime.config import EngineConfig
from ds_runtime.engine.messages import Stats, Tokens
from ds_runtime.engine.observers import Observers
from ds_runtime.ops.contract import DeviceInfo, Dims, Facts
from ds_runtime.plugins import asking, hookspecs
from ds_runtime.plugins.hookspecs import HOOKS
from ds_runtime.plugins.manager import Plugins, load_plugins

FACTS = Facts(DeviceInfo("cpu", "any", "any"), Dims({"hidden": 64}))
PURE = ("ds_platform", *hookspecs.OFFER_HOOKS, "ds_defaults")
CONFIG = EngineConfig()


def hook(name: str, body: str) -> str:
    """A plugin's source with one hook, which takes all its arguments."""
    given = ", ".join(inspect.signature(getattr(hookspecs, name)).parameters)
    return f"@hookimpl\ndef {name}({given}):\n    {body}\n"


def ask(plugins: Plugins, name: str) -> list[tuple[str, object]]:
    given = {
        "facts": FACTS,
        "config": CONFIG,
        "subcommands": ArgumentParser().add_subparsers(),
        "app": object(),
        "engine": object(),
        "origin": b"",
    }
    wanted = inspect.signature(getattr(hookspecs, name)).parameters
    return plugins.call(name, only="one", **{k: given[k] for k in wanted})


# once per process

COUNTED = "CALLS = []\n"


@pytest.mark.parametrize("name", HOOKS)
def test_a_pure_hook_is_called_once_for_the_same_arguments(name: str) -> None:
    one = module("one", COUNTED + hook(name, "CALLS.append(1)"))
    for _ in range(2):
        plugins = load_plugins(["cpu"], [one])
        assert ask(plugins, name) == ask(plugins, name)
    assert len(one.CALLS) == (1 if name in PURE else 4)


def test_other_facts_are_another_question() -> None:
    one = module("one", COUNTED + hook("ds_ops", "CALLS.append(facts.dims['hidden'])"))
    plugins = load_plugins(["cpu"], [one])
    for hidden in (64, 64, 128):
        plugins.offers(Facts(FACTS.device, Dims({"hidden": hidden})))
    assert one.CALLS == [64, 128]


def test_a_hook_that_raises_is_not_called_again_and_says_the_same() -> None:
    one = module("one", COUNTED + hook("ds_platform", "CALLS.append(1); raise OSError('no bus')"))
    said = []
    for _ in range(2):
        plugins = load_plugins(["cpu"], [one])
        plugins.platforms()
        refusal = plugins.reports["one"].refusal
        assert refusal is not None
        said.append((str(refusal), refusal.traceback))
    assert said[0] == said[1]
    assert said[0][0] == "broken: ds_platform raised OSError: no bus"
    assert one.CALLS == [1]


def test_a_generator_is_read_once_and_answers_twice() -> None:
    code = hook("ds_defaults", "yield Change('threads', 1, 'it is small')")
    plugins = load_plugins(["cpu"], [module("one", code)])
    first, second = ask(plugins, "ds_defaults"), ask(plugins, "ds_defaults")
    assert first == second
    assert len(first[0][1]) == 1  # type: ignore[arg-type]


def test_each_runtime_settles_a_platform_of_its_own() -> None:
    """The hook is called once, but what `configure` keeps is nobody else's."""
    first, second = (load_plugins(["cpu"]).platforms()["cpu"][0] for _ in range(2))
    assert first is not None and second is not None and first is not second
    first.local_rank = 3
    assert second.local_rank is None


LOGGED = """
import os
def _said(hook):
    with open({path!r}, "a") as file:
        file.write(f"{{os.getpid()}} {{hook}}\\n")
"""


def counted(
    tmp_path: Path, *command: str, body: str = ""
) -> tuple[Counter[str], subprocess.CompletedProcess[str]]:
    """Calls by process and pure hook, of a command beside a plugin that implements every one."""
    site, log = tmp_path / "site", tmp_path / "log"
    log.write_text("")
    code = LOGGED.format(path=str(log))
    code += "".join(hook(name, f"_said({name!r}){body}") for name in PURE)
    install(site, None, code, "one", "one-dist")
    path = os.pathsep.join([*filter(None, sys.path), str(site)])
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Counter(log.read_text().splitlines()), done


@pytest.mark.parametrize("command", ["doctor", "plugins", "plan"])
def test_a_command_calls_each_hook_once_in_a_process(command: str, tmp_path: Path) -> None:
    calls, _ = counted(tmp_path, "-m", "ds_runtime", command)
    assert calls
    assert max(calls.values()) == 1


def test_two_runtimes_call_each_hook_once(tmp_path: Path) -> None:
    model = tiny_config(tmp_path / "m")
    code = (
        "from ds_runtime.assembly.assemble import assemble\n"
        "from ds_runtime.config import EngineConfig\n"
        f"for _ in range(2): assemble(EngineConfig(model={str(model)!r}))"
    )
    calls, _ = counted(tmp_path, "-c", code)
    assert len(calls) == len(PURE)
    assert set(calls.values()) == {1}


# by name


@pytest.mark.parametrize("name", HOOKS)
def test_a_slow_hook_is_a_line(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(asking, "SLOW", 0.05)
    slow = module("one", "import time\n" + hook(name, "time.sleep(0.1)"))
    ask(load_plugins(["cpu"], [slow]), name)
    (line,) = caplog.messages
    assert line.startswith(f"plugin one: its {name} took 0.1 s")


@pytest.mark.parametrize("imports", ["torch", "json"])
def test_the_line_says_that_torch_was_imported(imports: str, tmp_path: Path) -> None:
    """In a process of its own, as torch is here already."""
    body = f"; import time; time.sleep(1.1); import {imports}"
    _, done = counted(tmp_path, "-m", "ds_runtime", "plugins", body=body)
    lines = [line for line in done.stderr.splitlines() if line.startswith("plugin one: its ds_")]
    told = [line for line in lines if "in which it imported torch: import that only in" in line]
    assert len(lines) >= 1 and len(told) == (imports == "torch"), "once, by the first that did"


@pytest.mark.parametrize("command", ["doctor", "plan"])
def test_commands_show_the_line(command: str, tmp_path: Path) -> None:
    body = "; import time; time.sleep(1.1)"
    _, done = counted(tmp_path, "-m", "ds_runtime", command, body=body)
    lines = [line for line in done.stderr.splitlines() if "plugin one" in line]
    asked = {line.split()[3] for line in lines}
    assert asked == set(PURE) - ({"ds_defaults"} if command == "doctor" else set())
    assert all(line.startswith("plugin one: its ds_") and " took 1." in line for line in lines)
    assert len(lines) == len(asked), "each once"


def test_a_slow_import_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(asking, "SLOW", 0.05)
    install(tmp_path, monkeypatch, "import time\ntime.sleep(0.1)\n", "one", "one-dist")
    load_plugins(["one"])
    assert any(line.startswith("plugin one: its import took") for line in caplog.messages)


# no runtime within

STARTS = {
    "LLM": "from ds_runtime import LLM; LLM(platform='cpu')",
    "assemble": (
        "from ds_runtime.assembly.assemble import assemble; "
        "from ds_runtime.config import EngineConfig; "
        "assemble(EngineConfig())"
    ),
    "load_plugins": "from ds_runtime.plugins.manager import load_plugins; load_plugins()",
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", HOOKS)
def test_a_runtime_within_a_hook_is_one_sentence(name: str, start: str) -> None:
    plugins = load_plugins(["cpu"], [module("one", hook(name, STARTS[start]))])
    assert ask(plugins, name) == []
    refusal = plugins.reports["one"].refusal
    assert str(refusal) == (
        f"broken: {name} of plugin one starts a runtime (LLM, assemble or load_plugins) while it "
        "is asked: return what the plugin brings. Start a runtime in a command of its own "
        "(ds_cli adds one) or in a script"
    )


@pytest.mark.parametrize("name", hookspecs.OFFER_HOOKS)
def test_so_is_one_in_a_generator(name: str) -> None:
    plugins = load_plugins(["cpu"], [module("one", hook(name, f"{STARTS['LLM']}; yield"))])
    plugins.offers(FACTS)
    assert str(plugins.reports["one"].refusal).startswith(
        f"broken: {name} of plugin one starts a runtime"
    )


def test_so_is_one_at_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, STARTS["LLM"], "one", "one-dist")
    refusal = load_plugins(["one"]).reports["one"].refusal
    assert str(refusal).startswith("broken: import of plugin one starts a runtime")


WAITED = {
    "join": """
        import threading
        def work():
            try:
                {start}
            except Exception as e:
                SAID.append(str(e))
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    """,
    "future": """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor() as pool:
            try:
                pool.submit(lambda: exec({start!r})).result()
            except Exception as e:
                SAID.append(str(e))
    """,
}


@pytest.mark.parametrize("way", WAITED)
@pytest.mark.parametrize("name", HOOKS)
def test_so_is_one_in_a_thread_that_a_hook_waits_for(name: str, way: str) -> None:
    code = "SAID = []\n" + hook(name, "work()") + "def work():" + WAITED[way]
    one = module("one", code.format(start=STARTS["LLM"]))
    ask(load_plugins(["cpu"], [one]), name)
    (said,) = one.SAID
    assert said.startswith(f"{name} of plugin one starts a runtime")


def test_another_thread_starts_while_a_hook_is_asked() -> None:
    """Two runtimes of one script, each in a thread: neither belongs to the other's hook."""
    code = "import threading\nIN, GO = threading.Event(), threading.Event()\n"
    one = module("one", code + hook("ds_ops", "IN.set()\n    while not GO.is_set(): pass"))
    loaded: list[Plugins] = []
    ready = threading.Event()

    def later() -> None:
        ready.wait()
        loaded.append(load_plugins(["cpu"]))
        one.GO.set()

    other = threading.Thread(target=later)
    other.start()  # it was there before
    plugins = load_plugins(["cpu"], [one])
    hooked = threading.Thread(target=plugins.offers, args=(FACTS,))
    hooked.start()
    one.IN.wait()
    fresh = threading.Thread(target=lambda: loaded.append(load_plugins(["cpu"])))
    fresh.start()  # it came up meanwhile: it waits until the hook is over
    ready.set()
    for thread in (other, hooked, fresh):
        thread.join(30)
    assert len(loaded) == 2
    assert plugins.reports["one"].refusal is None


def test_after_a_hook_a_runtime_starts(tmp_path: Path) -> None:
    ask(load_plugins(["cpu"], [module("one", hook("ds_ops", "raise ValueError"))]), "ds_ops")
    model = tiny_config(tmp_path / "m")
    assert json.loads((model / "config.json").read_text()) == TINY
    assert assemble(EngineConfig(model=str(model), plugins=("cpu",))).platform.name == "cpu"


def test_the_observer_of_the_documents_watches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(from typing .*?)```", page, re.S)
    one = module("one", code)
    config = EngineConfig(model=str(tiny_config(tmp_path / "m")), plugins=("cpu",))
    observers = Observers(assemble(config, (), [one]))
    ended = Tokens(rid="a", tokens=[1, 2], finish="stop")
    now = Stats(pages_total=4, pages_free=1)
    observers.tell(lambda: now, [Tokens(rid="b", tokens=[3]), ended])
    assert capsys.readouterr().out == "a: stop, 25% of the pages are free\n"


def test_a_slow_observer_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow:
        def on_step(self, stats: object) -> None:
            time.sleep(0.02)

    one = module("one", hook("ds_observer", "return SLOW"))
    one.SLOW = Slow()
    config = EngineConfig(model=str(tiny_config(tmp_path / "m")), plugins=("cpu",))
    observers = Observers(assemble(config, (), [one]))
    monkeypatch.setattr("ds_runtime.engine.observers.SLOW", 0.01)
    for _ in range(3):
        observers.tell(Stats, [])
    said = capsys.readouterr().err.splitlines()
    assert said == ["plugin one: its observer's on_step took 0.0 s, and steps wait for it"]


def test_an_observer_that_starts_one_is_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = module("one", hook("ds_observer", STARTS["LLM"]))
    config = EngineConfig(model=str(tiny_config(tmp_path / "m")), plugins=("cpu",))
    Observers(assemble(config, (), [one]))
    assert capsys.readouterr().err.startswith(
        "plugin one: observer dropped: ds_observer of plugin one starts a runtime"
    )
