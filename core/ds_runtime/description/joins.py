"""Rules that join weights: each rewrites a layer's tree. Torch-free.

`--disable-fusion` leaves apart what a rule would join, by its name.
"""

from __future__ import annotations

from collections.abc import Collection

from ds_runtime.description.structure import JOINED_INPUTS
from ds_runtime.description.tree import AttentionNode, BlockNode, LinearNode, MoeNode, joined

QKV_A, INDEX_KEYS, SHARED_EXPERTS = "qkv_a", "index_keys", "shared_experts"
JOINS = (QKV_A, INDEX_KEYS, SHARED_EXPERTS)
_SLOT_FORMATS = frozenset({"dense", "fp8_block"})  # in which a part of a Linear is one, too
_BLOCK = 128


def rewritten(block: BlockNode, apart: Collection[str], adapted: Collection[str] = ()) -> BlockNode:
    """The layer with its weights joined. apart: rules that are not wanted. adapted: weights that
    have slots for low-rank adapters; of routed experts all of a layer, or none."""
    mlp = block.mlp
    if isinstance(mlp, MoeNode):
        single = mlp.experts[0].parts[0].name in adapted
        mlp = mlp._replace(single=True) if single else hold_shared(mlp, apart, adapted)
    return block._replace(attention=join_inputs(block.attention, apart), mlp=mlp)


def join_inputs(a: AttentionNode, apart: Collection[str]) -> AttentionNode:
    """Rules `qkv_a` and `index_keys`: the first projections of query and latent are one product if
    they have one format. The projection of index keys joins them if it has that format."""
    if QKV_A in apart or a.query.format != a.latent.format:
        return a
    some = [a.query, a.latent]
    if a.indexer is not None and INDEX_KEYS not in apart:
        keys = a.indexer.keys
        some += [keys] if keys.format == a.query.format else []
    some = [product for product in a.inputs if product in some]  # in their order
    both = LinearNode(a.layer, JOINED_INPUTS, tuple(part for p in some for part in p.parts))
    return a._replace(inputs=(both, *(p for p in a.inputs if p not in some)))


def hold_shared(moe: MoeNode, apart: Collection[str], adapted: Collection[str]) -> MoeNode:
    """Rule `shared_experts`: these are slots after the routed experts, as many as they are routed
    experts wide, unless they have another format, parts of blocks or adapters of their own."""
    form, several = joined(moe.experts.formats)
    if moe.shared is None or several or SHARED_EXPERTS in apart:
        return moe
    width, inner = (mlp.down.parts[0].shape[1] for mlp in (moe.shared, moe.experts[0]))
    whole = width == inner or form == "dense" or inner % _BLOCK == 0
    alike = form in _SLOT_FORMATS and {part.format for part in moe.shared.parts} == {form}
    free = not any(part.name in adapted for part in moe.shared.parts)
    return moe._replace(slots=width // inner) if alike and whole and free else moe
