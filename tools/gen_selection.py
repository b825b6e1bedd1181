"""Writes tests/golden/selection.txt: which kernel serves which op, for every DeepSeek, weight
format and device that plugins describe. A change of it is reviewed as a diff.

    python tools/gen_selection.py            # write it; --check: exit 1 and say what differs
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import tempfile
from collections.abc import Container, Iterator
from pathlib import Path

from ds_runtime.assembly.plan import Plan
from ds_runtime.errors import DsRuntimeError
from ds_runtime.ops.table import OPS
from ds_runtime.platform.contract import Platform
from ds_runtime.plugins.manager import Plugins, load_plugins
from ds_runtime_kit.devices import fake

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "golden" / "selection.txt"
CONFIGS = ROOT / "tests" / "core" / "model" / "fixtures"
FORMATS = ("none", "int8", "int4")  # --quantize; none: as the checkpoint is
PLUGINS = ("cpu", "cuda", "npu", "rocm", "triton", "xpu")  # of the tree: no other is in the table
REFUSED = "  refused: "
HEAD = """\
Which kernel serves which op, by device, model and weight format. Written by
tools/gen_selection.py; all plugins of the tree, with the software that their devices.json names.
A format is what --quantize makes of the weights; "as is": what the checkpoint has. Below them, on
accelerators: what other settings change, and deepseek-v3 in the formats that others publish, on one
device of each architecture deepseek-v3.2 and deepseek-v2, too: the ops that own weights.
"""
WEIGHED = ("linear", "mla_inputs", "mla_absorb", "experts")  # ops that own weights
ALWAYS = ("disable_graph", "refused")
PUBLISHED = ("deepseek-v3", "deepseek-v3.2", "deepseek-v2")
VARIED = (  # model, what is set beside it
    ("deepseek-v3.2", {"kv_cache_dtype": "auto"}),
    ("deepseek-v3.2", {"index_cache_dtype": "bfloat16"}),
    ("deepseek-v3", {"speculative_algorithm": "NEXTN"}),
)


def table(only: Container[str] | None = None) -> str:
    """The whole text: a section per device, a block per answer, with all models that get it. only:
    the sections of these devices."""
    plugins = load_plugins(PLUGINS)
    lines, refused, archs = list[str](), dict[str, set[str]](), set[str]()
    with tempfile.TemporaryDirectory() as folder:
        models = dict(_models(Path(folder)))
        for name, platform in sorted(fake.devices(plugins).items()):
            arch = platform.info().arch if platform.name != "cpu" else ""
            if only is None or name in only:
                first = arch not in archs
                lines += _section(models, name, platform, first, plugins, refused)
            archs.add(arch)
    if only is not None:
        return "\n".join(lines)
    lines.append("\n## refused, on at least one device\n")
    lines += [f"{', '.join(sorted(models))}:\n{said}" for said, models in sorted(refused.items())]
    return "\n".join([HEAD, *lines]) + "\n"


def _section(
    models: dict[str, str],
    name: str,
    platform: Platform,
    first: bool,
    plugins: Plugins,
    refused: dict[str, set[str]],
) -> Iterator[str]:
    """Of a device. first: no other one of its architecture comes before it. refused: adds to it
    which models are, by the sentence."""
    info = platform.info()
    yield f"\n## {name}: {info.name} ({platform.name}, {info.arch})\n"
    answers: dict[str, list[str]] = {}
    for model, path in models.items():
        for quantize in FORMATS:
            said = _selection(path, name, quantize, plugins)
            fmt = "as is" if quantize == "none" else quantize
            if said.startswith(REFUSED):
                refused.setdefault(said, set()).add(model)
                continue
            answers.setdefault(said, []).append(f"{model} {fmt}")
    for said, asked in answers.items():
        yield f"{', '.join(asked)}:\n{said}"
    if platform.name != "cpu":
        yield from _varied(models, name, plugins)
        known = PUBLISHED if first else PUBLISHED[:1]
        yield _published([Path(models[model]) for model in known], name, plugins)


def _models(folder: Path) -> Iterator[tuple[str, str]]:
    """(name, folder) of every config.json, cut to two layers of each kind: the rest are alike."""
    for file in sorted(CONFIGS.glob("*.json")):
        config = json.loads(file.read_text())
        first = config.get("first_k_dense_replace") or 0
        dense = min(first, 2)
        if "first_k_dense_replace" in config:
            config |= {"first_k_dense_replace": dense, "num_hidden_layers": dense + 2}
        for key in {"indexer_types", "mlp_layer_types"} & config.keys():  # a kind per layer
            config[key] = config[key][first - dense : first + 2]
        (folder / file.stem).mkdir()
        (folder / file.stem / "config.json").write_text(json.dumps(config))
        yield file.stem, str(folder / file.stem)


def _varied(models: dict[str, str], device: str, plugins: Plugins) -> Iterator[str]:
    """Blocks of what other settings change."""
    for model, settings in VARIED:
        plain = _selection(models[model], device, "none", plugins).splitlines()
        said = _selection(models[model], device, "none", plugins, **settings).splitlines()
        changed = [line for line in said if line not in plain] or ["  as without"]
        flags = ", ".join(f"--{k.replace('_', '-')} {v}" for k, v in settings.items())
        yield "\n".join((f"{model}, {flags}:", *changed, ""))


def _selection(model: str, device: str, quantize: str, plugins: Plugins, **settings: str) -> str:
    """A line per op; or why nothing is decided."""
    try:
        plan = fake.plan(model, device, plugins=plugins, quantize=quantize, **settings).plan
    except DsRuntimeError as e:
        return f"{REFUSED}{str(e).replace(model, Path(model).name)}\n"
    return "".join(_lines(plan))


def _published(models: list[Path], device: str, plugins: Plugins) -> str:
    """Blocks of the formats that published_kinds.py writes, with all that get the same."""
    sys.path.append(str(CONFIGS.parent))
    from published_kinds import BESIDE, KINDS

    answers: dict[str, dict[str, list[str]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            config = json.loads((model / "config.json").read_text())
            config |= {"first_k_dense_replace": 1, "num_hidden_layers": 2}
            for kind, (_, quantization, _) in KINDS.items():
                config["quantization_config"] = quantization
                if kind in BESIDE:
                    del config["quantization_config"]
                    (Path(folder) / "hf_quant_config.json").write_text(json.dumps(BESIDE[kind]))
                (Path(folder) / "config.json").write_text(json.dumps(config))
                said = _selection(folder, device, "none", plugins).splitlines(keepends=True)
                kept = (line for line in said if line.split()[0].rstrip(":") in (*WEIGHED, *ALWAYS))
                found = answers.setdefault("".join(kept), {}).setdefault(model.name, [])
                found.append(kind)
                (Path(folder) / "hf_quant_config.json").unlink(missing_ok=True)
    blocks = ((_asked(by_model), said) for said, by_model in answers.items())
    return "\n".join(f"{asked}:\n{said}" for asked, said in blocks)


def _asked(kinds: dict[str, list[str]]) -> str:
    """Models with their formats; those of the same formats together."""
    alike: dict[str, list[str]] = {}
    for model, named in kinds.items():
        alike.setdefault(", ".join(named), []).append(model)
    return "; ".join(f"{' and '.join(models)}, {named}" for named, models in alike.items())


def _lines(plan: Plan) -> Iterator[str]:
    yield f"  {plan.dtype}, {plan.kv_layout}, pages of {plan.page_size}\n"
    for name in OPS:
        found: dict[str, list[str]] = {}
        for row in (r for r in plan.rows if r.op == name):
            found.setdefault(row.kernel, []).extend(row.sites)
        sizes = sorted(found, key=lambda kernel: -len(found[kernel]))
        said = [sizes[0], *(f"{k} at {', '.join(found[k])}" for k in sizes[1:])] if sizes else []
        if said and not (OPS[name].optional and set(found) == {"composed"}):  # its parts have lines
            yield f"  {name:<22}{'; '.join(said)}\n"
    for field, change, _, because in plan.changes:
        if field == "disable_graph":
            yield f"  {field}: {change}: {because}\n"


def difference(device: str | None = None) -> list[str]:
    """What a new table would change, as a diff; empty if it is as written. device: of its section
    alone."""
    if device is None:
        old, new = TABLE.read_text(), table()
    else:
        begin = f"\n## {device}:"
        old = begin + TABLE.read_text().partition(begin)[2].partition("\n\n## ")[0]
        new = table({device})
    return _diff(old.strip().splitlines(), new.strip().splitlines())


def _diff(old: list[str], new: list[str]) -> list[str]:
    return list(difflib.unified_diff(old, new, "written", "now", lineterm="", n=8))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        changed = difference()
        print("\n".join(changed) or "as written")
        return int(bool(changed))
    TABLE.write_text(table())
    print(f"wrote {TABLE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
