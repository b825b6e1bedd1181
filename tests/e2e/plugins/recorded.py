"""Kernels without host reads, in torch, for any device; and a platform on the CPU that captures
decode steps of them by recording torch ops.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from ds_runtime.api import OPS, Kernel, Promises, RowOwners, hookimpl, rotated
from ds_runtime.ops.batch import TAIL
from ds_runtime.ops.reference.activation import silu_mul
from ds_runtime.ops.reference.attention.index import hadamard
from ds_runtime.ops.reference.matrices.moe import ReferenceExperts
from ds_runtime.platform.contract import Communicator
from ds_runtime_cpu.platform import CpuPlatform
from ds_runtime_kit.checks.replay import ReplayBackend

PAGES = frozenset({"latent_pages.v1"})
KEYS = frozenset({"index_pages.v1"})


# Of this process: what the collectives below speak through.
GROUPS: list[Communicator] = []


@torch.library.custom_op("recorded::collective", mutates_args=())
def collective(x: torch.Tensor, name: str, group: int) -> torch.Tensor:
    """A collective as one op, which is over when it returns: torch's own are not."""
    return getattr(GROUPS[group], name)(x.clone())


class Collectives:
    def __init__(self, group):
        self.rank, self.size, self._group = group.rank, group.size, group
        self.gather_objects, self.close = group.gather_objects, group.close
        for name in ("all_reduce", "all_gather", "gather_rows", "reduce_scatter"):
            setattr(self, name, partial(collective, name=name, group=len(GROUPS)))
        GROUPS.append(group)

    def split(self, groups):
        return Collectives(self._group.split(groups))


class Recorded(CpuPlatform):
    name = "recorded"
    score = -1
    asynchronous = True
    captures, captures_prefill, capture_after = True, True, 0
    backend: ReplayBackend  # the last one that was asked for

    def communicator(self, rank, size, init_method, timeout=600.0):
        return Collectives(super().communicator(rank, size, init_method, timeout))

    def graph_backend(self, rank=0):
        Recorded.backend = ReplayBackend()
        return self.backend


def cache_write(cache, latent, k_rope, slots):
    put(cache, torch.cat((latent, k_rope), -1), slots)


def put(cache, rows, slots):
    """Write rows where slots are not negative."""
    if not rows.shape[0]:
        return
    flat = cache.view(-1, cache.shape[2])
    owned = torch.arange(flat.shape[0], device=slots.device)
    hit = slots == owned.unsqueeze(1)  # [slots of the cache, tokens]
    new = rows[hit.int().argmax(1)]
    flat.copy_(torch.where(hit.any(1, keepdim=True), new.to(flat.dtype), flat))


def cache_move(cache, sources, targets):
    flat = cache.view(-1, cache.shape[2])
    for old, new in zip(sources.unbind(1), targets.unbind(1), strict=True):
        put(cache, flat[old.clamp(min=0)], torch.where(old < 0, -1, new))


def index_prologue(
    q, k, norm_weight, norm_bias, eps, positions, cos_sin, interleaved, cache, slots
):
    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    keys = F.layer_norm(k, k.shape[-1:], norm_weight, norm_bias, eps)
    put(cache, hadamard(rotated(keys, cos, sin, interleaved)), slots)
    queries = hadamard(rotated(q, cos.unsqueeze(1), sin.unsqueeze(1), interleaved))
    return queries, queries.new_ones(q.shape[:2])


def index_scores(q, weights, cache, page_table, owners, lens):
    keys = cache[page_table[owners].long()].flatten(1, 2)  # [rows, tokens, d]
    seen = torch.arange(keys.shape[1], device=q.device) < lens.unsqueeze(1)
    keys = torch.where(seen.unsqueeze(-1), keys, 0.0)
    return torch.einsum("rht,rh->rt", torch.einsum("rhd,rtd->rht", q, keys).relu(), weights)


PROMISES = Promises()  # of what follows


class MlaDecode:
    prepares_on_device = True

    def __init__(self, facts):
        self.kv_lora = facts.dims["kv_lora"]

    def state(self, limits):
        shape = limits.max_sequences * limits.max_queries, limits.max_pages_per_sequence
        table = torch.zeros(shape, dtype=torch.int64, device=limits.device)
        rows = table, torch.ones_like(table[:, :1]), torch.full_like(table[:, :1], -1)
        return rows, RowOwners(limits.device)

    def prepare(self, state, batch):
        if (part := batch.decode) is not None and part.size:
            (table, lens, bits), owners = state
            owner, behind = owners.of(part.q_lens or (1,) * part.size)
            table.zero_()
            pages = part.page_table.index_select(0, owner)
            table[: part.rows, : pages.shape[1]].copy_(pages)
            seen = part.kv_lens.index_select(0, owner)
            lens[: part.rows, 0].copy_(seen if part.tree is not None else seen - behind)
            bits.fill_(-1)
            if part.tree is not None:
                bits[: part.rows, 0].copy_(part.tree)

    def run(self, state, q, cache, scale):
        table, lens, bits = (t[: q.shape[0]] for t in state[0])
        keys = cache[table].flatten(1, 2)  # [sequences, tokens, width]
        tokens = torch.arange(keys.shape[1], device=q.device)
        place = tokens - (lens - TAIL)
        seen = (tokens < lens) & ((place < 0) | ((bits >> place.clamp(0, TAIL - 1)) & 1).bool())
        keys = torch.where(seen.unsqueeze(-1), keys, 0.0)
        scores = torch.einsum("shw,stw->sht", q, keys) * scale
        weights = scores.masked_fill(~seen.unsqueeze(1), float("-inf")).softmax(-1)
        return torch.einsum("sht,stl->shl", weights, keys[..., : self.kv_lora])


class Experts(ReferenceExperts):
    def apply(self, x, weights, ids, packed):
        packed.expect(self.tag)
        gate_up, down = packed.tensors["gate_up"], packed.tensors["down"]
        shares = x.new_zeros(x.shape[0], gate_up.shape[0]).scatter_add_(1, ids.long(), weights)
        out = torch.zeros_like(x)
        for e in range(gate_up.shape[0]):
            out += F.linear(silu_mul(F.linear(x, gate_up[e])), down[e]) * shares[:, e, None]
        return out


def sample(logits, temperature, top_k, top_p, min_p, uniform):
    heat = torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    shifted = (logits - logits.max(1, keepdim=True).values) / heat
    ids = torch.sort(logits, dim=1, descending=True, stable=True).indices
    mass = shifted.gather(1, ids).exp().double()
    places = torch.arange(logits.shape[1], device=logits.device)
    most = torch.where(top_k > 0, top_k, logits.shape[1]).unsqueeze(1)
    mass = torch.where(places < most, mass, 0.0)
    goal = top_p.double().unsqueeze(1) * mass.sum(1, keepdim=True)
    off = (top_p >= 1).unsqueeze(1)
    mass = torch.where(off | (mass.cumsum(1) - mass < goal), mass, 0.0)
    mass = torch.where(mass >= min_p.unsqueeze(1), mass, 0.0)
    sums = torch.zeros_like(mass).scatter_(1, ids, mass).cumsum(1)
    total = sums[:, -1:]
    drawn = (sums > torch.minimum(uniform.unsqueeze(1) * total, total * (1 - 1e-15))).int()
    return torch.where(temperature > 0, drawn.argmax(1), logits.argmax(1))


def logprobs(logits, ids, top_n):
    values = torch.log_softmax(logits, dim=-1)
    order = torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :top_n]
    return values.gather(1, ids.unsqueeze(1)).squeeze(1), values.gather(1, order), order


def _refuse(facts):
    return None if facts.dtype == "float32" else "computes in float32"


def offer(op, name, **extra):
    phases = frozenset({"prefill", "decode", "verify", "tree"})
    contract = OPS[op].version
    return Kernel(
        OPS[op],
        f"recorded:{name}",
        "recorded",
        40,
        _refuse,
        phases=phases,
        contract=contract,
        **extra,
    )


@hookimpl
def ds_platform():
    return Recorded()


@hookimpl
def ds_attention(facts):
    return [
        offer("cache_write", "cache_write", layouts=PAGES),
        offer("cache_move", "cache_move", layouts=PAGES),
        offer("mla_decode", "MlaDecode", layouts=PAGES, promises=PROMISES),
        offer("index_prologue", "index_prologue", layouts=KEYS),
        offer("index_scores", "index_scores", layouts=KEYS),
    ]


@hookimpl
def ds_ops(facts):
    return [offer("sample", "sample"), offer("logprobs", "logprobs")]


@hookimpl
def ds_moe(facts):
    return [offer("experts", "Experts", formats=frozenset({"dense"}))]
