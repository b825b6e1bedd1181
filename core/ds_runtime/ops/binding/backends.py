"""`--attention-backend` and its like: one provider's name instead of a pin per op."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping

from ds_runtime.config import EngineConfig
from ds_runtime.config.fields import flag_of
from ds_runtime.config.spelling import Spelling, nothing
from ds_runtime.errors import ConfigError
from ds_runtime.ops.binding.pins import Pin
from ds_runtime.ops.contract import Kernel
from ds_runtime.ops.table import OPS

BACKENDS = {
    "nsa_prefill_backend": ("sparse_prefill",),
    "nsa_decode_backend": ("sparse_decode",),
    "nsa_topk_backend": ("index_topk", "index_select"),
    "attention_backend": ("mha_prefill", "mla_decode", "mha_decode"),
    "moe_runner_backend": ("experts",),
}
# What says nothing about a model without an indexer, and the flag that does instead.
_SPARSE = {
    "nsa_prefill_backend": "; --attention-backend is for dense attention",
    "nsa_decode_backend": "; --attention-backend is for dense attention",
    "nsa_topk_backend": "",
    "attention_backend": "",
    "index_cache_dtype": "; --kv-cache-dtype is for the cache of dense attention",
}


def refuse_sparse(config: EngineConfig, architecture: str) -> None:
    """ConfigError if something of sparse attention is given: for models without an indexer."""
    for field, hint in _SPARSE.items():
        given = getattr(config, field)
        if given in SPARSE or (given != "auto" and field != "attention_backend"):
            raise ConfigError(
                f"{flag_of(field)} {given!r}: {architecture} has no indexer, its attention is "
                f"dense: leave the flag out{hint}"
            )


SPARSE = ("nsa", "dsa")  # sparse attention, as a value of --attention-backend
Names = Mapping[str, Mapping[str, str | Spelling]]
"""A plugin's `BACKENDS`: by field, the names under which people know a provider of kernels, and the
provider, or the refusal of what is not here."""
NAMES: Names = {
    "attention_backend": {
        "torch_native": "reference",
        **dict.fromkeys(
            SPARSE, nothing("attends chosen tokens, as the model's indexer says already")
        ),
    },
    "moe_runner_backend": {"torch_native": "reference"},
}


def backend_pins(
    config: EngineConfig,
    kernels: Iterable[Kernel],
    used: Collection[str],
    others: Iterable[Names] = (),
) -> list[Pin]:
    """A pin for every op in `used` of which the wished provider has a kernel. others: plugins'
    names of providers.

    ConfigError when it has none for any of them: the name is wrong, or its plugin is not here.
    """
    named = (*others, NAMES)
    offered = list(kernels)
    pins: list[Pin] = []
    for field, ops in BACKENDS.items():
        wished = getattr(config, field)
        if wished in (None, "auto"):
            continue
        meant = {_plain(name): m for n in named for name, m in n.get(field, {}).items()}
        known_as = meant.get(_plain(wished), wished)
        if isinstance(known_as, Spelling) and not known_as.refused:
            continue
        if isinstance(known_as, Spelling):
            raise ConfigError(f"{flag_of(field)} {wished!r}: {known_as.says}")
        wanted = [op for op in ops if op in used]
        providers = {op: {k.provider for k in offered if k.op.name == op} for op in wanted}
        found = [
            Pin(op, "*", provider, f"{flag_of(field)} {wished!r}")
            for op, names in providers.items()
            for provider in names
            if _plain(provider) == _plain(known_as)
        ]
        if wanted and not found:
            known = sorted({name for names in providers.values() for name in names})
            near = difflib.get_close_matches(wished, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"{flag_of(field)} {wished!r}: no such provider of {' or '.join(wanted)}; {hint}"
                f"offered here: {', '.join(known)}"
            )
        parts = {pin.op for pin in found}
        # Who offers a part means the part: its fusion is then taken apart.
        pins += [pin for pin in found if not parts.intersection(OPS[pin.op].uses)]
    return pins


def _plain(name: str) -> str:
    """Libraries are written with and without a hyphen or an underscore."""
    return name.lower().replace("_", "").replace("-", "")
