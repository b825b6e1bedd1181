"""Scores of the runtime on a held-out set: sums, tool calls, sums under schemas, prose, keys
planted in long prompts, and how often MTP drafts agree.

The set is heldout.json of the checkpoint's folder, or else the demo model's; keys and schemas are
those of heldout_keys.json and heldout_schemas.json. The runtime generates
greedily; answers are scored as raw text. Drafts are compared with the model at every position of
the outputs, and apart from them on prose.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ds_runtime.errors import CheckpointError, ConfigError
from ds_runtime_bench.engine import scoring
from ds_runtime_bench.record import environment, peak_bytes

if TYPE_CHECKING:
    from ds_runtime.offline.llm import LLM, RequestOutput
    from ds_runtime.output_rules import OutputRules

Score: TypeAlias = "tuple[dict[str, Any], list[RequestOutput]]"
LIMITS = {"sums": 96, "tools": 288}  # tokens; correct answers of the demo model need fewer
KEY_LIMIT = 12
OBJECT_LIMIT = 192


def load_heldout(path: Path) -> tuple[dict[str, Any], str]:
    """The held-out set and its SHA-256; CheckpointError if its hash is not the recorded one."""
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    recorded = path.with_suffix(".sha256")
    if recorded.is_file() and recorded.read_text().split()[0] != digest:
        raise CheckpointError(f"{path}: its hash is not the one in {recorded.name}; restore it")
    held: dict[str, Any] = json.loads(data)
    return held, digest


def behind(
    llm: LLM, entries: Sequence[Mapping[str, Any]], prose: Sequence[str], tokens: int
) -> list[dict[str, Any]]:
    """The entries with a system text before their tools: this much prose that a prompt has about
    `tokens` tokens in all. Each begins with another passage."""
    made, encode = [], llm.tokenizer.encode
    for i, entry in enumerate(entries):
        said = json.dumps(entry.get("tools", [])) + json.dumps(entry["messages"])
        room = max(0, tokens - len(encode(said)))
        ids = scoring.prose_tokens(prose, i, room, encode)
        system = {"role": "system", "content": llm.tokenizer.decode(ids)}
        made.append({**entry, "messages": [system, *entry["messages"]]})
    return made


def with_keys(
    llm: LLM, entries: Sequence[Mapping[str, Any]], prose: Sequence[str], tokens: int
) -> list[dict[str, Any]]:
    """The entries as prompts of about `tokens` tokens with their keys planted. Each begins with
    another passage."""
    encode, decode = llm.tokenizer.encode, llm.tokenizer.decode
    return [
        {**entry, "messages": scoring.planted(entry, prose, i, tokens, encode, decode)}
        for i, entry in enumerate(entries)
    ]


def spread(entries: Sequence[Any], limit: int | None) -> Sequence[Any]:
    """At most `limit` entries, from the whole sequence at even steps: keys of every depth."""
    step = max(1, len(entries) // (limit or len(entries)))
    return entries[::step][:limit]


def answers(llm: LLM, folder: Path, kind: str, entries: Sequence[Any]) -> list[RequestOutput]:
    """The runtime's greedy answers to the entries' messages, marker tokens kept in the text."""
    from ds_runtime.sampling_params import SamplingParams
    from ds_runtime.text.formats.families import find_family
    from ds_runtime.text.formats.template import load_template

    template = load_template(folder, llm.tokenizer, family=find_family(folder))
    if template is None:
        raise CheckpointError(f"{folder}: has no chat template, which this measurement needs")
    texts = [template.render(e["messages"], e.get("tools")) for e in entries]
    limit = OBJECT_LIMIT if kind == "schemas" else LIMITS.get(kind, KEY_LIMIT)
    params = [
        SamplingParams(max_tokens=limit, skip_special_tokens=False, rules=rules_of(e, text))
        for e, text in zip(entries, texts, strict=True)
    ]
    return llm.generate([llm.tokenizer.encode(t) for t in texts], params)


def rules_of(entry: Mapping[str, Any], prompt: str) -> OutputRules | None:
    """What an entry with a schema allows: a trace, which the prompt may have begun, then an object
    under the schema."""
    from ds_runtime.output_rules import OutputRules

    if "schema" not in entry:
        return None
    reasoning = "open" if prompt.endswith("<think>") else "optional"
    return OutputRules(json_schema=entry["schema"], reasoning=reasoning)


def right(kind: str, raw: str, entry: Mapping[str, Any]) -> bool:
    """Whether one raw answer is right."""
    if kind == "sums":
        return scoring.sum_correct(raw, entry["answer"])
    if kind == "keys":
        return scoring.key_correct(raw, entry["answer"])
    if kind == "schemas":
        return scoring.object_correct(raw, entry["answer"])
    return scoring.calls_correct(raw, entry["calls"])


def perplexity(llm: LLM, prose: Sequence[Sequence[int]]) -> dict[str, Any]:
    """exp of the mean negative log-probability of each passage's tokens after the first."""
    from ds_runtime.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    found = [
        entry.logprob
        for output in llm.generate([list(ids) for ids in prose], params)
        for entry in output.prompt_logprobs or ()
        if entry is not None
    ]
    return {"perplexity": math.exp(-sum(found) / len(found)), "tokens": len(found)}


def draft_agreement(
    settings: Mapping[str, Any],
    outputs: Sequence[RequestOutput],
    prose: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Share of MTP drafts equal to the model's argmax: on outputs, and on prose (true text)."""
    from ds_runtime_bench.engine.drafts import DraftCheck

    own, text = [], []
    with closing(DraftCheck(settings)) as check:
        for output in outputs:
            prompt = output.prompt_token_ids
            own += check.pairs([*prompt, *output.token_ids], len(prompt))
        for ids in prose:
            text += check.pairs(ids, 1)
    return {
        "outputs": scoring.agreement(own),
        "output_tokens": len(own),
        "prose": scoring.agreement(text),
        "prose_tokens": len(text),
    }


def score(llm: LLM, folder: Path, kind: str, entries: Sequence[Any]) -> Score:
    """The runtime's answers, and how many of them are right."""
    start = time.perf_counter()
    done = answers(llm, folder, kind, entries)
    spent = time.perf_counter() - start
    good = sum(right(kind, o.text, e) for o, e in zip(done, entries, strict=True))
    share = good / len(entries)
    return {"right": good, "of": len(entries), "share": share, "seconds": spent}, done


def run(
    settings: Mapping[str, Any],
    limit: int | None = None,
    mtp: bool = True,
    lengths: Sequence[int] = (),
    planted: Sequence[int] = (),
) -> dict[str, Any]:
    """Load the engine with these EngineConfig fields and score it; `limit` entries per kind.

    lengths: ask for tool calls after prose, too, in prompts of this many tokens.
    planted: ask for keys that are planted in prose, too, in prompts of this many tokens.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit {limit}: must be at least 1")
    if bad := [n for n in lengths if n < 1]:
        raise ConfigError(f"--behind {bad[0]}: must be at least 1 token")
    if bad := [n for n in planted if n < 1]:
        raise ConfigError(f"--planted {bad[0]}: must be at least 1 token")
    from ds_runtime import LLM
    from ds_runtime.checkpoint.base import part_of
    from ds_runtime.checkpoint.hub import resolve_model
    from ds_runtime.description.hf import load_config

    model = str(settings.get("model", "demo"))
    folder = resolve_model(model)

    def held(name: str) -> tuple[dict[str, Any], str]:
        path = part_of(folder, name)
        return load_heldout(path if path.is_file() else resolve_model("demo") / name)

    heldout, digest = held("heldout.json")
    keys, keys_digest = held("heldout_keys.json")
    schemas, schemas_digest = held("heldout_schemas.json")
    scores: dict[str, Any] = {}
    outputs: list[RequestOutput] = []
    with LLM(**settings) as llm:
        for kind in LIMITS:
            scores[kind], done = score(llm, folder, kind, heldout[kind][:limit])
            outputs += done
        asked = schemas["schemas"][:limit]
        scores["schemas"] = score(llm, folder, "schemas", asked)[0]
        tokenizer = llm.tokenizer
        start_ids = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        prose = [start_ids + tokenizer.encode(p["text"]) for p in heldout["prose"][:limit]]
        scores["prose"] = perplexity(llm, prose)
        texts = [p["text"] for p in heldout["prose"]]
        scores["behind"] = {
            n: score(llm, folder, "tools", behind(llm, heldout["tools"][:limit], texts, n))[0]
            for n in lengths
        }
        asked = spread(keys["keys"], limit)
        scores["planted"] = {
            n: score(llm, folder, "keys", with_keys(llm, asked, texts, n))[0] for n in planted
        }
    if mtp and load_config(folder).mtp_layers:
        scores["mtp"] = draft_agreement(settings, outputs, prose)
    elif mtp:
        scores["mtp"] = {"refused": "the checkpoint has no MTP layer"}
    return {
        "bench": "accuracy",
        "model": model,
        "settings": {k: v for k, v in settings.items() if k != "model"},
        "heldout_sha256": digest,
        "heldout_keys_sha256": keys_digest,
        "heldout_schemas_sha256": schemas_digest,
        "scores": scores,
        "peak_bytes": peak_bytes(),
        **environment(),
    }


def render(report: Mapping[str, Any]) -> str:
    """The report for people."""
    scores = report["scores"]
    lines = [f"{report['model']}, held-out set {report['heldout_sha256'][:12]}"]
    shown = [("sums", scores["sums"]), ("tool calls", scores["tools"])]
    shown.append(("sums under schemas", scores["schemas"]))
    shown += [(f"tool calls after {n:,} tokens", s) for n, s in scores["behind"].items()]
    shown += [(f"planted keys in {n:,} tokens", s) for n, s in scores["planted"].items()]
    for name, s in shown:
        lines.append(
            f"{name}: {s['right']} of {s['of']} right ({s['share']:.1%}) in {s['seconds']:.1f} s"
        )
    prose = scores["prose"]
    lines.append(f"prose: perplexity {prose['perplexity']:.3f} over {prose['tokens']:,} tokens")
    mtp = scores.get("mtp")
    if mtp is not None and "refused" in mtp:
        lines.append(f"MTP agreement not measured: {mtp['refused']}")
    elif mtp is not None:
        lines.append(
            f"MTP argmax equal to the model's: {mtp['outputs']:.2%} of {mtp['output_tokens']:,} "
            f"output tokens, {mtp['prose']:.2%} of {mtp['prose_tokens']:,} prose tokens"
        )
    return "\n".join(lines)
