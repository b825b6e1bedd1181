"""Tiny random models of DeepSeek-V4 as transformers makes and writes them, and what they answer."""

from __future__ import annotations

import copy
import json
import random
import re

import torch
import transformers
from safetensors.torch import load_file, save_file

from ds_runtime.description.hybrid.structure import native_name
from ds_runtime.sampling_params import SamplingParams
from ds_runtime_kit.models.oracle import _gap

GREEDY = SamplingParams(max_tokens=14, logprobs=0, ignore_eos=True)
SCORED = SamplingParams(max_tokens=14, logprobs=0, prompt_logprobs=0, ignore_eos=True)
SETTINGS = {"platform": "cpu", "dtype": "float32", "threads": 1, "context_length": 512}
TIE = 5e-6  # what a choice of entries or experts may hang on
BASE = {
    "vocab_size": 131, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 6,
    "num_attention_heads": 8, "head_dim": 32, "q_lora_rank": 32, "num_experts_per_tok": 2,
    "n_routed_experts": 8, "compress_ratios": [0, 0, 4, 128, 4, 128], "qk_rope_head_dim": 8,
    "index_n_heads": 16, "index_head_dim": 16, "index_topk": 8, "o_groups": 2, "o_lora_rank": 16,
    "num_hash_layers": 2, "sliding_window": 16, "max_position_embeddings": 1024,
    "swiglu_limit": 0.5, "rope_theta": 10000.0, "compress_rope_theta": 160000.0,
    "rope_scaling": {"type": "yarn", "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
                     "original_max_position_embeddings": 64},
}  # fmt: skip


def drawn(seed):
    """Settings of a small model: layers of any kinds, windows, widths and numbers of all sorts."""
    draw = random.Random(seed)
    layers = draw.randint(1, 5)
    ratios = [draw.choice([0, 4, 4, 128]) for _ in range(layers)]
    ratios[-1] = ratios[-1] or 128
    heads, groups = draw.choice([(4, 2), (8, 4), (6, 3), (4, 1)])
    experts = draw.choice([4, 8, 16])
    return {
        **BASE,
        "num_hidden_layers": layers,
        "compress_ratios": ratios,
        "hidden_size": draw.choice([48, 64]),
        "num_attention_heads": heads,
        "o_groups": groups,
        "head_dim": draw.choice([16, 32, 40]),
        "n_routed_experts": experts,
        "num_experts_per_tok": draw.randint(1, 4),
        "index_topk": draw.choice([1, 8, 20]),
        "index_head_dim": draw.choice([16, 32]),
        "num_hash_layers": draw.randint(0, layers),
        "sliding_window": draw.choice([3, 16, 50, 128]),
        "hc_mult": draw.choice([1, 2, 4]),
        "hc_sinkhorn_iters": draw.choice([1, 20]),
        "swiglu_limit": draw.choice([0.5, 10.0]),
        "routed_scaling_factor": draw.choice([1.5, 2.5]),
    }


class HybridOracle:
    """A model in float32, and one in float64 that says where a choice hangs on little."""

    def __init__(self, values, seed=0):
        self.values = values
        torch.manual_seed(seed)
        config = transformers.DeepseekV4Config(**values)
        config._attn_implementation = config._experts_implementation = "eager"
        self.model = transformers.DeepseekV4ForCausalLM(config).eval()
        with torch.no_grad():
            for name, p in (*self.model.named_parameters(), *self.model.named_buffers()):
                if name.endswith("tid2eid"):
                    rows = [torch.randperm(config.n_routed_experts)[: p.shape[1]] for _ in p]
                    p.copy_(torch.stack(rows))
                elif name.endswith("sinks"):
                    p.normal_(0, 1)
                elif "position_bias" in name or name.endswith(("base", "scale")):
                    p.normal_(0.3, 0.5)
                elif "e_score" in name:
                    p.normal_(0, 0.05)
                elif "norm" in name:
                    p.normal_(1, 0.2)
                elif "inv_freq" not in name:
                    p.normal_(0, 1.3 * p.shape[-1] ** -0.5)
        self.double = copy.deepcopy(self.model).double()
        self.gaps = []
        for module in self.double.modules():
            if type(module).__name__ == "DeepseekV4TopKRouter":
                module.register_forward_hook(self._routed)
            if type(module).__name__ == "DeepseekV4Indexer":
                top_k = module.index_topk
                module.scorer.register_forward_hook(
                    lambda module, args, scores, k=top_k: self._scored(scores, k)
                )

    def _routed(self, router, args, out):
        scores = router.score_fn(out[0]) + router.e_score_correction_bias
        self.gaps.append(_gap(scores, router.top_k))

    def _scored(self, scores, top_k):
        _, rows, entries = scores.shape
        seen = (torch.arange(rows) + 1).div(4, rounding_mode="floor")
        hidden = torch.arange(entries) >= seen.unsqueeze(1)
        gap = _gap(scores[0].masked_fill(hidden, float("-inf")), top_k)
        self.gaps.append(gap.nan_to_num(float("inf"), posinf=float("inf")))

    @torch.no_grad()
    def round(self):
        """Weights as native checkpoints hold them, and what is dense as bfloat16 has it; for
        `write_native`."""
        for name, p in self.model.named_parameters():
            if ".mlp.experts." in name:
                p.copy_(fp4_values(fp4_codes(p)))
            elif name.removesuffix(".weight").endswith(FP8):
                p.copy_(fp8(p).to(p.dtype) * FP8_SCALE)
            elif p.ndim > 1 and not name.endswith(("fn", "position_bias")):
                p.copy_(p.bfloat16())
        self._double()

    def _double(self):
        self.double.load_state_dict(self.model.state_dict())

    @torch.no_grad()
    def logprobs(self, tokens):
        """[T, vocab] float32, of all positions."""
        return self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0].log_softmax(-1)

    @torch.no_grad()
    def is_clear(self, tokens):
        """Whether no choice hangs on less than TIE."""
        self.gaps = []
        self.double(torch.tensor([list(tokens)]), use_cache=False)
        return not self.gaps or float(torch.cat(self.gaps).min()) >= TIE

    def prompt(self, length, seed):
        """Random tokens for which every choice is clear."""
        draw = random.Random(seed)
        for _ in range(40):
            tokens = [draw.randrange(self.model.config.vocab_size) for _ in range(length)]
            if self.is_clear(tokens):
                return tokens
        raise AssertionError(f"40 random prompts of {length} tokens all have near ties")

    def worst(self, prompt, output, prompts=True):
        """The largest error of a greedy answer's log-probabilities, those of the prompt among them;
        None where a choice in it is not clear."""
        answer = output.outputs[0]
        tokens = [*prompt, *answer.token_ids]
        if not self.is_clear(tokens):
            return None
        want = self.logprobs(tokens)
        found = [x.logprob for x in answer.logprobs]
        if prompts:
            found = [x.logprob for x in output.prompt_logprobs[1:]] + found
        assert len(found) == len(tokens) - (1 if prompts else len(prompt)), "a token was not scored"
        at = range(len(tokens) - len(found), len(tokens))
        return max(abs(f - float(want[i - 1, tokens[i]])) for f, i in zip(found, at, strict=True))


FP8 = (
    "self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_proj", "o_a_proj", "o_b_proj",
    "indexer.q_b_proj", "shared_experts.gate_proj", "shared_experts.up_proj",
    "shared_experts.down_proj",
)  # fmt: skip
FP8_SCALE = 2.0**-9
NATIVE = re.compile(r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)\.|shared_experts\.")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = torch.cat((E2M1, -E2M1))


def fp8(values):
    return (values / FP8_SCALE).clamp(-448, 448).to(torch.float8_e4m3fn)


def exponents(columns):
    """Exponents of the scales of 32 columns each."""
    return -3 - torch.arange(columns // 32) % 3


def fp4_codes(values):
    """The number of the nearest value of every element."""
    scale = torch.exp2(exponents(values.shape[-1]).float()).repeat_interleave(32)
    return ((values / scale).unsqueeze(-1) - E2M1).abs().argmin(-1)


def fp4_values(codes):
    return E2M1[codes] * torch.exp2(exponents(codes.shape[-1]).float()).repeat_interleave(32)


def write_native(oracle, folder, base=False):
    """The rounded model as DeepSeek's own checkpoints hold it: names, formats, config.json. base:
    experts in FP8 with scales in float32, as base models have them."""
    oracle.model.save_pretrained(folder)
    path, made = folder / "model.safetensors", {}
    for name, tensor in load_file(path).items():
        name, at = native_name(name), native_name(name).removesuffix("weight") + "scale"
        grid = [-(-n // 128) for n in tensor.shape]
        power = torch.full(grid, FP8_SCALE)
        if ".experts." in name and not base:
            codes = fp4_codes(tensor).to(torch.uint8)
            made[name] = (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8)
            scale = (exponents(tensor.shape[1]) + 127).to(torch.uint8)
            made[at] = scale.repeat(len(tensor), 1).view(torch.float8_e8m0fnu)
        elif ".experts." in name:
            made[name], made[at] = fp8(tensor), power
        elif NATIVE.search(name):
            made[name] = fp8(tensor)
            made[at] = power if base else power.to(torch.float8_e8m0fnu)
        else:
            wide = tensor.ndim < 2 or name.endswith(("_fn", ".ape", "tid2eid"))
            made[name] = tensor if wide else tensor.bfloat16()
    save_file(made, path)
    raw = json.loads((folder / "config.json").read_text())
    for key in ("layer_types", "compress_rates", "mlp_layer_types", "rope_parameters"):
        raw.pop(key)
    config, values = oracle.model.config, oracle.values
    raw |= {key: values[key] for key in ("compress_ratios", "num_hash_layers", "rope_scaling")}
    raw |= {"qk_rope_head_dim": config.qk_rope_head_dim, "expert_dtype": "fp8" if base else "fp4"}
    raw["compress_ratios"] = [*raw["compress_ratios"], 0]
    raw["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128], "scale_fmt": "ue8m0",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))


def compare(oracle, prompts, outputs, scored=True, least=0.5):
    found = [oracle.worst(p, o, scored) for p, o in zip(prompts, outputs, strict=True)]
    clear = [error for error in found if error is not None]
    assert len(clear) >= least * len(found), "hardly an answer has clear choices"
    assert max(clear) < 1e-4
