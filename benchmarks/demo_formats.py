"""Scores of the demo model in every weight format that serves it: bf16, fp8, int8, int4.

    python benchmarks/demo_formats.py [--limit N]

The FP8 form is made here as DeepSeek publishes it: e4m3 with a float32 scale per 128 × 128 block
for every Linear but head and routers. Rows go to benchmarks/results/accuracy.jsonl, and the table
of docs/demo.md is printed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ds_runtime.bench import accuracy
from ds_runtime.bench.record import append
from ds_runtime.bench.shapes import config_of
from ds_runtime.model.hub import resolve_model

RESULTS = Path(__file__).parent / "results" / "accuracy.jsonl"
BLOCK, LARGEST = 128, 448.0


def blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 [rows, cols], float32 scales [rows / 128, cols / 128]): value = code · scale."""
    rows, cols = values.shape
    padded = torch.nn.functional.pad(values.float(), (0, -cols % BLOCK, 0, -rows % BLOCK))
    grid = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    scales = grid.abs().amax((1, 3)).clamp(min=1e-12) / LARGEST
    codes = (grid / scales[:, None, :, None]).view(padded.shape)[:rows, :cols]
    return codes.contiguous().to(torch.float8_e4m3fn), scales


def is_linear(name: str, value: Tensor) -> bool:
    """Whether DeepSeek's FP8 checkpoints hold this tensor in blocks."""
    plain = ("embed_tokens", "lm_head", "mlp.gate.", "eh_proj", "shared_head")
    return value.ndim == 2 and name.endswith(".weight") and not any(p in name for p in plain)


def make_fp8(source: Path, out: Path) -> Path:
    """Write the checkpoint again with its Linears in FP8 blocks."""
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    tensors: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, value in load_file(file).items():
            if is_linear(name, value):
                tensors[name], tensors[name + "_scale_inv"] = blocks(value)
            else:
                tensors[name] = value
    save_file(tensors, out / "model.safetensors")
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    config["quantization_config"] = config_of("tiny-v3", "fp8")["quantization_config"]
    (out / "config.json").write_text(json.dumps(config, indent=1))
    return out


def main() -> int:
    """Score, record and print."""
    parser = argparse.ArgumentParser(description="Scores of the demo model by weight format.")
    parser.add_argument("--limit", type=int, metavar="N", help="only N entries of each kind")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fp8 = make_fp8(resolve_model("demo"), Path(folder) / "demo-fp8")
        wanted: dict[str, dict[str, Any]] = {
            "bf16": {"model": "demo"},
            "fp8, 128 × 128 blocks": {"model": str(fp8)},
            "int8 by row": {"model": "demo", "quantize": "int8"},
            "int4, groups of 128": {"model": "demo", "quantize": "int4"},
        }
        print("| weights | sums | tool calls |\n|---|---:|---:|")
        for name, settings in wanted.items():
            row = accuracy.run({"platform": "cpu"} | settings, args.limit, mtp=False)
            row["model"] = Path(row["model"]).name
            row["command"] = " ".join(["python", "benchmarks/demo_formats.py", *sys.argv[1:]])
            append(RESULTS, row)
            sums, tools = (row["scores"][kind] for kind in ("sums", "tools"))
            print(
                f"| {name} | {sums['right']} of {sums['of']} | {tools['right']} of {tools['of']} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
