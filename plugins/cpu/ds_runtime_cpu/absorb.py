"""The weight kv_b in its three uses: native panels, and torch's batched matmuls."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime.api import Facts, Packed, Weight, WeightPart
from ds_runtime_cpu.linear import compute_dtype, prepack, prepacked_linear, whole_tiles
from ds_runtime_cpu.panels import Form, Matmul, Stack, dense, fp8, grid


class _MlaAbsorb:
    """What both kernels share: dims and tag."""

    tag = ""

    def __init__(self, facts: Facts) -> None:
        self.dtype = compute_dtype(facts)
        dims = facts.dims
        self.heads, self.nope, self.v = dims["heads"], dims["qk_nope"], dims["v"]
        self.kv_lora, self.rope = dims["kv_lora"], dims["qk_rope"]

    def _split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """W_UK [heads, nope, kv_lora] and W_UV [heads, v, kv_lora], views."""
        per_head = values.view(self.heads, self.nope + self.v, self.kv_lora)
        return per_head[:, : self.nope], per_head[:, self.nope :]


class MlaAbsorbNative(_MlaAbsorb):
    """Panels per head: W_UK, W_UV, and W_UKᵀ for the queries. W_UV serves expansion and decode."""

    tag = "cpu.mla_absorb_native"

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        form = self._fp8_form(weight.parts)
        values = weight.parts[0].tensors["weight"] if form else weight.dequantise(self.dtype)
        uk, uv = self._split(values)
        scale = _Scales(weight.parts[0], form.group) if form else None
        form = form or dense(self.dtype)
        heads, per_head = self.heads, self.nope + self.v
        sizes = {"uk": (self.nope, self.kv_lora), "uv": (self.v, self.kv_lora)}
        sizes["q"] = (self.kv_lora, self.nope)
        stacks = {m: Stack(form, heads, *size) for m, size in sizes.items()}
        for h in range(heads):
            row = h * per_head
            k_scale = scale.rows(row, self.nope, self.kv_lora) if scale else None
            v_scale = scale.rows(row + self.nope, self.v, self.kv_lora) if scale else None
            q_scale = scale.columns(row, self.nope, self.kv_lora) if scale else None
            form.pack(stacks["uk"].room(), uk[h], k_scale)
            form.pack(stacks["uv"].room(), uv[h], v_scale)
            form.pack(stacks["q"].room(), uk[h].T, q_scale)  # [kv_lora, nope]
            for stack in stacks.values():
                stack.close()
        packed = {m: stack.panels for m, stack in stacks.items()}
        nbytes = sum(t.nbytes for t in packed.values())
        rest = {"q": self.rope}  # behind absorbed queries comes their rope part
        matmuls = {
            m: Matmul(stacks[m].form, packed[m], *size, heads, rest.get(m, 0))
            for m, size in sizes.items()
        }
        forms = (stacks["uk"].form, stacks["uv"].form)
        tensors = {**packed, "forms": forms, "dims": (self.nope, self.v), "matmul": matmuls}
        return Packed(self.tag, weight.shape, tensors, nbytes, restore=_restore_panels)

    def _fp8_form(self, parts: tuple[WeightPart, ...]) -> Form | None:
        """fp8 as it is, where both a row and a column of blocks can be followed along k."""
        if len(parts) > 1 or parts[0].block is None:
            return None
        block, (row0, col0) = parts[0].block, parts[0].offset
        return fp8(parts, self.dtype, *block, col0, row0, self.nope + self.v)

    def expand(self, latent: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
        packed.expect(self.tag)
        use, tokens = packed.tensors["matmul"], latent.shape[0]
        k_nope, v = use["uk"](latent), use["uv"](latent)
        return k_nope.view(tokens, self.heads, self.nope), v.view(tokens, self.heads, self.v)

    def apply_q(self, q_nope: Tensor, q_rope: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        matmul: Matmul = packed.tensors["matmul"]["q"]
        out = matmul.per_head(q_nope)
        out[..., self.kv_lora :] = q_rope
        return out

    def apply_v(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        matmul: Matmul = packed.tensors["matmul"]["uv"]
        return matmul.per_head(x)


class _Scales:
    """Scales of pieces of an fp8 kv_b, for groups of `group` along k."""

    def __init__(self, part: WeightPart, group: int) -> None:
        self.part = part
        self.group = group

    def rows(self, first: int, count: int, k: int) -> Tensor:
        """[count, groups]: k along the columns of the checkpoint's matrix."""
        rows, cols = torch.arange(first, first + count), torch.arange(0, k, self.group)
        return grid(self.part, rows, cols)

    def columns(self, first: int, k: int, count: int) -> Tensor:
        """[count, groups]: k along `k` rows from `first`, one row of the result per column."""
        rows, cols = torch.arange(first, first + k, self.group), torch.arange(count)
        return grid(self.part, rows, cols).T


def _restore_panels(packed: Packed) -> Tensor:
    forms: tuple[Form, Form] = packed.tensors["forms"]
    k = packed.shape[1]
    heads = zip(packed.tensors["uk"], packed.tensors["uv"], strict=True)
    kinds = tuple(zip(forms, packed.tensors["dims"], strict=True))
    return torch.cat(
        [form.unpack(m, n, k) for head in heads for m, (form, n) in zip(head, kinds, strict=True)]
    )


class MlaAbsorbMatmul(_MlaAbsorb):
    """Per-head matrices contiguous for torch's batched matmul, and oneDNN's packing for expand."""

    tag = "cpu.mla_absorb_matmul"

    def pack(self, weight: Weight, facts: Facts) -> Packed:
        values = weight.dequantise(self.dtype)
        uk, uv = self._split(values)
        tensors = {
            "weight": prepack(whole_tiles(values)),
            "uk": uk.contiguous(),
            "uv": uv.transpose(1, 2).contiguous(),  # [heads, kv_lora, v]
        }
        return Packed(self.tag, weight.shape, tensors, 2 * values.nbytes, restore=_restore)

    def expand(self, latent: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
        packed.expect(self.tag)
        both = prepacked_linear(whole_tiles(latent), packed.tensors["weight"])
        both = both.view(latent.shape[0], self.heads, self.nope + self.v)
        return both[..., : self.nope], both[..., self.nope :]

    def apply_q(self, q_nope: Tensor, q_rope: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        absorbed = torch.bmm(q_nope.transpose(0, 1), packed.tensors["uk"]).transpose(0, 1)
        return torch.cat((absorbed, q_rope), -1)

    def apply_v(self, x: Tensor, packed: Packed) -> Tensor:
        packed.expect(self.tag)
        return torch.bmm(x.transpose(0, 1), packed.tensors["uv"]).transpose(0, 1)


def _restore(packed: Packed) -> Tensor:
    values: Tensor = packed.tensors["weight"].to_dense()
    return values[:, : packed.shape[1]].to(torch.float32)


# The names that the plan shows.
mla_absorb_native = MlaAbsorbNative
mla_absorb_matmul = MlaAbsorbMatmul
