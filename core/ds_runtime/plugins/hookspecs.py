"""The eleven hooks. `ds_runtime.plugins.manager` calls all at start-up, except `ds_kv_transfer`.
It calls none in a step.

The answers of `ds_platform`, of the offers and of `ds_defaults` depend on their arguments alone:
with the same ones each is called once per process.

A plugin is a module (entry-point group `ds_runtime`) with functions of these names marked
`@hookimpl`, or with an object `hooks` that `hooks.plugin` makes. A function may take fewer
arguments than the spec lists. A plugin that raises becomes a refusal with its traceback, and
nothing of it stays registered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from ds_runtime.common.hookimpl import hookimpl as hookimpl

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from fastapi import FastAPI

    from ds_runtime.config import EngineConfig
    from ds_runtime.ops.contract import Change, Facts, Kernel, QuantLoader, Refusal
    from ds_runtime.ops.kernel import Layout
    from ds_runtime.platform.contract import Platform
    from ds_runtime.platform.kv_transfer import KvTransfer
    from ds_runtime.plugins.routes import RoutedEngine

hookspec = pluggy.HookspecMarker("ds_runtime")


@hookspec
def ds_platform() -> Platform | Refusal | None:
    """The device kind that this plugin brings, a Refusal saying why it cannot run here, or None.

    Called before the rest of a start. It must not import torch or vendor packages: look at devices
    through the operating system. None means that the plugin brings no platform at all.
    """


@hookspec
def ds_attention(facts: Facts) -> Sequence[Kernel | Layout]:
    """Offers of attention: prefill, decode, merging, absorption, cache ops, and layouts of caches.

    `facts` describe device and model, without a site. Offer everything; refuse per site.
    """


@hookspec
def ds_moe(facts: Facts) -> Sequence[Kernel]:
    """Offers of routed experts, per weight format."""


@hookspec
def ds_quant_loaders(facts: Facts) -> Sequence[QuantLoader | Kernel]:
    """Loaders of checkpoint formats, and offers of linears per weight format."""


@hookspec
def ds_topk(facts: Facts) -> Sequence[Kernel]:
    """Offers of expert routing, and of the scores and choices of an indexer."""


@hookspec
def ds_ops(facts: Facts) -> Sequence[Kernel]:
    """Offers of the small ops: norm, rope, activation, embedding, quantisation, sampling,
    log-probs.
    """


@hookspec
def ds_defaults(config: EngineConfig, facts: Facts) -> Sequence[Change]:
    """Wishes for config fields that the user did not set. The user's own settings win. Wishes for
    `fusion`, like ("NAME=off",), apply to each fusion that the user did not name.

    Two plugins that want different values for one field are an error. Changes are logged. If a
    plugin wishes for a page size, that is settled first. Then all plugins are asked again, with
    the page size in `facts`.
    """


@hookspec
def ds_observer(config: EngineConfig) -> Any:
    """An object whose optional methods `on_step(stats)` and `on_finish(tokens)` are called, or
    None.

    `on_step` gets the Stats after every step, `on_finish` the last Tokens of every request that
    ends. Steps wait for both. An observer that raises is dropped, with a line on standard error.
    """


@hookspec
def ds_kv_transfer(config: EngineConfig, origin: bytes) -> KvTransfer | None:
    """Returns what moves pages between engines, instead of sockets and shared memory, or None.

    Called in the engine's process, on its own thread between steps, when pages are first needed.
    `origin` identifies everything that the bytes of pages depend on (`KvTransfer` says more). Only
    one of the loaded plugins may return a transfer.
    """


@hookspec
def ds_cli(subcommands: _SubParsersAction[Any]) -> None:
    """Add subcommands to the command line. It is called while the command line is built, so import
    nothing heavy.

    Each parser sets `run`, a function of the namespace that returns the exit code (None: 0):
    `subcommands.add_parser("name", help="…").set_defaults(run=function)`.
    """


@hookspec
def ds_routes(app: FastAPI, engine: RoutedEngine) -> str | None:
    """Add HTTP routes. Returns None, or a sentence that says why it adds none; the server then does
    not start. Called only for plugins that the operator names with `--routes`.

    `engine` generates: `async for piece in engine.generate(prompt)`. The API key protects these
    routes like all others.
    """


HOOKS: tuple[str, ...] = (
    "ds_platform",
    "ds_attention",
    "ds_moe",
    "ds_quant_loaders",
    "ds_topk",
    "ds_ops",
    "ds_defaults",
    "ds_observer",
    "ds_kv_transfer",
    "ds_cli",
    "ds_routes",
)
OFFER_HOOKS: tuple[str, ...] = ("ds_attention", "ds_moe", "ds_quant_loaders", "ds_topk", "ds_ops")
