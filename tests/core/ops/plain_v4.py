"""Attention of DeepSeek-V4 in plain torch, token by token, from native tensor names: it agrees
with transformers, and keeps all state in lists."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def rms(x, w=None, eps=1e-6):
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if w is None else y * w


def inv_freq(dim, theta, yarn=None):
    f = theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if yarn:
        factor, orig, fast, slow = yarn

        def cor(n):
            return dim * math.log(orig / (n * 2 * math.pi)) / (2 * math.log(theta))

        lo, hi = max(math.floor(cor(fast)), 0), min(math.ceil(cor(slow)), dim - 1)
        ramp = (torch.arange(dim // 2, dtype=torch.float32) - lo) / max(hi - lo, 1e-3)
        ramp = ramp.clamp(0, 1)
        f = f / factor * ramp + f * (1 - ramp)
    return f


def rope(x, pos, freq, inverse=False):
    """The last 2 · len(freq) dims, interleaved pairs; pos [T]."""
    d = 2 * len(freq)
    ang = pos.double()[:, None] * freq
    c, s = ang.cos(), ang.sin() * (-1 if inverse else 1)
    while c.ndim < x.ndim:
        c, s = c.unsqueeze(1), s.unsqueeze(1)
    a, b = x[..., -d::2], x[..., -d + 1 :: 2]
    r = torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)
    return torch.cat([x[..., :-d], r], -1)


class Pool:
    """Compressor. kv, sc: rows of the open window; prev: first columns of the closed one."""

    def __init__(self, ratio, dim):
        self.ratio, self.dim, self.overlap = ratio, dim, ratio == 4
        self.kv, self.sc, self.prev = [], [], None

    def feed(self, w, x, pos, freq, eps):
        kv, sc = x @ w["wkv.weight"].T, x @ w["wgate.weight"].T
        out = []
        for t in range(len(x)):
            p = int(pos[t])
            self.kv.append(kv[t])
            self.sc.append(sc[t] + w["ape"][p % self.ratio])
            if (p + 1) % self.ratio:
                continue
            k, s = torch.stack(self.kv), torch.stack(self.sc)
            self.kv, self.sc = [], []
            if self.overlap:
                d = self.dim
                first, k, s = (k[:, :d], s[:, :d]), k[:, d:], s[:, d:]
                if self.prev is not None:
                    k, s = torch.cat([self.prev[0], k]), torch.cat([self.prev[1], s])
                self.prev = first
            e = rms((k * s.softmax(0)).sum(0), w["norm.weight"], eps)
            out.append(rope(e[None], torch.tensor([p + 1 - self.ratio]), freq)[0])
        return out


def below(weights, prefix):
    return {k[len(prefix) :]: v for k, v in weights.items() if k.startswith(prefix)}


def attention(weights, c, layer, x):
    """Of a whole sequence x [T, hidden]."""
    w, r, eps = below(weights, f"layers.{layer}.attn."), c["compress_ratios"][layer], 1e-6
    theta = c["compress_rope_theta"] if r else c["rope_theta"]
    freq = inv_freq(c["qk_rope_head_dim"], theta, c["yarn"] if r else None)
    heads, d, n_tokens = c["num_attention_heads"], c["head_dim"], len(x)
    pos = torch.arange(n_tokens)
    qr = rms(x @ w["wq_a.weight"].T, w["q_norm.weight"], eps)
    q = rope(rms((qr @ w["wq_b.weight"].T).view(n_tokens, heads, d), eps=eps), pos, freq)
    kv = rope(rms(x @ w["wkv.weight"].T, w["kv_norm.weight"], eps), pos, freq)
    comp, idx = [], []
    if r:
        comp = Pool(r, d).feed(below(w, "compressor."), x, pos, freq, eps)
    if r == 4:
        iw, ih, dim = below(w, "indexer."), c["index_n_heads"], c["index_head_dim"]
        idx = Pool(4, dim).feed(below(iw, "compressor."), x, pos, freq, eps)
        iq = rope((qr @ iw["wq_b.weight"].T).view(n_tokens, ih, dim), pos, freq)
        wt = (x @ iw["weights_proj.weight"].T) * (dim * ih) ** -0.5
    out = []
    for t in range(n_tokens):
        n = (t + 1) // r if r else 0
        pick = list(range(n))
        if r == 4 and n > c["index_topk"]:
            s = (F.relu(iq[t] @ torch.stack(idx[:n]).T) * wt[t][:, None]).sum(0)
            pick = s.topk(c["index_topk"]).indices.tolist()
        near = list(kv[max(0, t - c["sliding_window"] + 1) : t + 1])
        keys = torch.stack(near + [comp[i] for i in pick])
        s = torch.cat([q[t] @ keys.T * d**-0.5, w["attn_sink"][:, None]], 1).softmax(1)[:, :-1]
        out.append(s @ keys)
    o = rope(torch.stack(out), pos, freq, inverse=True).reshape(n_tokens, c["o_groups"], -1)
    wo_a = w["wo_a.weight"].view(c["o_groups"], c["o_lora_rank"], -1)
    return torch.einsum("tgd,grd->tgr", o, wo_a).flatten(1) @ w["wo_b.weight"].T
