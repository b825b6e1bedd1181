"""Start-up, in order: platform → device → model → defaults → frozen config → offers → binding.

Torch-free: `ds-runtime plan` and `doctor` stop here; the engine goes on and loads weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ds_runtime import __version__
from ds_runtime.config import EngineConfig, with_changes
from ds_runtime.errors import ConfigError, PluginError, UnsupportedError, shown
from ds_runtime.model.config import ModelConfig
from ds_runtime.model.hf import load_config
from ds_runtime.model.hub import resolve_model
from ds_runtime.model.sites import model_sites
from ds_runtime.ops.bind import Binding, Pin, decide_all
from ds_runtime.ops.spec import Change, DeviceInfo, Facts, Offers, QuantLoader, Refusal
from ds_runtime.plan import Plan, check_against, make_rows
from ds_runtime.platform.select import select_platform
from ds_runtime.platform.spec import Platform
from ds_runtime.plugins import Plugins, load_plugins

_THREADS = 64  # per rank are fine on the smallest machine
DECIDED = frozenset({"model", "platform", "plugins", "tp", "pin", "plan"})  # before ds_defaults


@dataclass(frozen=True)
class Assembly:
    """Everything decided before the first weight is read."""

    config: EngineConfig
    folder: Path
    model: ModelConfig
    platform: Platform
    device: DeviceInfo
    facts: Facts
    loader: QuantLoader
    binding: Binding
    plan: Plan
    plugins: Plugins
    offers: Offers
    others: tuple[tuple[str, Refusal], ...]  # plugins whose platform does not run here, or broken

    def left_out(self) -> list[str]:
        """A sentence per broken plugin: nothing of it was bound."""
        broken = [(name, r) for name, r in self.others if r.kind == "broken"]
        return [f"plugin {name} is left out: {refusal}" for name, refusal in broken]


def assemble(
    config: EngineConfig, explicit: Iterable[str] = (), extra_plugins: Iterable[Any] = ()
) -> Assembly:
    """Decide everything for `config`. `explicit` are the fields that the user set.

    Raises ConfigError, UnsupportedError or CheckpointError; nothing has been allocated then.
    """
    plugins = load_plugins(config.plugins, extra_plugins)
    platform, others = select_platform(plugins, config.platform)
    device = _device(platform)
    folder = resolve_model(config.model)
    model = load_config(folder)
    model.check_tp(config.tp)
    config = _auto_dtype(config, model, device)
    facts = _facts(config, model, device)
    config, changes = _apply_defaults(config, facts, frozenset(explicit), plugins)
    _check_threads(config)
    facts = _facts(config, model, device)
    offers = plugins.offers(facts)
    _check_platform_alive(platform, plugins)
    loader = find_loader(offers, model, str(folder / "config.json"))

    def format_of(module: str) -> str:
        return loader.format_of(model.quantization, module)

    sites = model_sites(model, format_of, config.tp)
    binding = decide_all(sites, offers, facts, [Pin.parse(p) for p in config.pin])
    plan = Plan(
        model=folder.name,
        platform=platform.name,
        arch=device.arch,
        dtype=config.dtype,
        kv_layout=binding.layout.tag,
        page_size=config.page_size,
        tp=config.tp,
        rows=make_rows(binding.decisions),
        changes=tuple(changes),
        versions=_versions(plugins),
    )
    _check_strict(config, plan)
    if config.plan:
        check_against(plan, config.plan)
    return Assembly(
        config=config,
        folder=folder,
        model=model,
        platform=platform,
        device=device,
        facts=facts,
        loader=loader,
        binding=binding,
        plan=plan,
        plugins=plugins,
        offers=offers,
        others=_refused(plugins, others),
    )


def _device(platform: Platform) -> DeviceInfo:
    try:
        return platform.info(0)
    except Exception as e:
        raise PluginError(
            f"platform {platform.name}: info() raised {type(e).__name__}: {e}; name another with "
            "--platform"
        ) from e


def _check_threads(config: EngineConfig) -> None:
    """Thread libraries crash, without a word, on numbers that no machine can mean."""
    cores = os.cpu_count() or 1
    most = max(_THREADS, 4 * cores)
    if config.threads is not None and config.threads > most:
        raise ConfigError(
            f"--threads {config.threads}: at most {most} per rank; this machine has {cores} cores, "
            "and more threads than cores are slower"
        )


def _check_platform_alive(platform: Platform, plugins: Plugins) -> None:
    """A platform whose own plugin broke would run on references alone: refuse instead."""
    module = type(platform).__module__.partition(".")[0]
    for report in plugins.reports.values():
        if report.refusal is not None and report.module.partition(".")[0] == module:
            raise PluginError(
                f"plugin {report.name}, which brings platform {platform.name}, is "
                f"{report.refusal}; ds-runtime plugins --verbose shows its traceback"
            )


def _refused(
    plugins: Plugins, others: tuple[tuple[str, Refusal], ...]
) -> tuple[tuple[str, Refusal], ...]:
    """Platforms that do not run here, and plugins that failed since."""
    failed = {r.name: r.refusal for r in plugins.reports.values() if r.refusal is not None}
    return tuple(sorted({**dict(others), **failed}.items()))


def _facts(config: EngineConfig, model: ModelConfig, device: DeviceInfo) -> Facts:
    return Facts(
        device=device,
        dims=model.dims(config.tp),
        dtype=config.dtype,
        kv_dtype=config.dtype,
        page_size=config.page_size,
        tp=config.tp,
        deterministic=config.deterministic,
    )


def _auto_dtype(config: EngineConfig, model: ModelConfig, device: DeviceInfo) -> EngineConfig:
    """`auto`: the checkpoint's dtype where it is fast here, else bf16, else fp32."""
    if config.dtype != "auto":
        return config
    for dtype in (model.dtype, "bfloat16"):
        if dtype in device.fast_dtypes:
            return with_changes(config, {"dtype": dtype})
    return with_changes(config, {"dtype": "float32"})


def find_loader(offers: Offers, model: ModelConfig, where: str = "config.json") -> QuantLoader:
    """The loader that reads the checkpoint's quantisation; UnsupportedError lists what is read.

    where: the file that `model` comes from, for the message.
    """
    for loader in sorted(offers.quant_loaders, key=lambda x: x.provider not in offers.third_party):
        if loader.accepts(model.quantization):
            return loader
    method = model.quantization.get("quant_method", "none")
    refusals = [x.refuse(model.quantization) for x in offers.quant_loaders if x.refuse is not None]
    if said := "; ".join(r for r in refusals if r):
        raise UnsupportedError(f"{where}: quantization_config: {said}")
    known = ", ".join(sorted(x.name for x in offers.quant_loaders))
    raise UnsupportedError(
        f"{where}: quantization_config with quant_method {shown(method)} "
        f"({shown(dict(model.quantization))}) is not supported; loaders: {known}"
    )


def _apply_defaults(
    config: EngineConfig, facts: Facts, explicit: frozenset[str], plugins: Plugins
) -> tuple[EngineConfig, list[tuple[str, str, str, str]]]:
    """Apply the plugins' Changes to fields that the user left alone; conflicts are errors."""
    known = {f.name for f in fields(config)} - DECIDED
    wishes: dict[str, tuple[Any, str, str]] = {}
    for plugin, changes in plugins.call("ds_defaults", config=config, facts=facts):
        for change in changes or ():
            if not isinstance(change, Change):
                raise PluginError(f"plugin {plugin}: ds_defaults returned {change!r}, no Change")
            if change.field not in known:
                raise PluginError(
                    f"plugin {plugin}: ds_defaults may not change {change.field!r}; it may "
                    f"change {', '.join(sorted(known))}"
                )
            if change.field in explicit:
                continue
            other = wishes.get(change.field)
            if other is not None and other[0] != change.value:
                flag = "--" + change.field.replace("_", "-")
                raise ConfigError(
                    f"plugins {other[1]} and {plugin} want {flag} {other[0]!r} and "
                    f"{change.value!r}: set {flag} yourself"
                )
            wishes.setdefault(change.field, (change.value, plugin, change.because))
    log, values = [], {}
    for name, (value, plugin, because) in sorted(wishes.items()):
        if getattr(config, name) == value:
            continue
        log.append((name, f"{getattr(config, name)!r} → {value!r}", plugin, because))
        values[name] = value
    return with_changes(config, values), log


def _check_strict(config: EngineConfig, plan: Plan) -> None:
    heavy = plan.heavy_references()
    if config.strict_ops and heavy:
        said = "; ".join(f"{r.op} at {', '.join(r.sites)}" for r in heavy)
        raise UnsupportedError(
            f"--strict-ops: heavy ops would run on the reference: {said}; "
            f"ds-runtime plan --explain {heavy[0].op} says why"
        )


def _versions(plugins: Plugins) -> tuple[tuple[str, str], ...]:
    found = {"ds-runtime": __version__}
    for name in {"torch", *(r.distribution for r in plugins.reports.values() if r.distribution)}:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return tuple(sorted(found.items()))
