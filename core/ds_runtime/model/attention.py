"""Multi-head latent attention: plain MHA for prefill rows, absorbed over the cache for decode.

`expanded.py` has the one without latents in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ds_runtime.description import tree
from ds_runtime.description.config import ModelConfig
from ds_runtime.description.sites import TREE, VERIFY
from ds_runtime.model.indexer import Indexer, LayerStep
from ds_runtime.model.layers import Codes, LinearLayer, RmsNormLayer
from ds_runtime.ops.batch import Batch, DecodePart, PrefillPart, PrefixChunk
from ds_runtime.parallel.sums.by_size import later
from ds_runtime.parallel.sums.normed import Summable

if TYPE_CHECKING:
    from ds_runtime.ops.contracts.linear import Groups
    from ds_runtime.weights.loader import Loader

AT = tree.ATTENTION
LATENT_EPS = 1e-6  # of the two inner norms; published modelling code ignores rms_norm_eps there


class Inputs:
    """x → query, latent and index keys. Their first projections are one matmul where their weights
    have one format: q = q_b(norm(q_a x)), or q_proj x for models without a query latent. Kv = kv_a
    x. Keys = wk x where the layer has an indexer.
    """

    def __init__(self, load: Loader, node: tree.AttentionNode) -> None:
        self.norm: RmsNormLayer | None = None
        if node.up is not None and node.norm is not None:
            ops = load.ops(node.layer, AT)
            self.norm = RmsNormLayer(ops, load.vector(node.norm), LATENT_EPS)
            self.up = load.linear(node.up)
        self.fused = load.bound.has("rms_norm_quantize", node.layer, AT)
        products = load.inputs(node)
        self.makes_keys = node.indexer is not None and node.indexer.keys not in products
        self.joined: LinearLayer | None = None
        if node.query in products:
            self.query, self.latent = load.linear(node.query), load.linear(node.latent)
        else:
            self.widths = tuple(s.local(load.shards.ranks)[0] for s in products[0].parts)
            self.joined = load.linear(products[0])

    def quantizes(self, rows: int, adapters: Tensor | None) -> Groups | None:
        """How that many rows may come as codes, if they may."""
        return None if self.joined is None else self.joined.quantizes(rows, adapters)

    def __call__(
        self, x: Tensor | Codes, adapters: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """[T, hidden] → q [T, heads · (nope + rope)], kv [T, kv_lora + rope], rows strided; the
        query latent [T, q_lora], normed where an indexer reads it, or q where there is none; and
        index keys [T, dim], rows strided, if their projection is one of those joined.
        """
        keys = None
        if self.joined is not None:
            q, *between, kv = self.joined(x, adapters).split_with_sizes(self.widths, 1)
            keys = between[0] if between else None
        else:
            assert isinstance(x, Tensor), "see `quantizes`"
            q, kv = self.query(x, adapters), self.latent(x, adapters)
        if self.norm is None:
            return q, kv, q, keys
        groups = self.up.quantizes(q.shape[0], adapters) if self.fused else None
        if groups is not None:
            return self.up(self.norm.quantized(q, groups)), kv, q, keys
        query = self.norm(q)
        return self.up(query, adapters), kv, query, keys


class Projected(NamedTuple):
    """What a step's rows bring to attention, once the cache holds their latents and keys.

    q: [T, heads, nope + rope], of which q_rope, [T, heads, rope], is the rotated part; latent:
    [T, kv_lora], normed; k_rope: [T, rope], rotated. For an indexer: x [T, hidden], and of `Inputs`
    the query latent and index keys. Where they are made ahead: keys and values of all heads, k
    [T, heads, nope] and v [T, heads, v].
    """

    q: Tensor
    q_rope: Tensor
    latent: Tensor
    k_rope: Tensor
    x: Tensor | None = None
    query: Tensor | None = None
    keys: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None

    def each(self, made: Callable[[Tensor], Tensor]) -> Projected:
        """The same of every tensor."""
        return Projected(*(None if t is None else made(t) for t in self))  # type: ignore[arg-type]


class Attention:
    """One layer's attention on one rank's heads, on all of them where it is divided by sequences;
    returns what is summed over the ranks that divide the heads.
    """

    DECODE: ClassVar[str] = "mla_decode"  # the op whose kernels attend the cache

    def __init__(self, config: ModelConfig, load: Loader, node: tree.AttentionNode) -> None:
        layer = node.layer
        self.ops = load.ops(layer, AT)
        self.comm = load.head_comm
        self.inputs = Inputs(load, node)
        self.kv_norm = load.vector(node.latent_norm)
        self.kv_b = load.absorb(node.kv_b)
        self.o_proj = load.linear(node.output)
        self.fused = load.mla_inputs(node, LATENT_EPS)
        self.indexer: Indexer | None = None
        if node.indexer is not None:
            made = self.inputs.makes_keys
            self.indexer = Indexer(config, load, layer, node.indexer, made)
        self.sparse = config.indexing is not None
        self.expands = load.bound.has("mha_prefill", layer, AT) and not self.sparse
        if not self.sparse:
            self.decode = self._kernel(load, layer, AT)
            # Steps with several tokens per sequence may have a kernel of their own.
            self.verify = self._kernel(load, layer, VERIFY)
            self.tree = self._kernel(load, layer, TREE)
        has_trees = load.bound.has("cache_move", layer, TREE)
        self.move = load.ops(layer, TREE).cache_move if has_trees else None
        self.heads = config.heads // load.shards.heads.size
        self.nope, self.qk_head, self.kv_lora = config.qk_nope, config.qk_head, config.kv_lora
        self.v_head = config.v_head
        self.quantises = load.bound.has("mha_prefill_quantize", layer, AT)
        self.scale = config.softmax_scale

    def _kernel(self, load: Loader, layer: int, module: str) -> tuple[Any, str]:
        """A kernel for decode steps and the key of its state; that of plain decode if no other."""
        if not load.bound.has(self.DECODE, layer, module):
            return self.decode
        kernel = getattr(load.ops(layer, module), self.DECODE)
        return kernel, load.bound.state_key(self.DECODE, layer, module)

    def kernel_for(self, part: DecodePart) -> tuple[Any, str]:
        """The kernel that attends for such rows where attention is not sparse, and the key of its
        state.
        """
        if part.tree is not None:
            return self.tree
        return self.verify if part.q_lens else self.decode

    def quantizes(self, rows: int, batch: Batch) -> Groups | None:
        """How that many rows may come as codes, if they may: an indexer needs them as they are."""
        in_one = self.fused is not None and batch.prefill is None
        if in_one or self.indexer is not None or not rows:
            return None
        return self.inputs.quantizes(rows, batch.adapters)

    def __call__(self, x: Tensor | Codes, step: LayerStep) -> Summable:
        """[T, hidden] → [T, hidden], whose add and norm come next. Writes every row's latent
        and key to the cache first.
        """
        batch = step.batch
        if isinstance(x, Tensor) and x.shape[0] == 0:  # other ranks have sequences
            return x
        if self.fused is not None and batch.prefill is None:
            assert isinstance(x, Tensor), "see `quantizes`"
            rest = batch.positions, step.cos_sin, step.cache, batch.slots
            absorbed, query = self.fused(x, *rest)
            self._index(x, query, None, step)
            out = self._decode(absorbed, step, batch.adapters)
            return self.output(out.flatten(1), batch.adapters)
        projected = self.project(x, step)
        if (codes := self._quantised(projected, batch)) is not None:
            return later(self.comm, self.o_proj(codes))
        return self.output(self.attend(projected, step).flatten(1), batch.adapters)

    def _quantised(self, projected: Projected, batch: Batch) -> Codes | None:
        """What `attend` gives, as the last projection multiplies it; None where it does not so, or
        where not all rows attend new tokens alone.
        """
        part = batch.prefill
        if not self.quantises or part is None or part.prefix or batch.num_decode:
            return None
        q, q_rope = projected.q.narrow(2, 0, self.nope), projected.q_rope
        groups = self.o_proj.quantizes(q.shape[0], batch.adapters)
        if groups is None or groups.size != self.v_head:
            return None
        k, v = self._keys_values(projected, batch.adapters)
        parts = q, q_rope, k, projected.k_rope, v
        attend = self.ops.mha_prefill_quantize
        return Codes(*attend(*parts, part.q_segs, self.scale, *groups))

    def project(self, x: Tensor | Codes, step: LayerStep, ahead: bool = False) -> Projected:
        """What every row is for itself: [T, hidden] → its query, and its latent in the cache.

        ahead: and its keys and values of all heads, where prompts attend these.
        """
        q, kv, query, keys = self.inputs(x, step.batch.adapters)
        q = q.view(-1, self.heads, self.qk_head)
        made = self._cached(q, kv, step, ahead and self.expands)
        if self.indexer is None:
            return made
        assert isinstance(x, Tensor), "see `quantizes`"
        return made._replace(x=x, query=query, keys=keys)

    def _cached(self, q: Tensor, kv: Tensor, step: LayerStep, ahead: bool) -> Projected:
        """q [T, heads, nope + rope] and kv [T, kv_lora + rope], once the cache holds their rows.
        ahead: with keys and values.
        """
        batch, norm = step.batch, (self.kv_norm, LATENT_EPS)
        rest = batch.positions, step.cos_sin, step.cache, batch.slots
        q_rope, latent, k_rope = self.ops.mla_prologue(q, kv, *norm, *rest)
        if not ahead:
            return Projected(q, q_rope, latent, k_rope)
        k, v = self.kv_b.expand(latent, batch.adapters)
        return Projected(q, q_rope, latent, k_rope, k=k, v=v)

    def attend(self, projected: Projected, step: LayerStep) -> Tensor:
        """What rows are for each other: [T, heads, v]."""
        if projected.x is not None:
            assert projected.query is not None
            self._index(projected.x, projected.query, projected.keys, step)
        return self._attend(projected, step)

    def output(self, attended: Tensor, adapters: Tensor | None) -> Summable:
        """[T, heads · v] → [T, hidden], for the sum over the ranks that divide the heads."""
        return later(self.comm, self.o_proj(attended, adapters))

    def _index(self, x: Tensor, query: Tensor, keys: Tensor | None, step: LayerStep) -> None:
        """Choose the tokens to attend, in a layer that does."""
        if self.indexer is not None:
            self.indexer(x, query, keys, step)

    def _attend(self, projected: Projected, step: LayerStep) -> Tensor:
        """Decode and prefill rows, each their own way: [T, heads, v]."""
        q, q_rope = projected.q, projected.q_rope
        batch, cache, selection = step.batch, step.cache, step.selection
        if batch.prefill is None:
            return self._decode_rows(q, q_rope, step, batch.adapters)
        n, adapters = batch.num_decode, batch.adapters
        first, rest = (None, None) if adapters is None else (adapters[:n], adapters[n:])
        if selection is not None and (part := selection.prefill) is not None:
            absorbed = self._absorbed(q[n:], q_rope[n:], rest)
            attended = self.ops.sparse_prefill(
                absorbed, cache, part.chosen, self.kv_lora, self.scale
            )
            out = self.kv_b.apply_v(attended, rest)
        else:
            behind = projected.each(lambda t: t[n:]) if n else projected
            out = self._prefill(behind, batch.prefill, cache, rest)
        if not n:
            return out
        decoded = self._decode_rows(q[:n], q_rope[:n], step, first)
        return torch.cat((decoded, out))

    def _decode_rows(
        self, q: Tensor, q_rope: Tensor, step: LayerStep, adapters: Tensor | None
    ) -> Tensor:
        """Decode rows over the cache: q [n, heads, nope + rope], q_rope its part, rotated → [n,
        heads, v].
        """
        return self._decode(self._absorbed(q, q_rope, adapters), step, adapters)

    def _absorbed(self, q: Tensor, q_rope: Tensor, adapters: Tensor | None) -> Tensor:
        """[n, heads, nope + rope] → [n, heads, kv_lora + rope]: queries of the latent space."""
        return self.kv_b.apply_q(q.narrow(2, 0, self.nope), q_rope, adapters)

    def _decode(self, absorbed: Tensor, step: LayerStep, adapters: Tensor | None) -> Tensor:
        """[n, heads, kv_lora + rope] → [n, heads, v]."""
        batch, cache, selection = step.batch, step.cache, step.selection
        if selection is None:
            assert batch.decode is not None
            kernel, key = self.kernel_for(batch.decode)
            attended = kernel.run(batch.states[key], absorbed, cache, self.scale)
        else:
            assert selection.decode is not None
            slots = selection.decode.chosen
            attended = self.ops.sparse_decode(absorbed, cache, slots, self.kv_lora, self.scale)
        del absorbed  # the widest of a step, where no caller holds it
        return self.kv_b.apply_v(attended, adapters)

    def _prefill(
        self, projected: Projected, part: PrefillPart, cache: Tensor, adapters: Tensor | None
    ) -> Tensor:
        """New tokens among themselves, then merged with each chunk of their cached prefixes. The
        rows whose sequences have no token in a chunk are left out of its products."""
        segs = part.q_segs
        attend = self.ops.mha_prefill
        q, q_rope = projected.q.narrow(2, 0, self.nope), projected.q_rope
        k, v = self._keys_values(projected, adapters)
        out, lse = attend(q, q_rope, k, projected.k_rope, v, segs, segs, True, self.scale)
        for chunk in part.prefix:
            k, k_rope, v = self._prefix(chunk, cache, q.dtype)
            own = chunk.q_segs
            parts = (t.narrow(0, chunk.row, own.total) for t in (q, q_rope, out, lse))
            own_q, own_rope, own_out, own_lse = parts
            old = attend(own_q, own_rope, k, k_rope, v, own, chunk.segs, False, self.scale)
            merged, merged_lse = self.ops.merge_state(own_out, own_lse, *old)
            if own.total == segs.total:
                out, lse = merged, merged_lse
            else:
                own_out.copy_(merged)
                own_lse.copy_(merged_lse)
        return out

    def _keys_values(self, projected: Projected, adapters: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of new tokens: [n, heads, nope] and [n, heads, v]."""
        if projected.k is not None and projected.v is not None:
            return projected.k, projected.v
        k, v = self.kv_b.expand(projected.latent, adapters)
        return k, v

    def _prefix(
        self, chunk: PrefixChunk, cache: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of cached tokens the keys [n, heads, nope], their rotated part [n, rope], and the values
        [n, heads, v].
        """
        latent, k_rope = self.ops.cache_gather(
            cache, chunk.page_table, chunk.starts, chunk.segs, self.kv_lora, dtype
        )
        k, v = self.kv_b.expand(latent, chunk.adapters)
        return k, k_rope, v
