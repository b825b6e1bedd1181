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
from collections.abc import Iterator
from pathlib import Path

from ds_runtime.errors import DsRuntimeError
from ds_runtime.ops.table import OPS
from ds_runtime.plan import Plan
from ds_runtime.plugins import Plugins, load_plugins
from ds_runtime.testing import fake

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
accelerators, deepseek-v3 in the formats that others publish: the ops that own weights.
"""
WEIGHED = ("linear", "mla_inputs", "mla_absorb", "experts")  # ops that own weights
ALWAYS = ("disable_graph", "refused")


def table() -> str:
    """The whole text: a section per device, a block per answer, with all models that get it."""
    plugins = load_plugins(PLUGINS)
    lines, refused = [HEAD], dict[str, set[str]]()
    with tempfile.TemporaryDirectory() as folder:
        models = dict(_models(Path(folder)))
        for name, platform in sorted(fake.devices(plugins).items()):
            info = platform.info()
            lines.append(f"\n## {name}: {info.name} ({platform.name}, {info.arch})\n")
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
                lines.append(f"{', '.join(asked)}:\n{said}")
            if platform.name != "cpu":
                lines.append(_published(Path(models["deepseek-v3"]), name, plugins))
    lines.append("\n## refused, on at least one device\n")
    lines += [f"{', '.join(sorted(models))}:\n{said}" for said, models in sorted(refused.items())]
    return "\n".join(lines) + "\n"


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


def _selection(model: str, device: str, quantize: str, plugins: Plugins) -> str:
    """A line per op; or why nothing is decided."""
    try:
        plan = fake.plan(model, device, plugins=plugins, quantize=quantize).plan
    except DsRuntimeError as e:
        return f"{REFUSED}{str(e).replace(model, Path(model).name)}\n"
    return "".join(_lines(plan))


def _published(model: Path, device: str, plugins: Plugins) -> str:
    """Blocks of the formats that published_kinds.py writes, with all formats that get the same."""
    sys.path.append(str(CONFIGS.parent))
    from published_kinds import BESIDE, KINDS

    config = json.loads((model / "config.json").read_text())
    config |= {"first_k_dense_replace": 1, "num_hidden_layers": 2}
    answers: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, (_, quantization, _) in KINDS.items():
            config["quantization_config"] = quantization
            if kind in BESIDE:
                del config["quantization_config"]
                (Path(folder) / "hf_quant_config.json").write_text(json.dumps(BESIDE[kind]))
            (Path(folder) / "config.json").write_text(json.dumps(config))
            said = _selection(folder, device, "none", plugins).splitlines(keepends=True)
            kept = (line for line in said if line.split()[0].rstrip(":") in (*WEIGHED, *ALWAYS))
            answers.setdefault("".join(kept), []).append(kind)
            (Path(folder) / "hf_quant_config.json").unlink(missing_ok=True)
    return "\n".join(f"deepseek-v3, {', '.join(kinds)}:\n{a}" for a, kinds in answers.items())


def _lines(plan: Plan) -> Iterator[str]:
    yield f"  {plan.dtype}, {plan.kv_layout}, pages of {plan.page_size}\n"
    for name in OPS:
        found: dict[str, list[str]] = {}
        for row in (r for r in plan.rows if r.op == name):
            found.setdefault(row.kernel, []).extend(row.sites)
        sizes = sorted(found, key=lambda kernel: -len(found[kernel]))
        said = [sizes[0], *(f"{k} at {', '.join(found[k])}" for k in sizes[1:])] if sizes else []
        if said and not (OPS[name].optional and set(found) == {"composed"}):  # its parts have lines
            yield f"  {name:<15}{'; '.join(said)}\n"
    for field, change, _, because in plan.changes:
        if field == "disable_graph":
            yield f"  {field}: {change}: {because}\n"


def difference() -> list[str]:
    """What a new table would change, as a diff; empty if it is as written."""
    old, new = TABLE.read_text().splitlines(), table().splitlines()
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
