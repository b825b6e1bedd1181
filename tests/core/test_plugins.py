"""Plugins in isolation: whatever one does wrong, it is named, dropped whole, and others serve."""

from __future__ import annotations

from pathlib import Path

import pytest
from faulty import install, module, tiny_config

from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.result import Assembly
from ds_runtime.config import EngineConfig
from ds_runtime.engine.banner import warnings
from ds_runtime.errors import ConfigError, PluginError, UnsupportedError
from ds_runtime.ops.contract import DeviceInfo, Dims, Facts
from ds_runtime.plugins.hookspecs import HOOKS
from ds_runtime.plugins.manager import Plugins, load_plugins
from ds_runtime.plugins.select_platform import select_platform

FACTS = Facts(DeviceInfo("cpu", "any", "any"), Dims({"hidden": 64}))

AT_LOAD = {
    "raises at import": ("raise OSError('driver 12 is too old')", "OSError: driver 12 is too old"),
    "syntax": ("def f(:", "SyntaxError"),
    "misspelled hook": ("@hookimpl\ndef ds_platfrom(): ...", "ds_platfrom"),
    "wrong argument": (
        "@hookimpl\ndef ds_ops(fact): return []",
        "ds_ops asks for the argument 'fact'; it may take facts",
    ),
    "argument of none": (
        "@hookimpl\ndef ds_platform(facts): return None",
        "ds_platform asks for the argument 'facts'; it takes none",
    ),
    "leaves": ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
}

KERNEL = "Kernel(OPS['rms_norm'], 'bad:{}', {!r})"
IN_OFFERS = {
    "raises": ("raise ValueError('no such card')", "ds_ops raised ValueError: no such card"),
    "leaves": ("raise SystemExit(3)", "ds_ops raised SystemExit: 3"),
    "no sequence": (f"return {KERNEL.format('x', 'bad')}", "ds_ops returned no sequence"),
    "generator that raises": ("yield 1; raise KeyError('late')", "ds_ops returned no sequence"),
    "not an offer": ("return ['rms_norm']", "'rms_norm', which is no Kernel"),
    "unknown op": (
        "return [Kernel(Op('', {}, '', name='warp'), 'bad:x', 'bad')]",
        "op 'warp', which does not exist",
    ),
    "another's name": (
        f"return [{KERNEL.format('x', 'reference')}]",
        "belongs to plugin reference",
    ),
    "no such rehearsal": (
        f"return [{KERNEL[:-1]}, compiles=Compiles(rehearsal='nope:g'))]".format("x", "bad"),
        "offers bad.x with compiles.rehearsal 'nope:g': there is no module nope",
    ),
    "nothing ahead below a package": (
        f"return [{KERNEL[:-1]}, compiles=Compiles('json.nope.further:g'))]".format("x", "bad"),
        "compiles.ahead 'json.nope.further:g': there is no module json.nope.further",
    ),
    "no such variant": (
        f"return [{KERNEL[:-1]}, compiles=Compiles(variant='json:g'))]".format("x", "bad"),
        "compiles.variant 'json:g': module json has no g",
    ),
    "compiles by a number": ("Compiles(ahead=3)", "Compiles: ahead is 3: give a lazy"),
    "copies as text": (
        "Footprint(copies='2')",
        "Footprint: copies is '2': give a finite number above 0",
    ),
    "one name twice": (f"return [{KERNEL.format('x', 'bad')}] * 2", "two kernels named bad.x"),
}

GOOD = """
@hookimpl
def ds_ops():
    return [Kernel(OPS['rms_norm'], 'good_kernels:rms_norm', 'good', rank=12)]
"""

PLATFORM = """
class Mine(Platform):
    name = {name!r}
    score = {score}
    api_version = {api}
    def info(self, rank=0): return DeviceInfo('cpu', 'Mine', 'mine1')
    def device(self, rank=0): raise RuntimeError
    def memory(self, rank=0): return MemoryInfo(1, 1)

@hookimpl
def ds_platform():
    return Mine()
"""


def platform(name: str, score: int = 99, api: int = 1) -> str:
    return PLATFORM.format(name=name, score=score, api=api)


def refused(plugins: Plugins, name: str) -> str:
    """The refusal of a plugin of which nothing is left."""
    refusal = plugins.reports[name].refusal
    assert refusal is not None
    assert plugins.manager.get_plugin(name) is None
    assert all(name not in plugins.implementing(hook) for hook in HOOKS)
    return str(refusal)


@pytest.mark.parametrize("case", AT_LOAD)
def test_a_plugin_that_cannot_be_loaded_is_named_and_leaves_nothing(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said = AT_LOAD[case]
    good = "@hookimpl\ndef ds_topk(facts): return []\n"  # valid hooks beside the fault: not half
    install(tmp_path / "a", monkeypatch, good + code, "bad", "bad-dist")
    install(tmp_path / "b", monkeypatch, GOOD, "good", "good-dist")
    plugins = load_plugins()
    assert refused(plugins, "bad").startswith("broken: ")
    assert said in refused(plugins, "bad")
    assert "Traceback" in plugins.reports["bad"].refusal.traceback
    assert "good.rms_norm" in {k.name for k in plugins.offers(FACTS).kernels}
    assert "reference.rms_norm" in {k.name for k in plugins.offers(FACTS).kernels}
    report = plugins.reports["good"]
    assert (report.distribution, report.version, report.third_party) == ("good-dist", "2.5", True)


@pytest.mark.parametrize("case", IN_OFFERS)
def test_a_plugin_with_one_bad_offer_offers_nothing(case: str) -> None:
    code, said = IN_OFFERS[case]
    valid = f"@hookimpl\ndef ds_moe(facts):\n    return [{KERNEL.format('fine', 'bad')}]\n"
    bad = module(
        "bad", f"from ds_runtime.api import Op\n{valid}@hookimpl\ndef ds_ops():\n    {code}"
    )
    plugins = load_plugins(["cpu"], [bad, module("good", GOOD)])
    offers = plugins.offers(FACTS)
    assert said in refused(plugins, "bad")
    assert "bad" not in {k.provider for k in offers.kernels}
    assert {"good", "reference"} <= {k.provider for k in offers.kernels}
    assert offers.third_party == {"good"}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("@hookimpl\ndef ds_platform(): return 'cpu'", "ds_platform returned 'cpu'"),
        ("@hookimpl\ndef ds_platform(): raise OSError('bus error')", "OSError: bus error"),
        (
            "class P(Platform):\n  name = 'p'\n@hookimpl\ndef ds_platform(): return P()",
            "TypeError: Can't instantiate abstract class P",
        ),
    ],
)
def test_a_platform_that_is_none_is_broken(code: str, said: str) -> None:
    plugins = load_plugins(["cpu"], [module("bad", code)])
    found, refusal = plugins.platforms()["bad"]
    assert found is None
    assert refusal is not None and refusal.kind == "broken"
    assert said in refused(plugins, "bad")
    with pytest.raises(PluginError, match=r"plugin bad is broken.*--platform"):
        select_platform(plugins)
    assert select_platform(plugins, "cpu")[0].name == "cpu"


def test_a_platform_for_another_api_is_refused_and_others_serve() -> None:
    plugins = load_plugins(["cpu"], [module("old", platform("old", api=99))])
    chosen, refusals = select_platform(plugins)
    assert chosen.name == "cpu"
    assert dict(refusals)["old"].kind == "unsupported"
    assert "plugin API 99, this runtime has 1" in str(dict(refusals)["old"])


def test_selection_by_score_by_flag_and_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = load_plugins(["cpu"], [module("mine", platform("mine"))])
    assert select_platform(plugins)[0].name == "mine"
    assert select_platform(plugins, "cpu")[0].name == "cpu"
    monkeypatch.setenv("DS_PLATFORM", "cpu")
    assert select_platform(plugins)[0].name == "cpu"
    assert select_platform(plugins, "mine")[0].name == "mine"
    monkeypatch.setenv("DS_PLATFORM", "cqu")
    with pytest.raises(ConfigError, match="DS_PLATFORM 'cqu': no such platform; did you mean 'cpu"):
        select_platform(plugins)
    monkeypatch.setenv("DS_PLATFORM", "")
    assert select_platform(plugins)[0].name == "mine"
    with pytest.raises(ConfigError, match="no such platform; did you mean 'mine'"):
        select_platform(plugins, "mime")


def test_hardware_that_is_absent_does_not_stop_the_start_unless_named() -> None:
    code = "@hookimpl\ndef ds_platform(): return Refusal('absent', 'no card on the bus')"
    plugins = load_plugins(["cpu"], [module("card", code)])
    chosen, refusals = select_platform(plugins)
    assert (chosen.name, str(dict(refusals)["card"])) == ("cpu", "absent: no card on the bus")
    with pytest.raises(UnsupportedError, match="--platform card: absent: no card on the bus"):
        select_platform(plugins, "card")


def test_loading_only_some_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(load_plugins(["cpu"]).reports) == {"checkpoints", "compiled", "cpu", "reference"}
    monkeypatch.setenv("DS_PLUGINS", "cpu, triton")
    assert set(load_plugins().reports) == {"checkpoints", "compiled", "cpu", "reference", "triton"}
    assert set(load_plugins(["cpu"]).reports) == {"checkpoints", "compiled", "cpu", "reference"}
    monkeypatch.setenv("DS_PLUGINS", "cpi")
    with pytest.raises(ConfigError, match="DS_PLUGINS 'cpi': no such plugin; did you mean 'cpu'"):
        load_plugins()
    assert "DS_PLUGINS 'cpi'" in load_plugins(lenient=True).unknown[0]
    with pytest.raises(ConfigError, match=r"no such plugin; installed: .*cpu.*cuda"):
        load_plugins(["zzzzzz"])


def test_a_third_party_cannot_take_the_name_of_a_shipped_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "a", monkeypatch, GOOD, "cpu", "aaa-dist")
    install(tmp_path / "b", monkeypatch, "", "reference", "other-dist")
    reports = load_plugins().reports
    assert reports["cpu"].distribution == reports["reference"].distribution == "ds-runtime"
    assert reports["cpu@aaa-dist"].third_party
    assert reports["reference@other-dist"].third_party


@pytest.mark.parametrize(("names", "said"), [(["reference"], "reference"), ([], "''")])
def test_a_restriction_that_leaves_no_platform_is_named(names: list[str], said: str) -> None:
    plugins = load_plugins(names)
    limit = f"--plugins {said} loads only checkpoints, compiled, reference: add the plugin that "
    limit += "brings a platform"
    with pytest.raises(UnsupportedError, match=f"^no platform works here: {limit}$"):
        select_platform(plugins)
    with pytest.raises(ConfigError, match=f"--platform 'cpu': no such platform; {limit}"):
        select_platform(plugins, "cpu")


def test_one_plugin_given_twice_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'good' is given twice"):
        load_plugins(["cpu"], [module("good", GOOD), module("good", GOOD)])


def test_tracing_names_every_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plugins = load_plugins(["cpu"], [module("good", GOOD)])
    monkeypatch.setenv("DS_TRACE_PLUGINS", "1")
    before = plugins.calls
    plugins.call("ds_ops", only="good", facts=FACTS)
    assert capsys.readouterr().err == "plugin call: good.ds_ops\n"
    assert plugins.calls == before + 1


# ds_defaults and the start-up as a whole


def start(
    tmp_path: Path, *plugins: object, explicit: tuple[str, ...] = (), **set_: object
) -> Assembly:
    config = EngineConfig(model=str(tiny_config(tmp_path / "m")), plugins=("cpu",), **set_)
    return assemble(config, explicit, plugins)


def wish(name: str, field: str, value: object) -> object:
    return module(
        name,
        f"@hookimpl\ndef ds_defaults(): return [Change({field!r}, {value!r}, 'it is faster')]",
    )


def test_a_wish_is_granted_and_logged(tmp_path: Path) -> None:
    found = start(tmp_path, wish("a", "page_size", 64), wish("b", "page_size", 64))
    assert found.config.page_size == found.facts.page_size == found.plan.page_size == 64
    assert found.plan.changes == (("page_size", "16 → 64", "a", "it is faster"),)


def test_the_users_own_setting_wins_even_over_a_conflict(tmp_path: Path) -> None:
    wishes = wish("a", "page_size", 64), wish("b", "page_size", 128)
    with pytest.raises(ConfigError, match="plugins a and b ask for --page-size 64 and 128: set"):
        start(tmp_path, *wishes)
    found = start(tmp_path, *wishes, explicit=("page_size",), page_size=32)
    assert (found.config.page_size, found.plan.changes) == (32, ())


def test_wishes_for_fusions_hold_for_those_that_the_user_does_not_name(tmp_path: Path) -> None:
    wishes = wish("a", "fusion", ("qkv_a=off",)), wish("b", "fusion", ("mla_inputs=off",))
    found = start(tmp_path, *wishes)
    assert found.config.fusions == {"qkv_a": False, "mla_inputs": False}
    ((field, said, plugins, because),) = found.plan.changes
    assert (field, plugins, because) == ("fusion", "a, b", "it is faster")
    assert said == "() → ('qkv_a=off', 'mla_inputs=off')"
    for state in ("on", "off"):
        given = ("silu_mul_quantize=off", f"qkv_a={state}")
        found = start(tmp_path, *wishes, explicit=("fusion",), fusion=given)
        assert found.config.fusion == (*given, "mla_inputs=off")
    given = ("qkv_a=on", "mla_inputs=on")
    found = start(tmp_path, *wishes, explicit=("fusion",), fusion=given)
    assert (found.config.fusion, found.plan.changes) == (given, ())


def test_plugins_that_disagree_on_a_fusion_are_an_error_until_the_user_names_it(
    tmp_path: Path,
) -> None:
    wishes = wish("a", "fusion", ("qkv_a=off",)), wish("b", "fusion", ("qkv_a=on",))
    with pytest.raises(
        ConfigError, match="a and b ask for --fusion qkv_a 'off' and 'on': set --fus"
    ):
        start(tmp_path, *wishes)
    found = start(tmp_path, *wishes, explicit=("fusion",), fusion=("qkv_a=off",))
    assert found.config.fusion == ("qkv_a=off",)


def test_a_fusion_that_is_pinned_and_switched_off_is_a_contradiction(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--pin .*: --fusion add_rms_norm=off contradicts it: leave one"
    ):
        start(tmp_path, pin=("add_rms_norm=reference",), fusion=("add_rms_norm=off",))


def test_wishes_follow_the_page_size_in_force(tmp_path: Path) -> None:
    """That of the user, or the one that a plugin wishes for."""
    code = """@hookimpl
def ds_defaults(config, facts):
    assert config.page_size == facts.page_size
    return [Change("page_size", 64, "tiles"), Change("max_step_tokens", facts.page_size, "so")]
"""
    for explicit, page in (((), 64), (("page_size",), 16)):
        found = start(tmp_path, module("a", code), explicit=explicit)
        assert (found.config.page_size, found.config.max_step_tokens) == (page, page)


@pytest.mark.parametrize("field", ["page_sise", "platform", "tp", "plugins"])
def test_a_wish_for_what_is_decided_or_unknown_names_the_plugin(tmp_path: Path, field: str) -> None:
    with pytest.raises(PluginError, match=f"plugin a: ds_defaults may not change '{field}'"):
        start(tmp_path, wish("a", field, 2))


def test_a_wish_that_is_no_change(tmp_path: Path) -> None:
    bad = module("a", "@hookimpl\ndef ds_defaults(): return [('page_size', 64)]")
    with pytest.raises(PluginError, match=r"plugin a: ds_defaults returned .*no Change"):
        start(tmp_path, bad)


def test_a_broken_kernel_plugin_is_reported_and_the_rest_serves(tmp_path: Path) -> None:
    found = start(tmp_path, module("bad", "@hookimpl\ndef ds_ops(): raise OSError('no card')"))
    assert found.platform.name == "cpu"
    assert str(dict(found.others)["bad"]) == "broken: ds_ops raised OSError: no card"
    said = "plugin bad is left out: broken: ds_ops raised OSError: no card"
    assert found.left_out() == [said]
    assert f"warning: {said}" in warnings(found)


def test_the_platforms_own_plugin_may_not_break(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = platform("mine") + "\n@hookimpl\ndef ds_ops(): raise OSError('no card')\n"
    install(tmp_path / "s", monkeypatch, code, "mine", "mine-dist")
    config = EngineConfig(model=str(tiny_config(tmp_path / "m")), plugins=("mine",))
    with pytest.raises(PluginError, match="plugin mine, which brings platform mine, is broken"):
        assemble(config)


def test_a_platform_whose_device_facts_fail(tmp_path: Path) -> None:
    code = platform("mine").replace("return DeviceInfo('cpu', 'Mine', 'mine1')", "raise OSError(5)")
    with pytest.raises(PluginError, match=r"platform mine: info.. raised OSError: 5"):
        start(tmp_path, module("mine", code))
