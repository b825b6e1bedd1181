"""The clients, each with what its environment holds, and the environments themselves.

An environment is a folder below build/clients that pip fills once. `versions.json` says what was in
it when the client's bytes were recorded: these versions are installed, or, to record, the newest.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VERSIONS = HERE / "versions.json"
MODEL = ROOT / "core" / "ds_runtime" / "demo"  # the folder with the tokenizer


@dataclass(frozen=True)
class Client:
    """needs: requirements; the first names the client itself. also: packages whose versions are
    told beside it. torch: the client imports it, which is then that of these tests, a CPU build.
    parts: of the wheel of the first, which is not installed: see `_take`.
    """

    needs: tuple[str, ...]
    also: tuple[str, ...] = ()
    torch: bool = False
    parts: tuple[str, ...] = ()

    @property
    def told(self) -> tuple[str, ...]:
        """The packages whose versions say what ran."""
        return (self.needs[0].partition("[")[0], *self.also)


CLIENTS = {
    "openai": Client(("openai",)),
    "anthropic": Client(("anthropic",)),
    "litellm": Client(("litellm",)),
    "langchain": Client(
        ("langchain-openai", "langchain-anthropic"), ("langchain-anthropic", "langchain-core")
    ),
    "openai_agents": Client(("openai-agents",), ("openai",)),
    "instructor": Client(("instructor", "anthropic"), ("openai", "anthropic")),
    "pydantic_ai": Client(("pydantic-ai-slim[openai,anthropic]",), ("openai", "anthropic")),
    "llama_index": Client(
        ("llama-index-llms-openai-like",), ("llama-index-llms-openai", "llama-index-core")
    ),
    "outlines": Client(("outlines", "openai"), ("openai",)),
    "lm_eval": Client(("lm-eval[api]", "transformers"), ("transformers",)),
    "guidellm": Client(("guidellm[recommended]",), torch=True),
    # The engine around its benchmark needs CUDA's builds to be imported.
    "sglang": Client(
        (
            "sglang",
            "aiohttp",
            "datasets",
            "msgspec",
            "numpy",
            "orjson",
            "pillow",
            "psutil",
            "pybase64",
            "pyzmq",
            "requests",
            "tqdm",
            "transformers",
        ),
        ("transformers",),
        parts=("sglang/benchmark/", "sglang/srt/utils/network.py"),
    ),
}
# What such a part takes from a module that stays out: the line is cut from that module's file.
_LINES = {"sglang/srt/disaggregation/utils.py": "FAKE_BOOTSTRAP_HOST = "}


def known() -> dict[str, dict[str, str]]:
    """Client → package → version, as recorded."""
    found: dict[str, dict[str, str]] = json.loads(VERSIONS.read_text())
    return found


def environment(name: str, newest: bool) -> tuple[Path, dict[str, str]]:
    """The Python of a client's environment, which is made if need be, and the versions in it."""
    client = CLIENTS[name]
    pins = {} if newest else known()[name]
    constraints = [f"{package}=={number}" for package, number in pins.items()]
    if client.torch:
        constraints.append(f"torch=={version('torch')}")
    said = json.dumps([client.needs, constraints, sys.version_info[:2]])
    folder = ROOT / "build" / "clients" / f"{name}-{hashlib.sha256(said.encode()).hexdigest()[:12]}"
    if newest:
        shutil.rmtree(folder, ignore_errors=True)
    python = folder / "bin" / "python"
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        (folder / "constraints.txt").write_text("\n".join(constraints))
        needs = list(client.needs) + (["torch"] if client.torch else [])
        if client.parts:
            _take(folder, client, needs.pop(0), pins)
        _pip(folder, "install", *needs)
        (folder / "done").touch()
    return python, _versions(python, client)


def _pip(folder: Path, *words: str | Path) -> None:
    command = [folder / "bin" / "python", "-m", "pip", *words, "--quiet"]
    command += ["--disable-pip-version-check", "--constraint", folder / "constraints.txt"]
    subprocess.run(command, check=True, timeout=1200)


def _take(folder: Path, client: Client, package: str, pins: dict[str, str]) -> None:
    """Lay the parts of a wheel into the environment, byte by byte, without the rest of it."""
    wheels = folder / "wheels"
    wish = f"{package}=={pins[package]}" if package in pins else package
    _pip(folder, "download", "--no-deps", "--only-binary=:all:", "--dest", wheels, wish)
    (wheel,) = wheels.iterdir()
    (site,) = folder.glob("lib/python*/site-packages")
    told = "-".join(wheel.name.split("-")[:2])
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith((*client.parts, f"{told}.dist-info/")):
                archive.extract(name, site)
        for name, begin in _LINES.items():
            lines = archive.read(name).decode().splitlines(keepends=True)
            path = site / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(line for line in lines if line.startswith(begin)))
    shutil.rmtree(wheels)


def _versions(python: Path, client: Client) -> dict[str, str]:
    code = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
    command = [python, "-c", code, *client.told]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(zip(client.told, told.split(), strict=True))
