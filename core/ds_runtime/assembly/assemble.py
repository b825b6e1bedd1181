"""Start-up, in order: platform → device → model → defaults → frozen config → offers → binding.

Torch-free: `ds-runtime plan` and `doctor` stop here; the engine goes on and loads weights.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

from ds_runtime.assembly.backends import backend_pins, refuse_sparse
from ds_runtime.assembly.estimate import packed_bytes
from ds_runtime.assembly.plan import Plan, check_against
from ds_runtime.assembly.requantise import (
    DRAFT_EXPERTS,
    DRAFT_FORMAT,
    rounds_drafts,
    with_fp8_drafts,
    with_target,
    with_w4afp8_experts,
)
from ds_runtime.assembly.result import Assembly
from ds_runtime.assembly.room import (
    REQUEST_TOKENS,
    REQUESTS,
    bound_forms,
    requests_that_fit,
    settle_forms,
)
from ds_runtime.checkpoint.hub import resolve_model
from ds_runtime.common.speculation import Speculation
from ds_runtime.config import EngineConfig, check_graph_sizes, with_changes
from ds_runtime.description.adapter import LoraPlan
from ds_runtime.description.config import ModelConfig
from ds_runtime.description.hf import load_config
from ds_runtime.description.nextn import HEAD, find_nextn, nextn_sites
from ds_runtime.description.sites import INDEX_KEYS, JOINS, FormatOf, Verify, model_sites
from ds_runtime.errors import ConfigError, PluginError, UnsupportedError, shown
from ds_runtime.ops.binding.bind import Binding, Pin, decide_all
from ds_runtime.ops.contract import (
    FP8_GROUPS,
    Change,
    DeviceInfo,
    Facts,
    Offers,
    QuantLoader,
    Refusal,
    Site,
)
from ds_runtime.ops.table import OPS
from ds_runtime.platform.contract import Platform
from ds_runtime.plugins.asking import check_outside
from ds_runtime.plugins.described_devices import describe
from ds_runtime.plugins.manager import Plugins, load_plugins
from ds_runtime.plugins.select_platform import select_platform

_ONE_BY_ONE = "routed experts with adapters run one by one, as the host learns which are chosen"
_COMPILED = "what torch.compile makes for the host cannot be recorded"
_THREADS = 64  # per rank are fine on the smallest machine
# Settled before ds_defaults is asked.
DECIDED = frozenset(
    {"model", "platform", "allow_platform_downgrade", "plugins", "plugin_allowlist"}
    | {"tp", "enable_dp_attention", "pin", "plan", "cpu_isa", "lora"}
)
dummies = set[str]()  # the model decided for last, if its weights are random: records say so
ADDED = frozenset({"disable_fusion"})  # wishes are added to what is given, and to each other


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
    model = load_config(folder)
    model.check_tp(config.tp, config.attention_tp)
    if model.indexing is None:
        refuse_sparse(config, model.architecture)
    model = _expanded(config, model)
    config = _auto_dtype(config, model, info)
    facts = _facts(config, model, info)
    _check_fusions(config.disable_fusion)
    explicit = frozenset(explicit)
    config, changes = _apply_defaults(config, facts, explicit, plugins)
    named = {*explicit, *(name for name, *_ in changes)}
    asks = platform.own_memory and info.memory > 0 and "max_running_requests" not in named
    few = config.max_running_requests
    if asks:
        config = with_changes(config, {"max_running_requests": REQUESTS})
    _check_threads(config)
    check_graph_sizes(config)
    lora = LoraPlan.of(config, model)
    captures = platform.captures and not config.disable_graph
    if captures and platform.capture_after and config.enable_torch_compile:
        captures, config = False, with_changes(config, {"disable_graph": True})
        changes.append(("disable_graph", "False → True", "core", _COMPILED))
    if captures and lora is not None and lora.has_experts:
        captures, config = False, with_changes(config, {"disable_graph": True})
        changes.append(("disable_graph", "False → True", "core", _ONE_BY_ONE))
    facts = replace(_facts(config, model, info), graph_capture=captures)
    offers = plugins.offers(facts)
    _check_platform_alive(platform, plugins)
    loader = find_loader(offers, model, str(folder / "config.json"))

    encoding = cache(loader.encodings(model.quantization))

    def stored(module: str) -> str:
        tied = module == "lm_head" and model.tie_embeddings
        return "dense" if tied else encoding(module).format

    apart = frozenset(name for name in config.disable_fusion if not name.startswith("-"))
    nextn, nextn_loader = None, None
    verify: Verify = ""
    if (speculation := Speculation.of(config)) is not None:
        assert config.speculative_algorithm is not None
        if speculation.topk > model.vocab_size:
            raise ConfigError(
                f"--speculative-eagle-topk {speculation.topk}: the model has {model.vocab_size} "
                "tokens: give at most that"
            )
        path = config.speculative_draft_model_path
        nextn = find_nextn(config.speculative_algorithm, path, folder, model)
        nextn_loader = find_loader(offers, nextn.config, str(nextn.folder / "config.json"))
        verify = "verify" if speculation.topk == 1 else "tree"
    target = with_target(config.quantize, stored)
    adapted = lora.modules if lora is not None else frozenset()
    drafts, exact = list[Site](), list[Site]()  # as they may be rounded, and as they are stored
    if nextn is not None and nextn_loader is not None:
        draft_encoding = cache(nextn_loader.encodings(nextn.config.quantization))

        def drafted(module: str) -> str:
            return draft_encoding(module).format

        def drafting(format_of: FormatOf, head: str = "") -> list[Site]:
            ranks = config.attention_tp
            return nextn_sites(model, nextn, format_of, config.tp, apart, verify, ranks, head)

        own = with_target(config.quantize, drafted)
        if config.speculative_draft_quantize == DRAFT_EXPERTS:
            own = with_w4afp8_experts(own, drafted, model.is_moe(model.layers))
        drafts = exact = drafting(own)
        if rounds_drafts(config, target("lm_head"), model.hidden, info.fast_dtypes):
            drafts = drafting(with_fp8_drafts(own), DRAFT_FORMAT)

    def sites_of(apart: frozenset[str]) -> list[Site]:
        ranks = (config.tp, config.attention_tp)
        found = model_sites(model, target, ranks[0], apart, adapted, verify, ranks[1])
        return found + drafts

    sites = sites_of(apart)
    pins = Pin.parse_all(config.pin)
    if of_apart := [pin for pin in pins if pin.op in apart]:
        raise ConfigError(
            f"{of_apart[0]}: --disable-fusion {of_apart[0].op} is given beside it: leave one of "
            "them out"
        )
    used = {op for s in sites for op in (s.op, *OPS[s.op].uses)}
    pins += backend_pins(config, offers.kernels, used, plugins.named("BACKENDS"))
    known: dict[tuple[frozenset[str], bool], tuple[Binding, str]] = {}  # for these sites

    def choose(crowded: frozenset[str] = frozenset(), compact: bool = False) -> tuple[Binding, str]:
        """With no second forms of weights of the ops `crowded`."""
        if (found := known.get((crowded, compact))) is None:
            own = replace(facts, crowded=crowded)
            found = _decide(sites, offers, own, pins, apart, compact)
            known[crowded, compact] = found
        return found

    if widens := _widening(choose()[0]):
        if config.speculative_draft_quantize == "fp8":
            raise ConfigError(
                f"--speculative-draft-quantize fp8: {widens} would hold the copy of the head in "
                f"{config.dtype}, which saves nothing: leave the flag out"
            )
        drafts = exact
        sites = sites_of(apart)
        known.clear()
    fused = any(kernel and site.op == "mla_inputs" for site, kernel in choose()[0].choices)
    if model.indexing is not None and fused:
        # The kernel in front of attention makes no index keys: their weight is one of its own.
        sites = sites_of(apart | {INDEX_KEYS})
        known.clear()

    def decided(crowded: frozenset[str], compact: bool = False) -> Assembly:
        binding, uncaptured = choose(crowded, compact)
        made = Assembly(
            config=config,
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
        )
        return _uncapturing(made, uncaptured) if uncaptured else made

    dummies.clear()
    if config.load_format == "dummy":
        dummies.add(str(folder))
    assembly, forms = settle_forms(decided)
    if not _fits(assembly.binding, config, model, info.memory):
        assembly = decided(assembly.facts.crowded, compact=True)
        forms = bound_forms(assembly, forms)
    if asks:
        assembly = _with_requests(assembly, few)
    assembly = replace(assembly, forms=forms)
    _check_strict(config, assembly.plan)
    if config.plan:
        check_against(assembly.plan, config.plan)
    return assembly


def _uncapturing(assembly: Assembly, why: str) -> Assembly:
    """The same without captured steps."""
    config = with_changes(assembly.config, {"disable_graph": True})
    change = ("disable_graph", "False → True", "core", why)
    return replace(assembly, config=config, changes=(*assembly.changes, change))


def _with_requests(assembly: Assembly, before: int) -> Assembly:
    """The same with as many requests at once as the device has memory for."""
    count = requests_that_fit(assembly)
    why = "a device of its own memory decodes hundreds of requests in little more time"
    if count < REQUESTS:
        why = f"memory has room for no more, of {REQUEST_TOKENS} tokens each"
    change = ("max_running_requests", f"{before} → {count}", "core", why)
    config = with_changes(assembly.config, {"max_running_requests": count})
    return replace(assembly, config=config, changes=(*assembly.changes, change))


def _widening(binding: Binding) -> str:
    """The kernel that would hold the copy of the head in more bits than it is rounded to, or ""."""
    for site, kernel in binding.choices:
        if site.module == HEAD and kernel is not None and site.weight_format not in kernel.keeps:
            return kernel.name
    return ""


def _decide(
    sites: Sequence[Site],
    offers: Offers,
    facts: Facts,
    pins: Sequence[Pin],
    apart: Collection[str],
    compact: bool = False,
) -> tuple[Binding, str]:
    """The binding, and why decode steps are not captured, if they were to be."""
    if facts.graph_capture:
        try:
            return decide_all(sites, offers, facts, pins, apart, compact), ""
        except (ConfigError, UnsupportedError) as e:
            facts = replace(facts, graph_capture=False)
            eager = decide_all(sites, offers, facts, pins, apart, compact)
            return eager, _uncaptured(eager) or f"not all can be captured: {e}"
    return decide_all(sites, offers, facts, pins, apart, compact), ""


def _held(binding: Binding, config: EngineConfig, model: ModelConfig) -> int:
    return packed_bytes(model, binding, config.dtype, config.tp, 0, config.attention_tp)


def _fits(binding: Binding, config: EngineConfig, model: ModelConfig, memory: int) -> bool:
    """Whether the weights fit, or would as well without conversions. memory: bytes of a device."""
    if not memory or not any(d.converts for d in binding.decisions):
        return True
    return _held(binding, config, model) <= memory


def _uncaptured(binding: Binding) -> str:
    """The kernels of captured places that are not safe under graph capture."""
    found = {
        f"{site.op} ({kernel.name})": None
        for site, kernel in binding.choices
        if kernel is not None and not kernel.graph_safe and site.is_captured
    }
    return f"not safe under graph capture: {', '.join(found)}" if found else ""


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


def _check_fusions(apart: Iterable[str]) -> None:
    known = [*JOINS, *(name for name, op in OPS.items() if op.composition or op.optional)]
    for given in apart:
        if (name := given.removeprefix("-")) not in known:
            raise ConfigError(f"--disable-fusion {name}: no such fusion; known: {', '.join(known)}")


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
        dims=model.dims(config.tp, config.attention_tp),
        dtype=config.dtype,
        kv_dtype=_kv_dtype(config, model),
        index_dtype=_index_dtype(config),
        page_size=config.page_size,
        tp=config.tp,
        deterministic=config.deterministic,
        quantized=bool(model.quantization) or config.quantize != "none",
        compiled_rows=config.torch_compile_max_bs if config.enable_torch_compile else 0,
    )


def _kv_dtype(config: EngineConfig, model: ModelConfig) -> str:
    fp8 = "float8_e4m3fn" if model.indexing is None else FP8_GROUPS
    named = {"auto": config.dtype, "fp8": fp8}
    return named.get(config.kv_cache_dtype, config.kv_cache_dtype)


def _index_dtype(config: EngineConfig) -> str:
    """Of index keys: FP8, which models are trained with, unless everything is in float32."""
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


def _apply_defaults(
    config: EngineConfig, facts: Facts, explicit: frozenset[str], plugins: Plugins
) -> tuple[EngineConfig, list[tuple[str, str, str, str]]]:
    """Apply the plugins' Changes to fields that the user left alone; conflicts are errors. Fusions
    that they wish apart come behind those that the user named (`_add`).

    A page size that they wish for is settled first: other wishes follow the one in force.
    """
    wishes = _wishes(config, facts, explicit, plugins)
    page = wishes.get("page_size")
    if page is not None and page[0] != config.page_size:
        settled = with_changes(config, {"page_size": page[0]})
        facts, explicit = replace(facts, page_size=page[0]), explicit | {"page_size"}
        wishes = {**_wishes(settled, facts, explicit, plugins), "page_size": page}
    log, values = [], {}
    for name, (value, plugin, because) in sorted(wishes.items()):
        if getattr(config, name) == value:
            continue
        log.append((name, f"{getattr(config, name)!r} → {value!r}", plugin, because))
        values[name] = value
    return with_changes(config, values), log


def _wishes(
    config: EngineConfig, facts: Facts, explicit: frozenset[str], plugins: Plugins
) -> dict[str, tuple[Any, str, str]]:
    """Field → (value, plugin, because) of what the user left alone."""
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
            other = wishes.get(change.field)
            if change.field in ADDED:
                _add(wishes, change, plugin, getattr(config, change.field), explicit)
                continue
            if change.field in explicit:
                continue
            if other is not None and other[0] != change.value:
                flag = "--" + change.field.replace("_", "-")
                raise ConfigError(
                    f"plugins {other[1]} and {plugin} want {flag} {other[0]!r} and "
                    f"{change.value!r}: set {flag} yourself"
                )
            wishes.setdefault(change.field, (change.value, plugin, change.because))
    return wishes


def _add(
    wishes: dict[str, tuple[Any, str, str]],
    change: Change,
    plugin: str,
    given: tuple[str, ...],
    explicit: frozenset[str],
) -> None:
    """A wish for a list: behind what is given and wished already. A list that the user gave empty
    stays so, and what it has as "-NAME" is not added."""
    wished = tuple(name for name in change.value if f"-{name}" not in given)
    if (change.field in explicit and not given) or not set(wished) - set(given):
        return
    before, plugins, reasons = wishes.get(change.field, (given, "", ""))
    wishes[change.field] = (
        tuple(dict.fromkeys((*before, *wished))),
        ", ".join(filter(None, dict.fromkeys((plugins, plugin)))),
        "; ".join(filter(None, dict.fromkeys((reasons, change.because)))),
    )


def _check_strict(config: EngineConfig, plan: Plan) -> None:
    held = plan.conversions()
    if config.strict_ops and held:
        said = "; ".join(f"{r.op} at {', '.join(r.sites)} ({r.converts})" for r in held)
        raise UnsupportedError(
            f"--strict-ops: weights would be converted while they are loaded: {said}; "
            f"ds-runtime plan --explain {held[0].op} says which kernels read which formats"
        )
    heavy = plan.heavy_references()
    if config.strict_ops and heavy:
        said = "; ".join(f"{r.op} at {', '.join(r.sites)}" for r in heavy)
        raise UnsupportedError(
            f"--strict-ops: heavy ops would run on the reference: {said}; "
            f"ds-runtime plan --explain {heavy[0].op} says why"
        )
