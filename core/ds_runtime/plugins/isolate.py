"""Plugins are tried in a process of their own first: one that crashes or hangs is a sentence.

A driver library that is out of step with its kernel module takes the process along that loads it.
So a fork of this one imports each plugin and asks it for its platform, device and memory. The
plugin that it does not come back from is broken, with the stack that it left. Torch-free.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import IO, Any

from ds_runtime.common.interrupt import signal_name
from ds_runtime.common.readable import readable
from ds_runtime.ops.contract import Refusal
from ds_runtime.platform.contract import Platform
from ds_runtime.plugins.installed import InstalledPlugin
from ds_runtime.plugins.manager import ALWAYS, Plugins, importable, load_plugins

LIMIT = 20.0  # seconds per plugin: drivers of many devices take their time
_GRACE = 3.0
_OURS = (*ALWAYS.values(), "ds_runtime.api")  # imported before the copy, so once instead of twice
_DONE = "\t\n"


def look(
    installed: Mapping[str, InstalledPlugin],
    names: Iterable[str] | None = None,
    allowlist: str | None = None,
    limit: float | None = None,
    ask: Sequence[str] = (),
) -> dict[str, Refusal]:
    """The plugins that crash or take longer than `limit` seconds, each with its refusal.

    `ask`: optional functions of plugins to try as well (PROBE, DIAGNOSE). Nothing is tried, and
    nothing found, where this process cannot be copied: it has threads or torch, or no fork.
    """
    if not hasattr(os, "fork") or threading.active_count() > 1 or "torch" in sys.modules:
        return {}
    todo = importable(installed, names, allowlist)
    for module in _OURS:
        import_module(module)
    failed: dict[str, Refusal] = {}
    while todo:
        name, refusal = _try(installed, todo, allowlist, LIMIT if limit is None else limit, ask)
        if refusal is None:
            break
        failed[name] = refusal
        del todo[name]
    return failed


def _try(
    installed: Mapping[str, InstalledPlugin],
    modules: Mapping[str, str],
    allowlist: str | None,
    limit: float,
    ask: Sequence[str],
) -> tuple[str, Refusal | None]:
    """(the plugin that a copy of this process did not come back from, why), or ("", None)."""
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    with tempfile.TemporaryFile(mode="w+") as stack:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(reading)
                _child(installed, modules, allowlist, limit, ask, writing, stack)
                code = 0
            finally:
                os._exit(code)
        os.close(writing)
        said, late = _read(reading, limit)
        if late:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if said.endswith(_DONE):
            return "", None
        name, _, stage = (said.splitlines() or [f"{next(iter(modules))}\timport"])[-1].partition(
            "\t"
        )
        stack.seek(0)
        trace = stack.read()
        return name, Refusal("broken", _sentence(stage, code, late, trace, limit), trace)


def _sentence(stage: str, code: int, late: bool, trace: str, limit: float) -> str:
    if late or trace.startswith("Timeout"):
        return f"{stage} did not end within {limit:g} s"
    if code < 0:
        return f"{stage} crashed with {signal_name(-code)}"
    return f"{stage} ended the process with exit code {code}"


def _read(pipe: int, limit: float) -> tuple[str, bool]:
    """(what the copy said until it closed the pipe, whether it went silent for too long)."""
    said = b""
    try:
        while True:
            if not readable([pipe], limit + _GRACE):
                return said.decode(), True
            more = os.read(pipe, 4096)
            if not more:
                return said.decode(), False
            said += more
            if said.endswith(_DONE.encode()):
                return said.decode(), False
    finally:
        os.close(pipe)


def _child(
    installed: Mapping[str, InstalledPlugin],
    modules: Mapping[str, str],
    allowlist: str | None,
    limit: float,
    ask: Sequence[str],
    pipe: int,
    stack: IO[str],
) -> None:
    """Try every plugin, saying before each stage what comes; errors are the caller's to meet."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    faulthandler.enable(stack)

    def stage(name: str, what: str, run: Callable[..., Any], *arguments: Any) -> Any:
        os.write(pipe, f"{name}\t{what}\n".encode())
        faulthandler.dump_traceback_later(limit, exit=True, file=stack)
        try:
            return run(*arguments)
        except BaseException:
            return None
        finally:
            faulthandler.cancel_dump_traceback_later()

    for name, module in modules.items():
        stage(name, "import", import_module, module)
    plugins = load_plugins(modules, lenient=True, allowlist=allowlist, installed=installed)
    for name in modules:
        for _, platform in stage(name, "ds_platform", _platforms, plugins, name) or ():
            if isinstance(platform, Platform):
                stage(name, "info()", platform.info, 0)
                stage(name, "memory()", platform.memory, 0)
        plugin = plugins.manager.get_plugin(name)
        for question in (q for q in ask if callable(getattr(plugin, q, None))):
            stage(name, question, getattr(plugin, question))
    os.write(pipe, _DONE.encode())


def _platforms(plugins: Plugins, name: str) -> list[tuple[str, Any]]:
    return plugins.call("ds_platform", only=name)
