"""What ran, as tools/gen_docs.py writes it: docs/support.md and docs/clients.md."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path

from ds_runtime.plugins.manager import load_plugins
from ds_runtime_kit import support

# Those of the tree, whatever else is installed.
PLUGINS = ("cpu", "cuda", "npu", "rocm", "triton", "xpu")
SUPPORT_NOTE = """\
<!-- Written by tools/gen_docs.py: ds-runtime conform --mode support, with the tree's plugins. -->

"""


def support_matrix() -> str:
    """What `ds-runtime conform --mode support` says of the plugins of the tree."""
    plugins = load_plugins(PLUGINS)
    page = SUPPORT_NOTE + support.as_markdown(support.matrix(plugins), plugins)
    said = ", ".join(" ".join(next(iter(told.items()))) for told in _clients().values())
    return f"{page.rstrip()}\n\n{SUPPORT_STATES}{SUPPORT_CLIENTS}{said}. |\n"


PAGES = {
    "engines of one rank, by shared memory, Unix sockets or TCP": (
        "*ran on* CPUs, *unrun* on other devices"
    ),
    "replicas (`--dp` without DP attention)": "each is an engine of one rank: as above",
    "`--tp` above 1, DP attention included": "refused, with that reason",
    "a vendor's fabric (`ds_kv_transfer`)": "*unrun*: its contract and conformance cases alone",
}
TIERS = {
    "host memory (`--enable-hierarchical-cache`)": "*ran on* CPUs and an H200, *unrun* on others",
    "disk (`--disk-cache`)": "*ran on* CPUs, with `--tp` 2 on one node (DP attention and "
    "`--disable-mla` included), and on two nodes that are processes of one machine; *unrun* on "
    "other devices",
    "both, under DeepSeek-V4 (pages and states)": "*ran on* CPUs, with `--tp` 1 and 2",
    "LMCache": "*unrun*: lmcache 0.5.6 asks for CUDA's packages (cupy, cuda-python), and without "
    "its requirements it does not import",
    "Mooncake Store": "*unrun*: mooncake-transfer-engine 0.3.13.post1, and its build without CUDA, "
    "do not import without the system's libibverbs",
}
PARTS = {
    "`--ep`, alone and with DP attention": "*ran on* CPUs and on two H200s, *unrun* on four",
    "`--ep` with other kernels than Triton's on GPUs": (
        "conformance *ran on* an H200 for the project's own for CUDA and torch's grouped matmul, "
        "*unrun* for DeepGEMM; others are not bound: they do not say *any part*"
    ),
    "rows as FP8 codes between ranks": (
        "*ran on* CPUs with `reference.Fp8W8A8Experts`; timed on two H200s, where answers were not "
        "compared"
    ),
    "tokens per expert (`--expert-metrics`)": "*ran on* CPUs, captured too, *unrun* on GPUs",
    "delay of the last rank (`/metrics`)": "*ran on* CPUs, captured too: names a rank that was "
    "made slow; measured on two H200s, where none was made slow",
    "prompts in two halves (`--enable-two-batch-overlap`)": "*ran on* CPUs and on two H200s, where "
    "answers were not compared, *unrun* on four",
    "every collective (`conform --ranks`)": "*ran on* CPUs and on two H200s; with 4 ranks, which "
    "shared one H200 (NCCL 2.31.2)",
    "a rank that dies (a sentence, and the end of all)": "*ran on* CPUs; in every phase with 2 "
    "ranks over NCCL, which shared one H200",
    "bytes that a rank receives (`/metrics`)": "by arithmetic, without draft layers "
    "and with all rows in the last FFN: *ran on* CPUs, *unrun* on GPUs",
}
COSTS = {
    "`tune costs`, `tune comm`": "*ran on* CPUs and on two H200s, *unrun* on other devices",
    "`tune host`": "*ran on* CPUs and on the host of two H200s",
    "`queue` and `lasting` of kernels (`tune costs`)": "*ran on* an H200",
    "decode steps (`plan`)": "held against steps on CPUs and on two H200s, *unrun* on four",
    "busiest rank of `--ep` (`plan`)": "held against drawn choices and against routers of random "
    "weights, *unrun* with trained ones",
    "prefills (`plan`)": "held against two H200s: 5 to 19 % too fast (V3)",
    "sparse attention, and `--add` (`tune costs`)": (
        "*ran on* CPUs and an H200, *unrun* on other devices"
    ),
    "costs that come with the tree": ("of an H200 and of two, without DeepGEMM and FlashMLA"),
}
V4 = {
    "text, `--tp`, `--ep`, `--quantize`, DP attention": "*ran on* CPUs, *unrun* on other devices",
    "[prefix hits](cache-groups.md) where prompts part, `convert`": "*ran on* CPUs, *unrun* on "
    "other devices",
    "drafts, adapters, `--disable-mla`, `--batch-invariant`": "refused, with a sentence",
    "[`demo-v4`](demo.md#a-sibling-of-the-deepseek-v4-architecture)": (
        "trained on an H200; *ran on* CPUs"
    ),
}
INSTRUCTION_SETS = {
    "generic, avx2, avx512, avx512bf16": "*ran on* CPUs of x86-64",
    "amx": "*ran under emulation* of its instructions (`tools/check_native.py amx`), V4 included; "
    "earlier kernels *ran on* an Intel Xeon",
}


def _states(title: str, what: str, rows: Mapping[str, str]) -> str:
    """A section of the support page."""
    lines = "".join(f"| {row} | {state} |\n" for row, state in rows.items())
    return f"## {title}\n\n| {what} | state |\n|---|---|\n{lines}\n"


SUPPORT_STATES = (
    _states("Pages from engine to engine", "[handed over](kv-transfer.md) between", PAGES)
    + _states("Cached pages below the device", "[tier](operating.md)", TIERS)
    + _states("Experts by number", "[--ep](many-devices.md)", PARTS)
    + _states("Predicted steps", "[prediction](prediction.md)", COSTS)
    + _states("DeepSeek-V4", "[V4](numerics.md#deepseek-v4)", V4)
    + _states("Instruction sets of CPUs", "[native library](install.md)", INSTRUCTION_SETS)
)


SUPPORT_CLIENTS = """\
## Clients

| what | ran, as it comes from its package |
|---|---|
| [clients of the HTTP API](clients.md) | """


def clients() -> str:
    """Which clients run, in which versions, and what each did."""
    out = [CLIENTS_NOTE, "# Clients\n\n", CLIENTS_HEAD]
    for client, told in _clients().items():
        tree = ast.parse((CLIENTS / "uses" / f"use_{client}.py").read_text())
        uses = ", ".join(_uses(tree))
        numbers = ", ".join(f"{package} {number}" for package, number in told.items())
        out.append(f"| {numbers} | {uses} |\n")
    return "".join(out)


CLIENTS = Path(__file__).resolve().parents[1] / "tests" / "clients"
CLIENTS_NOTE = "<!-- Written by tools/gen_docs.py from tests/clients. -->\n\n"
CLIENTS_HEAD = """\
These clients work as they come from their packages, without a patch or a plugin. Each ran against
`ds-runtime serve` with the demo model, in an environment of its own. The bytes that each sent
are in `tests/clients/recorded`. The default tests send them again.

The base URL is the server's with `/v1` for OpenAI's clients, and without it for Anthropic's, for
guidellm and for SGLang's benchmark. If the server has no key, clients may send any key.

* lm-eval asks `/tokenizer_info`. If the server answers, lm-eval uses the server's tokenizer, unless
  `tokenizer_backend=huggingface` names another. With the server's tokenizer it cannot render chats
  for completions: it sends messages to `/tokenize`, which takes a text.
* Of SGLang's wheel only the benchmark's files are installed, unchanged. They need one line of
  SGLang's engine. That line comes along, because the engine itself cannot be imported without CUDA.

```console
pytest -m clients tests/clients            # these versions
pytest -m clients tests/clients --record   # the newest ones; versions and bytes are written down
```

| client | uses that ran |
|---|---|
"""


def _clients() -> dict[str, dict[str, str]]:
    """Versions by package, that of the client itself first."""
    found: dict[str, dict[str, str]] = json.loads((CLIENTS / "versions.json").read_text())
    return found


def _uses(tree: ast.Module) -> list[str]:
    """The names of the functions that are uses, as words."""
    return [
        node.name.replace("_", " ")
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if any(isinstance(mark, ast.Name) and mark.id == "use" for mark in node.decorator_list)
    ]
