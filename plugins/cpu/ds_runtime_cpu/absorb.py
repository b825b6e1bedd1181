"""The weight kv_b in its three uses: native panels, and torch's batched matmuls."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_runtime.api import Facts, Packed, Weight, WeightPart
from ds_runtime_cpu.linear import compute_dtype, prepack, prepacked_linear, whole_tiles
from ds_runtime_cpu.panels import COLUMNS, Form, Matmul, Stack, dense, fp8, grid


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
        matrices = {"uk": uk, "uv": uv, "q": uk.transpose(1, 2)}  # [heads, rows, k]
        scales = self._scales(weight.parts[0], form.group) if form else {}
        form = form or dense(self.dtype)
        packed, forms, matmuls = dict[str, Tensor](), dict[str, Form](), dict[str, Matmul]()
        for name, values in matrices.items():
            heads, n, k = values.shape
            # All heads at once: then memory nodes get what their threads read (csrc/parallel.h).
            rows = _whole_panels(values)
            stack = Stack(form, 1, len(rows), k)
            form.pack(stack.room(), rows, _whole_panels(scales[name]) if scales else None)
            stack.close()
            forms[name], packed[name] = stack.form, stack.panels.view(heads, -1)
            rest = self.rope if name == "q" else 0  # behind absorbed queries comes their rope part
            matmuls[name] = Matmul(forms[name], packed[name], n, k, heads, rest)
        nbytes = sum(t.nbytes for t in packed.values())
        kinds = ((forms["uk"], self.nope), (forms["uv"], self.v))
        tensors = {**packed, "kinds": kinds, "matmul": matmuls}
        return Packed(self.tag, weight.shape, tensors, nbytes, restore=_restore_panels)

    def _fp8_form(self, parts: tuple[WeightPart, ...]) -> Form | None:
        """fp8 as it is, where both a row and a column of blocks can be followed along k."""
        if len(parts) > 1 or parts[0].block is None:
            return None
        block, (row0, col0) = parts[0].block, parts[0].offset
        return fp8(parts, self.dtype, *block, col0, row0, self.nope + self.v)

    def _scales(self, part: WeightPart, group: int) -> dict[str, Tensor]:
        """[heads, rows, groups] of fp8 matrices: `group` elements of k have one."""
        heads, lora = torch.arange(self.heads), torch.arange(self.kv_lora)
        first = (self.nope + self.v) * heads[:, None]  # rows of kv_b [heads * (nope + v), kv_lora]
        along = torch.arange(0, self.kv_lora, group)
        k_rows, v_rows = torch.arange(self.nope), torch.arange(self.nope, self.nope + self.v)
        found = {
            name: grid(part, (first + rows).flatten(), along).view(self.heads, len(rows), -1)
            for name, rows in {"uk": k_rows, "uv": v_rows}.items()
        }
        steps = (first + k_rows[::group]).flatten()  # W_UK by columns has its k along rows of kv_b
        found["q"] = grid(part, steps, lora).view(self.heads, -1, self.kv_lora).transpose(1, 2)
        return found

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


def _whole_panels(x: Tensor) -> Tensor:
    """[heads, rows, columns] as [heads * r, columns], r whole panels: zeros behind each head."""
    heads, n, columns = x.shape
    short = -n % COLUMNS
    if not short:
        return x.reshape(-1, columns)
    out = torch.zeros(heads, n + short, columns, dtype=x.dtype)
    out[:, :n] = x
    return out.view(-1, columns)


def _restore_panels(packed: Packed) -> Tensor:
    kinds: tuple[tuple[Form, int], ...] = packed.tensors["kinds"]
    k = packed.shape[1]
    heads = zip(packed.tensors["uk"], packed.tensors["uv"], strict=True)
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
