"""The hooks of a plugin that brings a platform or kernels, said in one place. Torch-free.

A plugin's module has its hooks as functions marked `@hookimpl`, or one object `hooks` that `plugin`
makes. What that names is lazy, "module:attr": nothing is imported before the hook is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from ds_runtime.common.hookimpl import hookimpl
from ds_runtime.ops.contract import Change, Facts, Kernel, QuantLoader, Refusal, load_attr
from ds_runtime.ops.kernel import Layout
from ds_runtime.platform.contract import Platform
from ds_runtime.plugins import hookspecs

NAME = "hooks"  # of a module's attribute


class Hooks:
    """What `plugin` returns: hooks and attributes, as a module would have them."""

    def __init__(self, has: Mapping[str, Any]) -> None:
        vars(self).update(has)


def plugin(
    *,
    platform: str = "",
    probe: str = "",
    offers: str = "",
    defaults: Callable[[Facts], Sequence[Change]] | None = None,
    diagnose: str = "",
    flags: Mapping[str, Any] | None = None,
    backends: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    **more: Callable[..., Any],
) -> Hooks:
    """Returns the hooks of a plugin. Its module keeps them under the name `hooks`. Every text is
    lazy.

    * platform: names a `Platform` class.
    * probe: names a function without arguments that returns a `Refusal`, or None if the plugin can
      serve. It is asked before the platform is made, and by `ds-runtime plugins`.
    * offers: names a sequence of `Kernel`, `Layout` and `QuantLoader`, or a function of the facts
      that returns one.
    * defaults: `(facts) -> Sequence[Change]`, as the hook `ds_defaults`.
    * diagnose: names a function without arguments that returns (name, text) pairs for `ds-runtime
      doctor`. It is not called if the probe refuses.
    * flags: flag of another engine → a field of EngineConfig, or a `Spelling`.
    * backends: the same for values of flags such as `--attention-backend`, by field: value →
      provider.
    * environment: variable that another engine reads → a sentence.
    * more: further hooks by their names, such as `ds_cli`.

    Raises TypeError for a name that is no hook.
    """

    def look() -> Refusal | None:
        found: Refusal | None = load_attr(probe)() if probe else None
        return found

    def ds_platform() -> Platform | Refusal:
        return look() or load_attr(platform)()

    def ds_ops(facts: Facts) -> Sequence[Kernel | Layout | QuantLoader]:
        found: Any = load_attr(offers)
        made: Sequence[Kernel | Layout | QuantLoader] = found(facts) if callable(found) else found
        return made

    def say() -> list[tuple[str, str]]:
        return [] if look() is not None else list(load_attr(diagnose)())

    if unknown := sorted(more.keys() - set(hookspecs.HOOKS)):
        raise TypeError(f"plugin() got {unknown[0]!r}, which is no hook")
    own = {"ds_platform": platform and ds_platform, "ds_ops": offers and ds_ops}
    marked = {**own, "ds_defaults": defaults, **more}
    said = {"FLAGS": flags, "BACKENDS": backends, "ENVIRONMENT": environment}
    has: dict[str, Any] = {name: hookimpl(each) for name, each in marked.items() if each}
    has |= {"PROBE": look} | ({"DIAGNOSE": say} if diagnose else {})
    return Hooks(has | {name: each for name, each in said.items() if each})


def of(module: ModuleType) -> Any:
    """Returns what has a plugin's hooks: the `hooks` of its module, or the module itself.

    Raises TypeError where the module has both.
    """
    found = getattr(module, NAME, None)
    if not isinstance(found, Hooks):
        return module
    for name in hookspecs.HOOKS:
        if hasattr(module, name):
            raise TypeError(f"{name} is defined next to `{NAME}`: give it to plugin({name}=…)")
    return found
