"""The page of `ds_runtime.api`, by what a plugin wants to do, and of `LLM`."""

from __future__ import annotations

import inspect
import re
from types import ModuleType
from typing import Any

from documented import class_head, methods, signature, text
from ds_runtime import LLM, api

HEAD = """\
This page has every name of `ds_runtime.api`, with its fields, arguments and errors. It is for
authors of plugins. [Writing a plugin](writing-a-plugin.md) shows how they fit together.
[Contracts](contracts.md) says what each op computes, and [hooks](hooks.md) when a plugin is called.

A plugin imports nothing else of `ds_runtime`, except `ds_runtime.testing` in its tests. A name
stays for two versions of the plugin interface. `import ds_runtime.api` imports no torch. A name
that needs torch is imported on first use. *Lazy* is a text `"module:attribute"`, which is imported
when it is needed. Memory is in bytes, times are in seconds. Names of dims are those of
[contracts](contracts.md).
"""

OFFLINE = """
# Offline API

`ds_runtime` has the class `LLM`, which serves a model in this process. Its methods take
[`SamplingParams`](#samplingparams). [Scripts](../examples/README.md) show how they are used.

"""

SECTIONS: tuple[tuple[str, str, str], ...] = (
    (
        "The plugin itself",
        "What the module of the entry point has, and how it adds flags and defaults.",
        "plugin hookimpl API_VERSION Change EngineConfig Spelling refused nothing GIVEN read_plan",
    ),
    (
        "Offers of kernels",
        "How a plugin says which kernels it has.",
        "Provider Kernel Declared Promises RowRange Footprint Compiles OPS Op RANK_REFERENCE"
        " RANK_PORTABLE RANK_PLATFORM RANK_SPECIALISED load_attr",
    ),
    (
        "Refusals",
        "What a kernel may look at to refuse, and gates that are there already.",
        "Facts DeviceInfo Dims Phase Gate Gates gates Fixable checks Library exports",
    ),
    (
        "Weights",
        "What `pack` gets and returns.",
        "Weight WeightPart Packed ExpertSource MlaWeights Groups FP8_ROWS FP8_EXPERTS DENSE_ROWS"
        " DENSE_EXPERTS fp8_blocks decode_scale torch_dtype",
    ),
    (
        "Steps",
        "What kernels of attention and routing get at each step.",
        "Batch DecodePart PrefillPart PrefixChunk Segments Limits RowOwners rows_of seen_of"
        " with_rope mha_joined Routing with_shared_slots branch",
    ),
    (
        "References",
        "Torch forms of ops that kernels may build on.",
        "ReferenceLinear ReferenceExperts route silu_mul rotated float32_product sums_in_float32",
    ),
    (
        "Caches",
        "Layouts of caches, and the groups that a model declares. [Cache groups](cache-groups.md)"
        " explains both.",
        "Layout CacheGroup HistoryGroup StateGroup Caches FP8_GROUPS FP4_KEYS",
    ),
    (
        "Checkpoint formats",
        "How a plugin reads a format. [Formats](formats.md) lists the canonical ones.",
        "QuantLoader Encoding PartRequest Place LoaderSample read_part",
    ),
    (
        "Platforms",
        "What a device can do, and how its ranks talk, capture steps and copy pages.",
        "Platform TorchPlatform MemoryInfo Communicator NormedSum TorchCommunicator GraphBackend"
        " Recording Recorded PageCopies TorchPageCopies Copying LayerBlocks Ceilings ceilings"
        " cores_per_device compiled kept_in",
    ),
    (
        "Probes",
        "What a probe asks of the machine, without torch. `root` is `/` except in tests.",
        "Refusal device_nodes pci_devices has_library package_folder installed exported_names"
        " torch_built_for read_file visible install_command",
    ),
    (
        "Transfers between engines",
        "How blocks of caches get to another engine. [KV transfer](kv-transfer.md) explains it.",
        "KvTransfer Transfer CacheBlocks Ticket Polled",
    ),
    (
        "Routes",
        "What HTTP routes of a plugin get. [Hooks](hooks.md#routedengine) has `RoutedEngine`.",
        "RoutedEngine Generated SamplingParams",
    ),
    (
        "Errors",
        "Each is raised with a sentence that names the thing, the value and the remedy.",
        "ConfigError UnsupportedError CheckpointError PluginError DeviceError CaptureError"
        " TransferError",
    ),
)

SAID = {  # of names without a docstring of their own, or with a page of their own
    "API_VERSION": "The version of the plugin interface. A platform has it as `api_version`.",
    "DENSE_EXPERTS": "A shared packing: as `FP8_EXPERTS`, but `gate_up` and `down` in the compute"
    " dtype, without scales.",
    "DENSE_ROWS": "A shared packing: `Packed.tensors` has `weight` [out, in] in the compute dtype.",
    "EngineConfig": "The settings of an engine, frozen: a field for each flag of"
    " [flags.md](flags.md), with underscores for hyphens.",
    "FP4_KEYS": "A value of `Facts.index_dtype`: index keys in e2m1, with a power of two for every"
    " 32 numbers.",
    "FP8_EXPERTS": "A shared packing of `experts`. `Packed.tensors` has `gate_up` [experts, 2 · I,"
    " H] (gate rows first) and `down` [experts, H, I] in e4m3. `gate_up_scale` and `down_scale`"
    " have a float32 scale for each 128 × 128 block. H and I are whole blocks. `ue8m0`, if it is"
    " there, says whether all scales are powers of two.",
    "FP8_GROUPS": "A value of `Facts.kv_dtype`: e4m3 latents with a scale per 128 numbers, and rope"
    " keys in bfloat16.",
    "FP8_ROWS": "A shared packing of `linear`. `Packed.tensors` has `weight` [out, in] in e4m3 and"
    " `scale` [⌈out / 128⌉, ⌈in / 128⌉] float32.",
    "GIVEN": "In `Spelling.sets`, the text that the user gave with the flag.",
    "Gate": "A function of the facts of a site. It returns None, or a sentence that says why the"
    " kernel cannot serve there.",
    "OPS": "Every op by its name, as an `Op`. [Contracts](contracts.md) describes them.",
    "Phase": "A kind of step. `verify` has several rows of each sequence, `tree` a tree of drafts;"
    " `any` is said of sites outside attention.",
    "RANK_PLATFORM": "The rank of kernels made for one kind of device.",
    "RANK_PORTABLE": "The rank of kernels that run on several vendors' devices.",
    "RANK_REFERENCE": "The rank of references, the lowest.",
    "RANK_SPECIALISED": "The rank of kernels made for one device or shape. Any number is allowed.",
    "RoutedEngine": "The engine as `ds_routes` gets it: see [hooks](hooks.md#routedengine).",
    "hookimpl": "Marks a function of the plugin's module as a hook: `@hookimpl`.",
}


def plugin_api(note: str) -> str:
    """The names of `ds_runtime.api` by section, then `LLM`.

    Raises ValueError if a name is in no section, in two, or in no `__all__`.
    """
    named = [n for _, _, names in SECTIONS for n in names.split()]
    if wrong := {n for n in {*named, *api.__all__} if named.count(n) != 1 or n not in api.__all__}:
        raise ValueError(
            f"{', '.join(sorted(wrong))}: each name of ds_runtime.api is in one section"
        )
    out = [note, "# Plugin API\n\n", HEAD, "\n| for | names |\n|---|---|\n"]
    for title, _, names in SECTIONS:
        link = f"[{title}](#{title.lower().replace(' ', '-')})"
        out.append(f"| {link} | {', '.join(f'`{n}`' for n in names.split())} |\n")
    for title, said, names in SECTIONS:
        out.append(f"\n## {title}\n\n{said}\n\n")
        out.append("\n".join(entry(name) for name in names.split()))
    out.append(
        "\n# Offline API\n\n`ds_runtime` has the class `LLM`, and what its methods take.\n\n"
    )
    return "".join([*out, of_class(LLM, "##")])


def entry(name: str) -> str:
    """A heading, the code that declares the name, and what it means."""
    value = getattr(api, name)
    if name in SAID:
        shown = re.sub(r"[a-z_.]+\.(?=[A-Z])", "", repr(value)).replace("'", '"')
        code = f"```python\n{name} = {shown}\n```\n\n" if not _is_named(value) else ""
        return f"### `{name}`\n\n{code if len(shown) < 120 else ''}{SAID[name]}\n"
    if isinstance(value, ModuleType):
        return f"### `{name}`\n\n{text(value)}\n\n{_functions(value)}"
    if inspect.isclass(value):
        return of_class(value, "###")
    return f"### `{name}`\n\n```python\n{signature(value)}```\n\n{text(value, _names(value))}\n"


def _is_named(value: object) -> bool:
    return inspect.isclass(value) or hasattr(value, "project_name")


def _names(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def of_class(kind: type, level: str) -> str:
    """Its fields, its docstring, and its public methods with theirs."""
    head = class_head(kind, api.__all__)
    fields = [line.split(":")[0].strip() for line in head.splitlines()[1:]]
    out = [f"{level} `{kind.__name__}`\n\n```python\n{head}```\n\n"]
    out.append(text(kind, [f for f in fields if f.isidentifier()]) + "\n")
    shown = [_method(*each) for each in methods(kind)]
    return "".join([*out, "\nMethods:\n\n" if shown else "", *shown])


def _method(name: str, function: Any, is_property: bool) -> str:
    said = _indented(text(function, _names(function)))
    if is_property:
        result = inspect.signature(function).return_annotation
        return f"* `{name}` (property, `{result}`): {said}\n"
    code = " ".join(signature(function).split()).replace("( ", "(").replace(", )", ")")
    return f"* `{code.removeprefix('def ')}`: {said}\n"


def _indented(said: str) -> str:
    first, *others = said.splitlines()
    return "\n".join([first, *(f"    {line}" if line else "" for line in others)])


def _functions(module: ModuleType) -> str:
    found = [
        f
        for n, f in vars(module).items()
        if inspect.isfunction(f) and f.__module__ == module.__name__ and n[0] != "_"
    ]
    return "".join(_method(f.__name__, f, False) for f in found)
