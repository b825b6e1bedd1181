"""The whole vocabulary of the runtime, from the areas of `ops/contracts/`: each op is a field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from ds_runtime.ops.contracts import activation, limited, linear, lora, moe, norm, sampling, streams
from ds_runtime.ops.contracts.attention import (
    cache,
    decode,
    index,
    index_keys,
    latent,
    prefill,
    rope,
    sparse,
    window,
)
from ds_runtime.ops.declare import Area, Op, Results


class _Unbound:
    """Stands in an Ops view for an op that the site did not ask for; using it is a bug."""

    def __init__(self, op: str, site: str) -> None:
        self._what = f"op {op!r} is not bound at site {site!r}"

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise RuntimeError(self._what)

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(self._what)


class Ops(
    linear.EmbeddingOps,
    norm.NormOps,
    rope.RotationOps,
    linear.MatrixOps,
    lora.AdapterOps,
    cache.CacheOps,
    latent.LatentOps,
    prefill.PrefillOps,
    decode.DecodeOps,
    index_keys.IndexKeyOps,
    index.IndexOps,
    sparse.SparseOps,
    window.WindowOps,
    activation.ActivationOps,
    moe.ExpertOps,
    limited.LimitedOps,
    streams.StreamOps,
    sampling.SamplingOps,
):
    """One site's view: every op that it may call, as a field. Frozen after binding."""

    def __init__(self, bound: Mapping[str, object], site: str) -> None:
        vars(self).update({n: bound.get(n, _Unbound(n, site)) for n in OPS})

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"an Ops view is frozen: {name}")

    @staticmethod
    def of(bound: Mapping[str, object], site: str) -> Ops:
        """A view from op name → callable or object; the rest raises when used."""
        return Ops(bound, site)


OPS: dict[str, Op] = {
    name: said
    for area in Ops.__mro__
    if area not in (Ops, Area)
    for name, said in vars(area).items()
    if isinstance(said, Op)
}
# By op, and method of one that is an object: the results of a call, of facts and arguments.
RESULTS: dict[str, Results] = {
    f"{name}.{method}".rstrip("."): made
    for name, said in OPS.items()
    for method, made in said.results.items()
}
