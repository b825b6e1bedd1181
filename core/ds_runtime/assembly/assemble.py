"""Start-up, in order: platform → device → model → defaults → frozen config → offers → rules.

Torch-free: `ds-runtime plan` and `doctor` stop here; the engine continues and loads weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ds_runtime.assembly.defaults import apply_defaults, check_states, with_whole_pages
from ds_runtime.assembly.plan import Plan, check_against
from ds_runtime.assembly.result import Assembly, undone
from ds_runtime.assembly.room import REQUESTS
from ds_runtime.assembly.rules import Terms, settle
from ds_runtime.assembly.site_list import SiteList, apart
from ds_runtime.checkpoint.base import stamps_of
from ds_runtime.checkpoint.hub import resolve_model
from ds_runtime.common.speculation import Speculation
from ds_runtime.config import EngineConfig, check_graph_sizes, with_changes
from ds_runtime.config.fields import flag_of
from ds_runtime.description.adapter import LoraPlan
from ds_runtime.description.caches import cache_groups
from ds_runtime.description.config import ModelConfig
from ds_runtime.description.hf import load_config
from ds_runtime.description.joins import INDEX_KEYS
from ds_runtime.description.nextn import NextN, find_nextn
from ds_runtime.errors import ConfigError, PluginError, UnsupportedError, shown
from ds_runtime.measured.sums import decide as decide_sums
from ds_runtime.ops.binding.backends import backend_pins, refuse_sparse
from ds_runtime.ops.binding.bind import Binding, decide_all
from ds_runtime.ops.binding.pins import Pin
from ds_runtime.ops.contract import (
    FP4_KEYS,
    FP8_GROUPS,
    DeviceInfo,
    Dims,
    Facts,
    Offers,
    QuantLoader,
    Refusal,
    Site,
)
from ds_runtime.ops.table import OPS
from ds_runtime.parallel.mesh import AXES, Mesh, local_ranks
from ds_runtime.parallel.placement import check_experts
from ds_runtime.platform.contract import Platform
from ds_runtime.platform.cores import check_threads
from ds_runtime.plugins.asking import check_outside
from ds_runtime.plugins.described_devices import describe
from ds_runtime.plugins.manager import Plugins, load_plugins
from ds_runtime.plugins.select_platform import select_platform

_ONE_BY_ONE = "routed experts with adapters run one by one, as the host learns which are chosen"
_COMPILED = "what torch.compile makes for the host cannot be recorded"
dummies = set[str]()  # the model decided for last, if its weights are random: records say so


def assemble(
    config: EngineConfig,
    explicit: Iterable[str] = (),
    extra_plugins: Iterable[Any] = (),
    device: str | None = None,
    without: Iterable[str] = (),
    loaded: Plugins | None = None,
) -> Assembly:
    """Decide everything for `config`. `explicit` are the fields that the user set.

    `device`: decide for a device that a plugin describes, less the features `without`; nothing
    can run then. `loaded`: plugins, where somebody has loaded them already. Raises ConfigError,
    UnsupportedError or CheckpointError; nothing has been allocated then.
    """
    check_outside()
    plugins = loaded or load_plugins(
        config.plugins, extra_plugins, allowlist=config.plugin_allowlist
    )
    if device is None:
        platform, others = select_platform(
            plugins, config.platform, config.allow_platform_downgrade
        )
    else:
        platform, others = describe(plugins, device, without), ()
        if config.platform not in ("auto", platform.name):
            raise ConfigError(
                f"--platform {config.platform}: --device {device} is of platform {platform.name}: "
                "leave one of them out"
            )
    info = _device(platform, config)
    folder = resolve_model(config.model)
    stamps = {**stamps_of(folder)}
    model = load_config(folder)
    model.check_tp(config.tp, Mesh.of(config).attn_tp, config.expert_parts)
    check_experts(model, config)
    explicit = frozenset(explicit)
    _check_flags(config, model, explicit)
    model = _expanded(config, model)
    config = _auto_dtype(config, model, info)
    config, changes = apply_defaults(config, _facts(config, model, info), explicit, plugins)
    groups = cache_groups(model)
    config = with_whole_pages(config, groups, explicit, changes)
    check_states(config, groups)
    named = {*explicit, *(name for name, *_ in changes)}
    sized = platform.own_memory and info.memory > 0 and "max_running_requests" not in named
    if sized:
        config = with_changes(config, {"max_running_requests": REQUESTS})
    if device is None:
        check_threads(config.threads)
    elif platform.on_host:  # else nothing is known of its host, which checks itself
        check_threads(config.threads, info.cores, info.name)
    check_graph_sizes(config)
    lora = LoraPlan.of(config, model)
    for adapter in lora.adapters if lora is not None else ():
        stamps |= stamps_of(adapter.folder)
    captured = platform.captures and not config.disable_graph
    if captured and (why := _uncapturable(platform, config, lora)):
        captured, config = False, with_changes(config, {"disable_graph": True})
        changes.append(("disable_graph", "False → True", "core", why))
    threads = platform.threads(local_ranks(config), config.threads)
    facts = replace(_facts(config, model, info), graph_capture=captured, threads=threads)
    offers = plugins.offers(facts)
    _check_platform_alive(platform, plugins)
    sums = decide_sums(config, model, platform, info, plugins)
    loader = find_loader(offers, model, str(folder / "config.json"))
    drafts = _drafts(config, folder, model, offers)
    if drafts is not None:
        stamps |= stamps_of(drafts[0].folder)
    places = SiteList(config, model, loader, lora, drafts, info.fast_dtypes)
    sites = cache(places.sites)
    pins = _pins(config, offers, plugins, places.apart, sites(places.apart, places.rounds))

    @cache
    def bound(terms: Terms) -> Binding:
        own = replace(facts, graph_capture=terms.captured, crowded=terms.crowded)
        own_sites, undo = sites(terms.apart, terms.rounded), undone(config)
        entries = {group.name: group.entries(own.page_size, undo) for group in groups}
        return decide_all(own_sites, offers, own, pins, places.apart, terms.compact, entries)

    @cache
    def decide(terms: Terms) -> Assembly:
        binding = bound(replace(terms, requests=None))
        own: dict[str, Any] = {"max_running_requests": terms.requests} if terms.requests else {}
        if terms.captured != captured:
            own["disable_graph"] = True
        nextn, nextn_loader = drafts or (None, None)
        return Assembly(
            config=with_changes(config, own),
            folder=folder,
            model=model,
            platform=platform,
            device=info,
            facts=binding.base,
            loader=loader,
            binding=binding,
            plugins=plugins,
            offers=offers,
            lora=lora,
            others=_refused(plugins, others),
            nextn=nextn,
            nextn_loader=nextn_loader,
            changes=tuple(changes),
            stamps=stamps,
            sums=sums,
        )

    requests = 0 if sized else None
    terms = Terms(captured, places.rounds, places.apart, requests=requests)
    dummies.clear()
    if config.load_format == "dummy":
        dummies.add(str(folder))
    assembly = settle(terms, decide)
    _check_strict(config, assembly.plan)
    if config.plan:
        check_against(assembly.plan, config.plan)
    return assembly


def _drafts(
    config: EngineConfig, folder: Path, model: ModelConfig, offers: Offers
) -> tuple[NextN, QuantLoader] | None:
    """The draft layer and who reads it, where there is speculation."""
    if (speculation := Speculation.of(config)) is None:
        return None
    assert config.speculative_algorithm is not None
    if speculation.topk > model.vocab_size:
        raise ConfigError(
            f"--speculative-eagle-topk {speculation.topk}: the model has {model.vocab_size} "
            "tokens: give at most that"
        )
    path = config.speculative_draft_model_path
    nextn = find_nextn(config.speculative_algorithm, path, folder, model)
    return nextn, find_loader(offers, nextn.config, str(nextn.folder / "config.json"))


def _pins(
    config: EngineConfig,
    offers: Offers,
    plugins: Plugins,
    apart: frozenset[str],
    sites: Iterable[Site],
) -> list[Pin]:
    """Those that were given, then those that backends stand for."""
    pins = Pin.parse_all(config.pin)
    if of_apart := [pin for pin in pins if pin.op in apart]:
        raise ConfigError(
            f"{of_apart[0]}: --fusion {of_apart[0].op}=off contradicts it: leave one of them out"
        )
    used = {op for s in sites for op in (s.op, *OPS[s.op].uses)}
    return pins + backend_pins(config, offers.kernels, used, plugins.named("BACKENDS"))


def _uncapturable(platform: Platform, config: EngineConfig, lora: LoraPlan | None) -> str:
    """Why no step is captured with these settings, or ""."""
    if platform.capture_after and config.enable_torch_compile:
        return _COMPILED
    if lora is not None and lora.has_experts:
        return _ONE_BY_ONE
    return ""


def _device(platform: Platform, config: EngineConfig) -> DeviceInfo:
    """The device's facts, once the platform has taken its settings."""
    asked = "configure"
    try:
        platform.configure(config)
        asked = "info"
        return platform.device_info(0)
    except ConfigError:
        raise
    except Exception as e:
        raise PluginError(
            f"platform {platform.name}: {asked}() raised {type(e).__name__}: {e}; name another "
            "with --platform"
        ) from e


def _expanded(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """The model as `--disable-mla` has it."""
    if config.disable_mla and model.indexing is not None:
        raise ConfigError(
            f"--disable-mla: {model.architecture} attends chosen tokens, whose latents its kernels "
            "read: leave the flag out"
        )
    return replace(model, expanded=config.disable_mla)


def _check_flags(config: EngineConfig, model: ModelConfig, explicit: Collection[str]) -> None:
    """Raise for settings that mean nothing to this model, or contradict what it was trained for."""
    if model.hybrid is not None:
        _refuse_hybrid(config, model)
    elif config.trained_rounding:
        raise ConfigError(
            f"--trained-rounding: {model.architecture} was trained otherwise: leave the flag out"
        )
    if config.trained_rounding and "index_cache_dtype" in explicit:
        raise ConfigError(
            f"--index-cache-dtype {config.index_cache_dtype}: --trained-rounding has index keys in "
            "FP4: leave one of them out"
        )
    if model.indexing is not None:
        return
    refuse_sparse(config, model.architecture)
    if INDEX_KEYS in apart(config):
        raise ConfigError(
            f"--fusion {INDEX_KEYS}=off: {model.architecture} has no index keys that could be "
            "joined: leave it out"
        )


def _refuse_hybrid(config: EngineConfig, model: ModelConfig) -> None:
    """UnsupportedError for what DeepSeek-V4 is not served with."""
    refused = {
        "speculative_algorithm": config.speculative_algorithm is not None,
        "lora": bool(config.lora),
        "max_loras": bool(config.max_loras),
        "disable_mla": config.disable_mla,
        "batch_invariant": config.batch_invariant,
    }
    for name, given in refused.items():
        if given:
            raise UnsupportedError(
                f"{flag_of(name)}: {model.architecture} is not served with it: leave the flag out"
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
    mesh = Mesh.of(config)
    several = mesh.size > 1
    return Facts(
        device=device,
        dims=model.dims(mesh.tp, mesh.attn_tp, mesh.ep),
        dtype=config.dtype,
        kv_dtype=_kv_dtype(config, model),
        index_dtype=_index_dtype(config),
        page_size=config.page_size,
        ranks=Dims({axis: mesh.extent(axis) for axis in AXES}),
        hosts=mesh.hosts,
        interconnect=device.link if several else "none",
        multicast=several and device.multicast,
        deterministic=config.deterministic,
        batch_invariant=config.batch_invariant,
        quantized=bool(model.quantization) or config.quantize != "none",
        compiled_rows=config.torch_compile_max_bs if config.enable_torch_compile else 0,
        context=config.context_length or model.max_positions,
    )


def _kv_dtype(config: EngineConfig, model: ModelConfig) -> str:
    grouped = model.indexing is not None and model.hybrid is None
    fp8 = FP8_GROUPS if grouped else "float8_e4m3fn"
    named = {"auto": config.dtype, "fp8": fp8}
    return named.get(config.kv_cache_dtype, config.kv_cache_dtype)


def _index_dtype(config: EngineConfig) -> str:
    """Of index keys: FP8, which models are trained with, unless everything is in float32."""
    if config.trained_rounding:
        return FP4_KEYS
    auto = "float32" if config.dtype == "float32" else "fp8"
    name = auto if config.index_cache_dtype == "auto" else config.index_cache_dtype
    return "float8_e4m3fn" if name == "fp8" else name


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


def _check_strict(config: EngineConfig, plan: Plan) -> None:
    """UnsupportedError for what --strict-ops forbids."""
    held, heavy = plan.conversions(), plan.heavy_references()
    explain = "ds-runtime plan --explain"
    if config.strict_ops and held:
        said = "; ".join(f"{r.op} at {', '.join(r.sites)} ({r.converts})" for r in held)
        raise UnsupportedError(
            f"--strict-ops: weights would be converted while they are loaded: {said}; "
            f"{explain} {held[0].op} says which kernels read which formats"
        )
    if config.strict_ops and heavy:
        said = "; ".join(f"{r.op} at {', '.join(r.sites)}" for r in heavy)
        raise UnsupportedError(
            f"--strict-ops: heavy ops would run on the reference: {said}; "
            f"{explain} {heavy[0].op} says why"
        )
