"""`plan --explain`: every gate of every kernel, and what would bring a better one."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
from faulty import module, tiny_config

from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.explain import Explained
from ds_runtime.assembly.result import Assembly
from ds_runtime.cli import main
from ds_runtime.cli.flags import add_flags, build
from ds_runtime.cli.parser import Parser
from ds_runtime.config import EngineConfig
from ds_runtime.ops.binding.bind import refusals
from ds_runtime.ops.contract import DeviceInfo, Dims, Facts, Fixable, Gates, gates
from ds_runtime.ops.table import OPS
from ds_runtime.plugins.described_devices import described
from ds_runtime.plugins.manager import load_plugins

ROOT = Path(__file__).parents[2]
V3 = ROOT / "tests" / "core" / "model" / "fixtures" / "deepseek-v3.json"
ANY = Facts(DeviceInfo("any", "Any", "any1"), Dims({}))


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Five layers of it: the others are like the last."""
    folder = tmp_path_factory.mktemp("v3")
    config = {**json.loads(V3.read_text()), "num_hidden_layers": 5}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_gates_speak_one_at_a_time_and_can_be_asked_one_by_one() -> None:
    def a(facts: Facts) -> str | None:
        return "no a"

    def b(facts: Facts) -> str | None:
        return None

    def c(facts: Facts) -> str | None:
        return Fixable("no c", "pass --c")

    both = gates(gates(b, a), c, a)
    assert both == Gates((b, a, c))
    assert both(ANY) == "no a" and gates(b)(ANY) is None


def test_a_fixable_refusal_is_its_sentence() -> None:
    said = Fixable("page size 16, takes 64", "pass --page-size 64")
    assert said == "page size 16, takes 64: pass --page-size 64"
    assert copy.deepcopy(said).remedy == said.remedy == "pass --page-size 64"


KERNELS = """
from ds_runtime.api import Fixable, Promises, gates

def broken(facts): raise KeyError("arch")
def fixed(facts):
    return None if facts.page_size == 64 else Fixable("wants pages of 64", "pass --page-size 64")
def never(facts): return "wants another device"

@hookimpl
def ds_ops():
    op = OPS["silu_mul"]
    return [
        Kernel(op, "many:near", "many", 97, gates(fixed)),
        Kernel(op, "many:far", "many", 98, gates(never, fixed, broken), promises=Promises(False)),
        Kernel(op, "many:behind", "many", -1, gates(fixed)),
    ]
"""


def start(tmp_path: Path, **settings: object) -> Assembly:
    config = EngineConfig(model=str(tiny_config(tmp_path / "m")), plugins=("cpu",), **settings)
    return assemble(config, tuple(settings), [module("many", KERNELS)])


def test_every_gate_is_named_and_the_nearest_miss_has_its_remedy(tmp_path: Path) -> None:
    found = Explained(start(tmp_path, deterministic=True), "silu_mul")
    said = {r["kernel"]: list(r["verdicts"]) for r in found.rows()}
    assert said["many.far"] == [
        "refused: not deterministic: leave --deterministic out; wants another device; "
        "wants pages of 64: pass --page-size 64; its refuse() raised KeyError: 'arch'"
    ]
    (miss,) = found.misses()
    assert (miss.kernel, miss.remedies) == ("many.near", ("pass --page-size 64",))
    assert Explained(start(tmp_path, page_size=64), "silu_mul").misses() == []


def test_the_command_ends_with_what_to_do(capsys: pytest.CaptureFixture[str], v3: str) -> None:
    args = ["plan", "--model", v3, "--device", "h200", "--page-size", "16"]
    assert main([*args, "--explain", "mla_decode"]) == 0
    assert capsys.readouterr().out.splitlines()[-3:-1] == [
        "nearest misses:",
        "  flash_mla.MlaDecode: page size 16, takes 64: pass --page-size 64",
    ]
    assert main(["plan", "--model", v3, "--device", "h200", "--explain", "route"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no setting brings a better kernel"


PROVOKING = (
    ("--page-size", "16"),
    ("--kv-cache-dtype", "fp8"),
    ("--dtype", "float32"),
    ("--dtype", "float16"),
    ("--deterministic",),
)


def configured(args: list[str]) -> tuple[EngineConfig, frozenset[str]]:
    parser = Parser()
    add_flags(parser, EngineConfig)
    return build(EngineConfig, parser.parse_args(args))


def test_every_remedy_that_is_a_flag_removes_its_refusal(v3: str) -> None:
    """Over described devices: what the sentence says to pass is passed, and the kernel accepts."""
    tried = 0
    for device in ("h200", "b200", "a100"):
        for flags in PROVOKING:
            args = ["--model", v3, *flags]
            before = assemble(*configured(args), device=device)
            for op in OPS:
                for miss in Explained(before, op).misses():
                    passed = [r.removeprefix("pass ").split() for r in miss.remedies]
                    if any(words[0][:2] != "--" for words in passed):
                        continue
                    more = [*args, *(word for words in passed for word in words)]
                    after = Explained(assemble(*configured(more), device=device), op)
                    (row,) = (r for r in after.rows() if r["kernel"] == miss.kernel)
                    assert not any(v.startswith("refused") for v in row["verdicts"]), (miss, row)
                    tried += 1
    assert tried >= 3


def test_no_gate_of_the_tree_raises_whatever_the_facts() -> None:
    """Gates are asked one by one, so none may lean on what another has seen before."""
    plugins = load_plugins()
    devices = [platform.info() for _, platform in described(plugins)] + [ANY.device]
    for device in devices:
        for dims in (Dims({}), Dims({"kv_lora": 512, "qk_rope": 64, "qk_nope": 128, "v": 128})):
            for shape in ((), (576, 7168), (256, 2048, 7168)):
                facts = Facts(device, dims, "bfloat16", "float8_e4m3fn", 16, shape=shape)
                for kernel in plugins.offers(facts).kernels:
                    assert "raised" not in " ".join(refusals(kernel, facts)), kernel.name


def test_flags_that_remedies_name_exist() -> None:
    parser = Parser()
    add_flags(parser, EngineConfig)
    ops = ROOT / "core/ds_runtime/ops"
    files = [
        *ROOT.glob("plugins/*/ds_runtime_*/**/*.py"),
        ops / "binding" / "bind.py",
        ops / "checks.py",
    ]
    named = {
        flag
        for file in files
        for text in re.findall(r'"(?:pass|leave) (--[^"]*)', file.read_text())
        for flag in re.findall(r"--[a-z][a-z-]+", text)
    }
    assert {"--page-size", "--kv-cache-dtype", "--disable-graph"} <= named
    assert named <= parser._option_string_actions.keys()
