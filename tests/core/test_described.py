"""Devices described as data: a plugin's devices.json decides without the device."""

from __future__ import annotations

import importlib
import json
import sys

import pytest

from ds_runtime.assembly.assemble import assemble
from ds_runtime.cli import main
from ds_runtime.config import EngineConfig
from ds_runtime.errors import ConfigError, PluginError, UnsupportedError
from ds_runtime.ops.contract import DeviceInfo
from ds_runtime.platform.contract import Platform
from ds_runtime.plugins.described_devices import describe, described
from ds_runtime.plugins.manager import load_plugins
from ds_runtime.plugins.select_platform import select_platform
from ds_runtime_kit import support

SOURCE = """
from ds_runtime.api import OPS, Kernel, Platform, Refusal, hookimpl

class AcmePlatform(Platform):
    name = "acme"
    asynchronous = True
    captures = True

    def info(self, rank=0):
        raise OSError("there is no device")

    device = memory = info

def refuse(facts):
    return None if "acme_lib.silu" in facts.device.features else "needs acme_lib.silu"

@hookimpl
def ds_platform():
    return Refusal("absent", "no Acme device")

@hookimpl
def ds_ops(facts):
    fn = "ds_runtime.ops.reference.activation:silu_mul"
    return [Kernel(OPS["silu_mul"], fn, "acme", 30, refuse)]
"""
X1 = {
    "name": "Acme X1",
    "arch": "acme1",
    "type": "acme",
    "memory_gb": 96,
    "cores": 64,
    "fast_dtypes": ["bfloat16"],
    "features": ["fp8"],
}
DEVICES = {
    "platform": "acme_devices:AcmePlatform",
    "installed": ["acme_lib", "acme_lib.silu", "acme_library"],
    "devices": {"x1": X1, "x2": {**X1, "name": "Acme X2", "arch": "acme2"}},
}


@pytest.fixture
def acme(tmp_path, monkeypatch):
    def make(devices=DEVICES):
        folder = tmp_path / "acme_devices"
        folder.mkdir()
        (folder / "__init__.py").write_text(SOURCE)
        (folder / "devices.json").write_text(json.dumps(devices))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "acme_devices", raising=False)
        return importlib.import_module("acme_devices")

    return make


@pytest.fixture(params=[1, 4096], ids=lambda cores: f"{cores} cores here")
def cores_here(request, monkeypatch):
    """A machine of another size: nothing of a described one may follow it."""
    monkeypatch.setattr("os.cpu_count", lambda: request.param)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(request.param)), raising=False)


@pytest.mark.usefixtures("cores_here")
@pytest.mark.parametrize(
    ("device", "on_host", "cores"),
    [
        (name, platform.on_host, platform.info().cores)
        for name, platform in described(load_plugins())
    ],
)
def test_threads_are_those_of_the_machine_that_is_described(device, on_host, cores):
    """Of a device that computes itself the host is not described: it checks its own threads."""
    most = max(64, 4 * cores) if on_host else 1 << 20
    for threads in (None, 1, cores, most):
        config = EngineConfig() if threads is None else EngineConfig(threads=threads)
        planned = assemble(config, device=device).facts.threads
        assert planned == ((threads or cores) if on_host else 1)
    if on_host:
        with pytest.raises(ConfigError, match=rf"at most {most} per rank; .* has {cores} cores"):
            assemble(EngineConfig(threads=most + 1), device=device)


@pytest.mark.parametrize("cores", [1, 4096])
def test_threads_of_this_machine_follow_its_cores(cores, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    most = max(64, 4 * cores)
    assert assemble(EngineConfig(threads=most, platform="cpu")).config.threads == most
    with pytest.raises(ConfigError, match=f"at most {most} per rank; this machine has {cores} "):
        assemble(EngineConfig(threads=most + 1, platform="cpu"))


@pytest.mark.parametrize("said", ["Acme cards", None])
def test_a_device_is_of_the_family_that_its_platform_says_or_of_its_name(acme, said):
    platform = {"name": "acme"} if said is None else {"name": "acme", "family": said}
    module = acme({**DEVICES, "platform": platform})
    assert describe(load_plugins((), [module]), "x1").device_info().family == (said or "acme")


@pytest.mark.parametrize(
    ("said", "kind", "family"),
    [
        ("Acme cards", "cuda", "Acme cards"),
        ("", "cuda", "acme"),
        ("", "cpu", "acme"),  # the host stands in for it
        ("", "acme", "acme"),
    ],
)
def test_so_is_one_that_is_here(said, kind, family):
    class Here(Platform):
        name = "acme"

        def info(self, rank=0):
            return DeviceInfo(kind, "Acme X1", "acme1")

        device = memory = info

    Here.family = said
    assert Here().device_info().family == family


def test_links_to_other_devices_are_facts_of_several_ranks(acme):
    linked = {**X1, "link": "fast", "link_gb_s": 450, "multicast": True}
    module = acme({**DEVICES, "devices": {"x1": X1, "x3": linked}})
    plugins = load_plugins((), [module])
    bare, info = (describe(plugins, name).info() for name in ("x1", "x3"))
    assert (bare.link, bare.link_bandwidth, bare.multicast) == ("", 0, False)
    assert (info.link, info.link_bandwidth, info.multicast) == ("fast", 450 * 10**9, True)
    for tp, wanted in ((1, ("none", False)), (2, ("fast", True))):
        facts = assemble(EngineConfig(tp=tp), device="x3", loaded=plugins).facts
        assert (facts.interconnect, facts.multicast) == wanted
        assert (facts.ranks["tp"], facts.ranks["ep"], facts.hosts) == (tp, 1, 1)


@pytest.mark.parametrize("said", [True, False, None])
def test_a_device_that_nothing_has_run_on_is_marked(acme, said, capsys):
    x3 = X1 if said is None else {**X1, "unrun": said}
    module = acme({**DEVICES, "devices": {"x3": x3}})
    assert describe(load_plugins((), [module]), "x3").unrun == bool(said)
    page = support.as_markdown([], load_plugins((), [module]))
    assert f"| x3 | Acme X1, acme1{', *unrun*' if said else ''} |" in page


def test_a_described_device_has_its_platform_and_its_software(acme):
    plugins = load_plugins((), [acme()])
    for wanted in ("x2", "X2", "acme2"):
        platform = describe(plugins, wanted)
        info = platform.info()
        assert (platform.name, info.name, info.arch) == ("acme", "Acme X2", "acme2")
        assert info.memory == 96 * 10**9 and info.cores == 64
        assert info.features == {"fp8", "acme_lib", "acme_lib.silu", "acme_library"}
        assert platform.asynchronous and platform.captures
        assert platform.memory().free == info.memory
        with pytest.raises(UnsupportedError, match="Acme X2 is described, not here"):
            platform.device()


def test_what_it_is_to_lack_goes_with_its_parts(acme):
    plugins = load_plugins((), [acme()])
    platform = describe(plugins, "x1", ["acme_lib"])
    assert platform.info().features == {"fp8", "acme_library"}
    with pytest.raises(ConfigError, match="--without 'fp9': Acme X1 has no such feature; it has"):
        describe(plugins, "x1", ["fp9"])


def test_unknown_devices_get_a_hint(acme):
    plugins = load_plugins((), [acme()])
    with pytest.raises(ConfigError, match=r"--device 'x9': no plugin describes it; .*x1"):
        describe(plugins, "x9")
    with pytest.raises(ConfigError, match="known: none"):
        describe(load_plugins(()), "x1")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"platform": "acme_devices:Nothing"}, "AttributeError"),
        ({"devices": {"x1": {k: v for k, v in X1.items() if k != "arch"}}}, r"missing \['arch'\]"),
        ({"devices": {"x1": {**X1, "speed": 3}}}, r"unknown \['speed'\]"),
        ({"devices": 3}, "AttributeError"),
    ],
)
def test_a_broken_file_names_its_plugin(acme, change, said):
    plugins = load_plugins((), [acme({**DEVICES, **change})])
    with pytest.raises(PluginError, match=f"plugin acme_devices: devices.json: .*{said}"):
        describe(plugins, "x1")
    with pytest.raises(ConfigError, match="--platform 'cpuu': no such platform; "):
        select_platform(plugins, "cpuu")


def test_a_plan_for_a_device_that_is_not_here(acme):
    config, plugin, chosen = EngineConfig(plugins=()), acme(), {}
    for without in ((), ("acme_lib.silu",)):
        assembly = assemble(config, (), [plugin], device="x1", without=without)
        assert (assembly.plan.platform, assembly.plan.arch) == ("acme", "acme1")
        assert assembly.config.dtype == "bfloat16"
        (row,) = {r.kernel for r in assembly.plan.rows if r.op == "silu_mul"}
        chosen[without] = row
        assert any("not safe under graph capture: " in c[3] for c in assembly.plan.changes)
    assert chosen == {(): "acme.silu_mul", ("acme_lib.silu",): "reference.silu_mul"}


def test_a_device_is_found_by_the_name_that_plans_print_and_drivers_use():
    plugins = load_plugins()
    for name, platform in described(plugins):
        for said in (platform.info().name, platform.info().name.upper()):
            assert describe(plugins, said).info().name == platform.info().name, name
    for said, near in (("NVIDIA H100 PCIe", "h100"), ("AMD MI300X VF", "mi300x")):
        with pytest.raises(ConfigError, match=f"did you mean '{near}'"):
            describe(plugins, said)


def test_the_command_says_what_the_device_is_taken_to_be(capsys):
    assert main(["plan", "--device", "sm100", "--without", "triton"]) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first.startswith("described device NVIDIA B200: 148 cores, with bf16, ")
    assert "triton" not in first and "(sm100)" in second
    assert main(["plan", "--device", "sm100", "--platform", "cpu"]) == 1
    said = "--platform cpu: --device sm100 is of platform cuda: leave one of them out"
    assert said in capsys.readouterr().err
    assert main(["plan", "--device", "sm100", "--platform", "cuda"]) == 0
    capsys.readouterr()
    assert main(["plan", "--device", "sm100", "--without", "cuda_bindings"]) == 1
    assert "did you mean 'cuda.bindings'?" in capsys.readouterr().err
    assert main(["plan", "--device", "h200", "--without", "cuda.bindings"]) == 0
    assert "cuda.bindings" not in capsys.readouterr().out.splitlines()[0]
    assert main(["plan", "--device", "h200", "--without", "fp8"]) == 1
    assert "--without 'fp8': NVIDIA H200 computes in it" in capsys.readouterr().err
    assert main(["plan", "--without", "triton"]) == 1
    assert "--without: only a device that --device describes" in capsys.readouterr().err
