"""--batch-invariant on the accelerator that is here: whether bits are equal, and what they cost.

python benchmarks/device_invariant.py [--shape v3-slice] [--parts NAME ...] [--tp N] [--limit S]
    [--batch N ...] [--mixes N] [--out FILE]

Each part runs in a process of its own, with a limit of seconds; one that fails shows why, and the
others go on. `on`, `off`: milliseconds of a decode step, and tokens per second of prompts, with and
without the mode; with it also `ops`, the products, experts and routers of the model, rows alone
beside the same rows among others, and `attention`, likewise. `slice`, `demo bfloat16`, `demo
float32`: requests in random mixes, chunked, behind cached prefixes, with drafts and op by op,
against themselves alone; and texts scored as they were sampled. `tp`: mixes on several devices.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ds_runtime import LLM, SamplingParams
from ds_runtime_bench.engine.one_batch import generate_seconds, random_prompts
from ds_runtime_bench.shapes import config_of
from ds_runtime_kit.models.answers import bits, forced

PROMPT, FIRST, LAST = 512, 33, 161
COUNTS = (1, 2, 3, 7, 8, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 129, 255, 257, 600, 2100)
PARTS = ("on", "off", "slice", "demo bfloat16", "demo float32")
DRAFTS = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 2}
LENGTHS = (1, 5, 63, 64, 65, 130, 200, 257, 300)
REQUESTS = 24


def tell(figure: str, value: Any) -> None:
    print("RESULT", json.dumps([figure, value]), flush=True)


# ---- bits of requests ----


def drawn(number: int, vocab: int, longest: int) -> tuple[list[int], SamplingParams]:
    """A request; some begin alike."""
    draw = random.Random(number)
    prompt = [draw.randrange(2, vocab) for _ in range(draw.choice(LENGTHS))]
    if number % 3 == 0:
        prompt = [7 + i % 90 for i in range(draw.choice(LENGTHS))] + prompt[:40]
    params = SamplingParams(
        max_tokens=draw.choice((1, 6, 20, 40)),
        temperature=draw.choice((0.0, 0.0, 0.8)),
        seed=number,
        logprobs=2,
        ignore_eos=True,
    )
    return prompt[:longest], params


def answers(llm: LLM, numbers: Sequence[int], vocab: int) -> tuple[list[list[bytes]], list[Any]]:
    asked = [drawn(number, vocab, 400) for number in numbers]
    outputs = llm.generate([p for p, _ in asked], [s for _, s in asked])
    return [bits(o.logprobs or ()) for o in outputs], outputs


Ways = dict[str, dict[str, Any]]  # of running the same requests: settings by name


def mixes(model: Any, vocab: int, count: int, ways: Ways, **settings: Any) -> None:
    """Tells how many answers of `count` mixes each way differ from those alone."""
    settings = {"batch_invariant": True, "context_length": 1024, **settings}
    with LLM(model, disable_radix_cache=True, **settings) as llm:
        print("\n".join(llm.plan.given_up), flush=True)
        alone = [answers(llm, [n], vocab) for n in range(REQUESTS)]
        own = [found[0] for found, _ in alone]
        outputs = [made[0] for _, made in alone]
    for way, more in ways.items():
        try:
            with LLM(model, **{**settings, **more}) as llm:
                tell(f"{way}: answers that differ", list(_differing(llm, vocab, count, own)))
                scores = [bits(found) for found in forced(llm, outputs, 2)]
                wrong = [n for n in range(REQUESTS) if scores[n] != own[n]]
                tell(f"{way}: texts scored otherwise", wrong)
        except Exception:
            tell(f"{way}: failed", traceback.format_exc()[-1500:])


def _differing(
    llm: LLM, vocab: int, count: int, own: Sequence[Sequence[bytes]]
) -> Iterator[tuple[int, int]]:
    """(mix, request, first token that differs) of those that do, up to ten."""
    draw, told = random.Random(1), 0
    for mix in range(count):
        numbers = [draw.randrange(REQUESTS) for _ in range(draw.choice((1, 3, 9, 40)))]
        found, _ = answers(llm, numbers, vocab)
        for number, got in zip(numbers, found, strict=True):
            if got != own[number] and told < 10:
                told += 1
                pairs = zip(got, own[number], strict=False)
                yield mix, number, next((i for i, (a, b) in enumerate(pairs) if a != b), -1)


WAYS: Ways = {
    "prefix hits": {},
    "chunks": {"chunked_prefill_size": 96, "max_step_tokens": 160},
    "op by op": {"disable_graph": True, "disable_prefill_graph": True},
}


# ---- bits of kernels ----


def rows_differ(call: Callable[[torch.Tensor], Any], x: torch.Tensor) -> list[int]:
    """Numbers of rows whose results differ from those of all."""
    whole = call(x)
    whole = whole if isinstance(whole, tuple) else (whole,)
    found = []
    for count in (n for n in COUNTS if n < x.shape[0]):
        for at in (slice(0, count), slice(-count, None)):
            made = call(x[at].clone())
            made = made if isinstance(made, tuple) else (made,)
            if not all(torch.equal(a, b[at]) for a, b in zip(made, whole, strict=True)):
                found.append(count)
                break
    return found


def linears(model: Any) -> Iterator[tuple[str, Any, int]]:
    """Every product of the first dense and the first sparse layer, with its inputs' width."""
    yield "lm_head", model.lm_head, model.config.hidden
    seen = set()
    for number, block in enumerate(model.blocks):
        kind = type(block.mlp).__name__
        if kind in seen:
            continue
        seen.add(kind)
        at = block.attention
        owners = {"inputs": at.inputs, "attention": at, "mlp": getattr(block.mlp, "mlp", None)}
        owners["shared"] = getattr(block.mlp, "shared", None)
        for owner, part in owners.items():
            for name in ("joined", "up", "query", "latent", "o_proj", "gate_up", "down"):
                layer = getattr(part, name, None)
                if layer is not None and hasattr(layer, "packed"):
                    yield f"layer {number} {owner}.{name}", layer, layer.packed.shape[1]


@torch.inference_mode()
def ops(model: Any, sampler: Any, most: int = 2304) -> None:
    """Of a model that is loaded, and of its sampler's ops."""
    torch.manual_seed(0)
    device, dtype = model.cos_sin.device, model.dtype

    def attempt(name: str, call: Callable[[torch.Tensor], Any], x: torch.Tensor) -> None:
        try:
            tell(f"ops: {name}: rows that differ", rows_differ(call, x))
        except Exception:
            tell(f"ops: {name}: failed", traceback.format_exc()[-800:])

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    for name, layer, width in linears(model):
        rows = 300 if name == "lm_head" else most
        attempt(name, layer, normal(rows, width))
    hidden = model.config.hidden
    attempt("lm_head float32", lambda x: model.lm_head.float32(x, None, None), normal(300, hidden))
    block = model.blocks[-1]
    kv_b, at, heads = block.attention.kv_b, block.attention, block.attention.heads
    attempt("kv_b expand", kv_b.expand, normal(most, at.kv_lora))
    joined = normal(most, heads, at.qk_head)
    attempt("kv_b q", lambda x: kv_b.apply_q(x[..., : at.nope], x[..., at.nope :]), joined)
    attempt("kv_b v", kv_b.apply_v, normal(most, heads, at.kv_lora))
    if hasattr(block.mlp, "router"):
        mlp = block.mlp
        x = normal(most, hidden)
        attempt("router_logits", lambda x: mlp.ops.router_logits(x, mlp.router), x)

        def experts(x: torch.Tensor) -> torch.Tensor:
            logits = mlp.ops.router_logits(x, mlp.router)
            weights, ids = mlp.ops.route(logits, mlp.bias, mlp.routing)
            return mlp.experts(x, weights, ids, None)

        attempt("experts", experts, x)
    attempt("rms_norm", block.input_norm, normal(most, hidden))
    logits = torch.randn(200, model.config.vocab_size, device=device)
    ids = torch.full((200,), 5, device=device)
    attempt("logprobs", lambda x: sampler.logprobs(x, ids[: x.shape[0]], 3), logits)


@torch.inference_mode()
def attention(model: Any) -> None:
    """Decode attention: sequences alone beside the same among others, tables of other widths."""
    from ds_runtime.ops.batch import Batch, DecodePart, Limits

    torch.manual_seed(0)
    device, dtype, page = model.cos_sin.device, model.dtype, model.page_size
    at = model.blocks[0].attention
    kernel, _ = at.decode
    width = at.kv_lora + at.qk_head - at.nope
    lens = [1, 2, 63, 64, 65, 255, 256, 257, 512, 700, 1500, 4095, 4096, 4097, 6000, 9000] * 6
    pages = max(lens) // page + 1
    cache = torch.randn(pages + 7, page, width, device=device).to(dtype)
    table = torch.randperm(pages + 7, device=device)[:pages].int().repeat(len(lens), 1)
    q = torch.randn(len(lens), at.heads, width, device=device).to(dtype)

    def run(some: Sequence[int], wide: int) -> torch.Tensor:
        own = [lens[i] for i in some]
        limits = Limits(len(own), len(own), wide, page, at.heads, device)
        state = kernel.state(limits)
        part = DecodePart(
            table[: len(own), :wide].contiguous(),
            torch.tensor(own, dtype=torch.int32, device=device),
            tuple(own),
        )
        none = torch.zeros(len(own), dtype=torch.int64, device=device)
        kernel.prepare(state, Batch(none, none, none, none, part))
        out: torch.Tensor = kernel.run(state, q[list(some)], cache, width**-0.5)
        return out

    every = range(len(lens))
    whole = run(every, pages)
    found = set()
    for some in ([i] for i in range(16)):
        needed = lens[some[0]] // page + 1
        for wide in {needed, min(pages, needed + 3), pages}:
            if not torch.equal(run(some, wide), whole[some]):
                found.add(lens[some[0]])
    for count in (2, 3, 5, 17, 33, 64, 65, 90):
        if not torch.equal(run(every[-count:], pages), whole[-count:]):
            found.add(-count)
    tell("attention: lengths (negative: sizes) that differ", sorted(found))


# ---- speed ----


def speed(llm: LLM, vocab: int, batches: Sequence[int]) -> None:
    for batch in batches:
        try:
            prompts = random_prompts(batch, PROMPT, vocab)
            generate_seconds(llm, prompts, 3)
            each = [
                (generate_seconds(llm, prompts, LAST) - generate_seconds(llm, prompts, FIRST))
                / (LAST - FIRST)
                for _ in range(3)
            ]
            tell(f"decode {batch}, ms", round(statistics.median(each) * 1e3, 3))
        except Exception:
            tell(f"decode {batch}: failed", traceback.format_exc()[-800:])
    for count, length in ((32, 512), (1, 512), (1, 4096)):
        if length >= llm._alive().runner.context_length:
            continue
        try:
            prompts = random_prompts(count, length, vocab)
            generate_seconds(llm, prompts, 3)
            first = statistics.median(generate_seconds(llm, prompts, 1) for _ in range(3))
            tell(f"prefill {count} x {length}, tokens/s", round(count * length / first))
        except Exception:
            tell(f"prefill {count} x {length}: failed", traceback.format_exc()[-800:])


# ---- parts ----


def run_part(part: str, args: argparse.Namespace) -> None:
    config = config_of(args.shape, args.dtype)
    vocab = config["vocab_size"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        made: dict[str, Any] = {"load_format": "dummy", "kv_memory": args.kv_memory}
        if part.startswith("demo"):
            dtype = part.split()[1]
            ways = {**WAYS, "drafts": DRAFTS}
            mixes("demo", 2000, args.mixes, ways, dtype=dtype, kv_memory="100MB")
        elif part == "slice":
            mixes(folder, vocab, args.mixes, WAYS, **made)
        elif part == "tp":
            mixes("demo", 2000, args.mixes, WAYS, dtype="bfloat16", kv_memory="100MB", tp=args.tp)
            mixes(folder, vocab, args.mixes, {"prefix hits": {}}, tp=args.tp, **made)
        else:
            asked = {"batch_invariant": part != "off", "disable_radix_cache": True}
            start = time.perf_counter()
            with LLM(folder, **made, **asked) as llm:
                tell(f"{part}: ready, s", round(time.perf_counter() - start, 1))
                print("\n".join(f"{r.op} {r.kernel}" for r in llm.plan.rows), flush=True)
                runner = llm._alive().runner
                if part in ("on", "off"):
                    speed(llm, vocab, args.batch)
                if part in ("on", "ops"):
                    ops(runner.model, runner.sampler.ops)
                if part in ("on", "attention"):
                    attention(runner.model)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="v3-slice")
    parser.add_argument("--dtype", default="fp8")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), metavar="NAME")
    parser.add_argument("--tp", type=int, default=1, help="also mixes on so many devices")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--kv-memory", default="4GB")
    parser.add_argument("--mixes", type=int, default=12)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of each part")
    parser.add_argument("--out", type=Path, help="add a JSON line for each part to this file")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        run_part(args.part, args)
        return
    told: dict[str, dict[str, Any]] = {}
    for part in [*args.parts, *(["tp"] if args.tp > 1 and "tp" not in args.parts else [])]:
        start = time.perf_counter()
        told[part] = one_part(part, args.limit)
        told[part]["seconds"] = round(time.perf_counter() - start, 1)
        for figure, value in told[part].items():
            print(f"{part:<14} {figure:<52} {value}", flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps({"part": part, "shape": args.shape, **told[part]}) + "\n")
    table(told)


def one_part(part: str, limit: float) -> dict[str, Any]:
    """What a process says that runs it."""
    command = [sys.executable, __file__, *sys.argv[1:], "--part", part]
    found: dict[str, Any] = {}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        out, error, code = done.stdout, done.stderr, str(done.returncode)
    except subprocess.TimeoutExpired as e:
        kept = (e.stdout or b""), (e.stderr or b"")
        out, error = (k.decode(errors="replace") if isinstance(k, bytes) else k for k in kept)
        code = f"more than {limit:g} s"
    for line in out.splitlines():
        if line.startswith("RESULT "):
            figure, value = json.loads(line[7:])
            found[figure] = value
    if code != "0":
        found["ended"] = code
        print(f"---- {part} ended with {code}\n{out[-1500:]}\n{error[-3500:]}\n----", flush=True)
    return found


def table(told: dict[str, dict[str, Any]]) -> None:
    """Of costs, and of what differs."""
    off, on = told.get("off", {}), told.get("on", {})
    if off and on:
        print("\n| figure | off | on | cost |\n|---|---:|---:|---:|")
        for figure, value in off.items():
            both = value, on.get(figure)
            if figure.startswith(("decode", "prefill")) and all(
                isinstance(v, float | int) for v in both
            ):
                times = on[figure] / value if "ms" in figure else value / max(on[figure], 1e-9)
                print(f"| {figure} | {value} | {on[figure]} | {times - 1:+.1%} |")
    wrong = [
        f"{part}: {figure}: {value}"
        for part, found in told.items()
        for figure, value in found.items()
        if (("differ" in figure or "otherwise" in figure) and value) or "failed" in figure
    ]
    print("\nbits equal everywhere" if not wrong else "\n" + "\n".join(wrong), flush=True)


if __name__ == "__main__":
    main()
