"""Writes the reference pages of docs/ from the code, and clients.md from tests/clients; --check
only compares.

python tools/gen_docs.py [--check]
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from pathlib import Path
from types import FunctionType

import plugin_page
import ran_pages
import reference_pages
from documented import signature, text
from ds_runtime.engine.messages import Ready, Stats, TokenLogprob, Tokens
from ds_runtime.ops.contract import load_attr
from ds_runtime.ops.declare import Op, parameters_of
from ds_runtime.ops.reference.layouts import (
    EXPANDED_PAGES,
    INDEX_PAGES,
    LATENT_FP8_GROUPS,
    LATENT_PAGES,
)
from ds_runtime.ops.table import OPS
from ds_runtime.plugins import hookspecs
from ds_runtime.plugins.routes import RoutedEngine
from ds_runtime.server.metrics import EngineView, Metrics
from flags_page import known_flags
from plugin_page import of_class

DOCS = Path(__file__).resolve().parents[1] / "docs"
NOTE = "<!-- Written by tools/gen_docs.py from the code: change the docstrings there. -->\n\n"


def contracts() -> str:
    """Every op: its Protocol's docstring, signatures, tolerance, fusion and layout."""
    out = [NOTE, "# Op contracts\n\n", CONTRACTS_HEAD, _layouts(), _index()]
    for area, ops in _areas().items():
        out.append(f"## {_title(area)} ops\n\n{_module_line(area)}\n\n")
        out += [_contract(op) for op in ops]
    return "".join(out)


CONTRACTS_HEAD = """\
This page says what a kernel of each op must compute. It is for those who write kernels.
[Writing a plugin](writing-a-plugin.md) shows how a kernel is offered, and the
[plugin API](plugin-api.md) has the types of arguments, such as `Batch` and `Packed`.

The docstrings are the contract. The torch reference in `ds_runtime/ops/reference/` is its
executable form. `ds-runtime conform` compares every kernel with that reference in float64. The
tolerance is relative: the norm of the difference divided by the norm of the oracle. It depends on
the compute dtype, or on the kernel's `numerics`.

A *function* op is called directly. An *object* op is made once per site from the site's
`Facts`. It owns packed weights or the state of a step. A *heavy* op on the reference causes a
warning at start, and an error under `--strict-ops`. A *fusion* does the work of several ops.

Unless a docstring says something else:

* Tensors are contiguous, and all are on the device of the site.
* Arguments are not changed, and results are new tensors.
* The compute dtype is `facts.dtype`. What a kernel rounds has to lie within the tolerance.
* `T` or `tokens` is the number of rows of a step, and may be 0. `heads` are those of this rank.
* `latent` has `kv_lora` numbers. `nope` and `rope` are the parts of a head's key without and with
  rotation (`qk_nope`, `qk_rope` of `facts.dims`), `v` the width of its value.
* A slot is the place of a token in a paged cache: slot s is entry s % page_size of page
  s // page_size. A negative slot is padding.
* `cos_sin` is the table of Rope. A segment is the rows of one sequence (`Segments`).

Each layout of the references has a tag. Kernels that read and write it name the tag.

"""
AFTER_LAYOUTS = "\n[Cache groups](cache-groups.md) says how a plugin brings its own layout.\n\n"


def _layouts() -> str:
    """The layouts of the references, by the docstrings of their modules."""
    out = []
    for layout in (LATENT_PAGES, LATENT_FP8_GROUPS, EXPANDED_PAGES, INDEX_PAGES):
        doc = inspect.getdoc(importlib.import_module(layout.allocate.partition(":")[0])) or ""
        said = " ".join(doc.partition("\n\n")[2].split())
        out.append(f"* `{layout.tag}`: {said}\n")
    return "".join([*out, AFTER_LAYOUTS])


def _index() -> str:
    """The ops by area, each with a link."""
    out = ["| area | ops |\n|---|---|\n"]
    for area, ops in _areas().items():
        named = ", ".join(f"[`{op.name}`](#{op.name})" for op in ops)
        out.append(f"| [{_title(area)}](#{_title(area).replace(' ', '-')}-ops) | {named} |\n")
    return "".join([*out, "\n"])


def _title(area: str) -> str:
    return area.rpartition(".")[2].replace("_", " ")


def _areas() -> dict[str, list[Op]]:
    """The ops by the module of their contracts."""
    areas: dict[str, list[Op]] = {}
    for op in OPS.values():
        areas.setdefault(op.protocol.partition(":")[0], []).append(op)
    return areas


def _module_line(name: str) -> str:
    doc = inspect.getdoc(importlib.import_module(name))
    return (doc or "").splitlines()[0]


def _contract(op: Op) -> str:
    protocol = load_attr(op.protocol)
    kind = f"{op.kind}{', heavy' if op.heavy else ''}"
    lines = [f"### `{op.name}`\n", f"{op.summary[:1].upper()}{op.summary[1:]}. "]
    older = f" (kernels for {op.served[1]} are adapted)" if op.served[1:] else ""
    version = f"contract version {op.version}{older}"
    lines.append(f"{kind.capitalize()}; {version}; `{op.protocol}`.\n")
    lines.append("```python\n" + _signatures(protocol) + "```\n")
    lines.append(text(protocol, _arguments(protocol)) + "\n")
    lines += [_beside(path) for path in op.beside]
    if op.composition:
        parts = ", ".join(f"`{p}`" for p in op.uses)
        lines.append(f"A fusion: without a kernel of its own it is composed of {parts}.\n")
    if op.optional:
        parts = ", ".join(f"`{p}`" for p in op.uses)
        lines.append(f"A fusion: if no plugin offers it, the model calls {parts} instead.\n")
    if op.layout:
        lines.append(f"All kernels of a process agree on one layout for `{op.layout}`.\n")
    bounds = ", ".join(f"{dtype} {bound:g}" for dtype, bound in op.tolerance.items())
    lines.append(f"Tolerance: {bounds}.\n")
    lines[1:3] = ["".join(lines[1:3])]
    return "\n".join(lines) + "\n"


def _beside(path: str) -> str:
    """Methods that an object may have in addition to its contract."""
    protocol = load_attr(path)
    code = f"```python\n{_signatures(protocol)}```\n\n"
    return f"#### `{protocol.__name__}`\n\n{code}{text(protocol, _arguments(protocol))}\n"


def _arguments(protocol: type) -> set[str]:
    """The names of the arguments of all methods."""
    return {name for names in parameters_of(protocol).values() for name in names}


def _signatures(protocol: type) -> str:
    out = []
    for name, member in vars(protocol).items():
        if isinstance(member, FunctionType) and (not name.startswith("_") or name == "__call__"):
            out.append(signature(member))
    return "".join(out)


HOOKS_HEAD = """\
A hook is a function of a plugin that the runtime calls. This page lists the hooks, when each is
called, and what it returns. It is for authors of plugins. [Writing a plugin](writing-a-plugin.md)
begins earlier, and the [plugin API](plugin-api.md) has the types of arguments and results.

A plugin is a module that the entry-point group `ds_runtime` names. It has functions with the names
below, marked `@hookimpl` (`from ds_runtime.api import hookimpl`). Or it has an object `hooks` that
[`plugin`](plugin-api.md#plugin) returns. A function may take fewer arguments than listed, so an
argument that is added here later breaks no plugin.

| when | hooks |
|---|---|
| while the command line is built | `ds_cli` |
| start 1: the device is chosen | `ds_platform` |
| start 2: device facts and config.json are known, the config is not frozen yet | `ds_defaults` |
| start 3: before one decision per op and site | `ds_attention`, `ds_moe`, `ds_quant_loaders`, \
`ds_topk`, `ds_ops` |
| start 4: the engine is made, with its weights | `ds_observer` |
| the server is made | `ds_routes` |
| pages are first needed from, or by, another engine | `ds_kv_transfer` |

No hook is called during a step. The five hooks of start 3 are the *offers*. The runtime joins their
results: each of them may return kernels, layouts and loaders, and the names only help the reader.

`ds_platform`, the offers and `ds_defaults` are called once per process for the same arguments. The
runtime keeps their results, and each runtime gets a copy of the platform.

A plugin is dropped whole if it raises, misspells a hook or an argument, or returns something else.
`ds-runtime plugins --verbose` shows its traceback. The log names plugin, hook and seconds of a call
that takes more than 1 s. A hook cannot start a runtime: `LLM`, `assemble` and `load_plugins` raise
inside a hook, and in a thread that it waits for.

"""


def hooks() -> str:
    """Every hook with its signature and docstring, and the classes that only hooks get."""
    out = [NOTE, "# Hooks\n\n", HOOKS_HEAD]
    for name in hookspecs.HOOKS:
        function = getattr(hookspecs, name)
        arguments = list(inspect.signature(function).parameters)
        call = f"{name}({', '.join(arguments)})"
        out.append(f"## `{call}`\n\n```python\n{signature(function)}```\n\n")
        out.append(text(function, arguments) + "\n\n" + EXAMPLES.get(name, ""))
    shown = [of_class(kind, "##") for kind in (RoutedEngine, Stats, Tokens, TokenLogprob)]
    return "".join(out) + "\n".join(shown).rstrip() + "\n"


EXAMPLES = {
    "ds_observer": """\
```python
from typing import Any

from ds_runtime.api import EngineConfig, hookimpl


class Watch:
    \"\"\"Prints why each answer ended, and how full the cache is.\"\"\"

    def on_step(self, stats: Any) -> None:
        self.free = stats.pages_free / stats.pages_total

    def on_finish(self, tokens: Any) -> None:
        print(f"{tokens.rid}: {tokens.finish}, {self.free:.0%} of the pages are free")


@hookimpl
def ds_observer(config: EngineConfig) -> Watch:
    return Watch()
```

""",
}


METRICS_HEAD = """\
`/metrics` answers in Prometheus' text format. Names after `ds_runtime_` are vLLM's where it
measures the same, with its labels `model_name` and `engine`: in its dashboards, replace `vllm:` by
`ds_runtime_`. The last column is SGLang's name, after `sglang:`. Counters end in `_total`;
histograms have `_bucket`, `_sum` and `_count`. Times are in seconds.

No label comes from a request: routes are patterns, and paths that match none are `other`. What
requests say is nowhere in here. `process_*` are the front end's memory, CPU time and open files.

"""

SGLANG = {
    "num_requests_running": "num_running_reqs",
    "num_requests_waiting": "num_queue_reqs",
    "kv_cache_usage_perc": "token_usage",
    "prompt_tokens": "prompt_tokens_total",
    "generation_tokens": "generation_tokens_total",
    "prefix_cache_hits": "cached_tokens_total",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
}


def metrics() -> str:
    """Every metric of a server whose engine is ready, by the exposition itself."""
    row = dict.fromkeys(("op", "kernel", "provider"), "x")
    ready = Ready(
        banner="",
        context_length=1,
        vocab_size=1,
        kv_tokens=1,
        page_size=1,
        queue_limit=1,
        plan={"rows": [row]},
    )
    found = Metrics(
        [
            EngineView(
                lambda: Stats(
                    compilations={"compiler kernel": 1},
                    expert_tokens={3: [1]},
                    sums={"one_shot": 1},
                    sum_bytes={"one_shot": 1.0},
                    rank_late={0: 0.0},
                ),
                lambda: ready,
                lambda: True,
            )
        ],
        "x",
    )
    found.finished("stop")
    found.requests.labels("/", "200").inc()
    out = [NOTE, "# Metrics\n\n", METRICS_HEAD, "| name | kind | labels | what | SGLang |\n"]
    out.append("|---|---|---|---|---|\n")
    for family in sorted(found.registry.collect(), key=lambda f: f.name):
        if not family.name.startswith("ds_runtime_"):
            continue
        sample = next(s for s in family.samples if not s.name.endswith("_created"))
        name = sample.name if family.type in ("counter", "info") else family.name
        labels = ", ".join(f"`{key}`" for key in sample.labels if key != "le")
        other = SGLANG.get(family.name.removeprefix("ds_runtime_"))
        said = f"`{other}`" if other else ""
        text = family.documentation
        out.append(f"| `{name}` | {family.type} | {labels} | {text} | {said} |\n")
    return "".join(out)


def pages() -> dict[Path, str]:
    """Every generated page with its text."""
    return {
        DOCS / "contracts.md": contracts().rstrip() + "\n",
        DOCS / "hooks.md": hooks(),
        DOCS / "metrics.md": metrics(),
        DOCS / "support.md": ran_pages.support_matrix(),
        DOCS / "known-flags.md": known_flags(NOTE),
        DOCS / "clients.md": ran_pages.clients(),
        DOCS / "flags.md": reference_pages.flags(NOTE),
        DOCS / "plugin-api.md": plugin_page.plugin_api(NOTE),
    }


def stale() -> list[Path]:
    """Generated pages that differ from the code."""
    return [p for p, text in pages().items() if not p.exists() or p.read_text() != text]


def main() -> int:
    """Write the pages, or name those that would change."""
    parser = argparse.ArgumentParser(description="Write the pages that come from the code.")
    parser.add_argument("--check", action="store_true", help="exit 1 if a page is out of date")
    args = parser.parse_args()
    changed = stale()
    if args.check:
        for path in changed:
            print(f"{path.name} is out of date: run python tools/gen_docs.py", file=sys.stderr)
        return int(bool(changed))
    for path in changed:
        path.parent.mkdir(exist_ok=True)
        path.write_text(pages()[path])
        print(f"wrote {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
