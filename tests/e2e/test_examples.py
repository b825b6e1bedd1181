"""Every file of examples/ runs and prints what it is for."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import serving

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CLIENTS = {  # each against a server: a pattern of what it prints
    "client.py": r"579\n",
    "agent.py": r'call: get_weather \{"city": "Paris"\} -> sunny, 21 degrees\n(.*\n)*answer: .+\n',
    "schema.py": r"\{'sum': 42\}\n",
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("demo", "--context-length", "2048") as server:
        yield server.wait_url()


def test_the_list_of_examples_is_complete() -> None:
    files = {p.name for p in EXAMPLES.glob("*.py")}
    assert files == CLIENTS.keys() | {"offline.py"}
    linked = set(re.findall(r"\]\(([\w.]+)\)", (EXAMPLES / "README.md").read_text()))
    assert linked == files | {"plugin"}


def test_the_offline_example_answers(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "offline.py"))["main"]()
    out = capsys.readouterr().out
    assert "</think>23 stop" in out and "</think>85 stop" in out
    assert len(out.splitlines()) >= 3


def ask(name: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *args]
    return subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=100
    )


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_prints_its_answer(name: str, url: str) -> None:
    done = ask(name, url)
    assert re.fullmatch(CLIENTS[name], done.stdout), done


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    """Another model under a name of its own, with a key."""
    flags = ("--context-length", "2048", "--api-key", "secret", "--served-model-name", "mine")
    with serving("demo-v4", *flags) as server:
        yield server.wait_url()


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_asks_whatever_is_served(name: str, guarded: str) -> None:
    done = ask(name, guarded, OPENAI_API_KEY="secret")
    assert re.fullmatch(CLIENTS[name], done.stdout), done
    assert "the API key is missing or wrong" in ask(name, guarded, OPENAI_API_KEY="no").stderr


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_has_help(name: str) -> None:
    done = ask(name, "--help")
    assert done.returncode == 0 and "URL" in done.stdout and "OPENAI_API_KEY" in done.stdout


def test_the_plugin_serves_its_op(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from ds_runtime import LLM, SamplingParams

    acme = types.ModuleType("acme")
    monkeypatch.setitem(sys.modules, "acme", acme)
    source = (EXAMPLES / "plugin" / "acme.py").read_text()
    exec(compile(source, "acme.py", "exec"), acme.__dict__)
    calls: list[int] = []
    own = acme.silu_mul

    def counted(gate_up: torch.Tensor) -> torch.Tensor:
        calls.append(len(gate_up))
        return own(gate_up)

    monkeypatch.setattr(acme, "silu_mul", counted)
    with LLM(model="demo", platform="cpu", disable_graph=True, extra_plugins=[acme]) as llm:
        (output,) = llm.generate(["12+30="], SamplingParams(max_tokens=4))
    assert calls and output.token_ids
