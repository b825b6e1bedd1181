"""The command lines for DeepSeek that other engines' documents show: each starts here, or says in
one sentence why not and what to use.
"""

from __future__ import annotations

import shlex
import shutil
from functools import cache
from pathlib import Path

import pytest

from ds_runtime.assembly.assemble import assemble
from ds_runtime.cli import _add_plugin_flags, build_parser
from ds_runtime.cli.flags import build
from ds_runtime.cli.known import settle
from ds_runtime.cli.run.serve import configs
from ds_runtime.config import EngineConfig
from ds_runtime.errors import DsRuntimeError
from ds_runtime.plugins.manager import load_plugins

HERE = Path(__file__).parent
VERBS = {
    "sglang.launch_server": ["serve"],
    "sglang.bench_one_batch": ["bench", "one-batch"],
    "sglang.bench_serving": ["bench", "serving"],
}
DEVICES = {"--device npu": "910b", "trtllm_mla": "b200", "tilelang": "mi300x"}
LOCAL = {"deepseek-w4a8": "deepseek-r1", "SGLang/DeepSeek-V3-NextN": "deepseek-v3"}


def cases():
    """(line, what comes of it) of `lines.txt`."""
    found = (HERE / "lines.txt").read_text().splitlines()
    lines = [line for line in found if line and not line.startswith("#")]
    return [
        (line, said.removeprefix("  → "))
        for line, said in zip(lines[::2], lines[1::2], strict=True)
    ]


def command(line, tmp_path):
    """The arguments of `ds-runtime` for a line; models are folders with their config alone."""
    words = shlex.split(line)
    verb = VERBS.get(words[2], ["serve"])
    args = words[2:] if words[0] == "vllm" else words[3:]
    for i, word in enumerate(args):
        name = LOCAL.get(word, word.removeprefix("deepseek-ai/").lower())
        config = HERE / "configs" / f"{name}.json"
        if config.is_file():
            folder = tmp_path / word.replace("/", "_")
            folder.mkdir(exist_ok=True)
            shutil.copy(config, folder / "config.json")
            args[i] = str(folder)
    return [*verb, *args]


@cache
def parser():
    """Made once: parsing leaves it as it is."""
    made, _ = build_parser()
    _add_plugin_flags(made, load_plugins())
    return made


@pytest.mark.parametrize(("line", "said"), cases(), ids=lambda text: text[-60:])
def test_it_starts_or_says_why_not(line, said, tmp_path):
    try:
        namespace = parser().parse_args(command(line, tmp_path))
        notes = settle(namespace)
        if namespace.run.__module__ == "ds_runtime.cli.run.serve":
            config, _, explicit = configs(namespace)
        elif "bench_serving" in line:
            assert said == "runs"
            return
        else:
            config, explicit = build(EngineConfig, namespace)
        device = next((d for word, d in DEVICES.items() if word in line), "h200")
        assemble(config, tuple(explicit), device=device)
        found = f"starts with --tp {config.tp}"
        found += f" --dp {config.dp}" * (config.dp is not None)
        found += " --enable-dp-attention" * config.enable_dp_attention
        assert not notes or all(": " in note and "\n" not in note for note in notes)
    except DsRuntimeError as e:
        found = str(e)
    assert found.startswith(said), found


def test_every_line_is_there():
    assert len(cases()) >= 36
