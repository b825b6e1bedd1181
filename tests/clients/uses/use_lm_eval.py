"""lm-eval as a command: completions with the checkpoint's tokenizer and the server's, and chats.

The task is made here: what it names by default lies on a hub.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from each import MODEL, TOKENIZER, V1, command, main, use
from lm_eval.utils import RemoteTokenizer, check_remote_tokenizer_support

ROWS = [{"q": f"{a}+{b}=", "a": str(a + b)} for a, b in ((12, 30), (1, 1), (20, 7))]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{a}}}}"
{more}
"""
CHOICES = 'doc_to_choice: "{{[a, \\"no\\"]}}"\ndoc_to_target: 0\nmetric_list: [{metric: acc}]'
UNTIL = "generation_kwargs: {until: ['@'], max_gen_toks: 24}\nmetric_list: [{metric: exact_match}]"
# The remote one is taken wherever there is one, unless another is named.
OWN = {"tokenizer_backend": "huggingface", "tokenizer": TOKENIZER}
KINDS = {"multiple_choice": CHOICES, "generate_until": UNTIL, "loglikelihood": ""}


def evaluate(model, where, *words, kinds=KINDS, **args):
    """The results of lm-eval's command over our tasks."""
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp)
        data = folder / "rows.json"
        data.write_text("\n".join(map(json.dumps, ROWS)))
        for kind in kinds:
            text = TASK.format(name=f"own_{kind}", data=data, kind=kind, more=KINDS[kind])
            if kind == "multiple_choice":
                text = text.replace('doc_to_target: "{{a}}"\n', "")
            if kind == "loglikelihood":
                text += "metric_list: [{metric: perplexity}]\n"
            (folder / f"{kind}.yaml").write_text(text)
        said = {"model": MODEL, "base_url": where, "max_length": 1024, "num_concurrent": 2} | args
        command(
            "lm_eval",
            "run",
            "--model",
            model,
            "--model_args",
            ",".join(f"{name}={value}" for name, value in said.items()),
            "--tasks",
            ",".join(f"own_{kind}" for kind in kinds),
            "--include_path",
            str(folder),
            "--output_path",
            str(folder / "out"),
            *words,
            HF_HUB_OFFLINE="1",
            HF_HOME=str(folder / "hub"),
            OPENAI_API_KEY="none",
        )
        (results,) = (folder / "out").rglob("results_*.json")
        found = json.loads(results.read_text())["results"]
        assert set(found) == {f"own_{kind}" for kind in kinds}, found
        return found


@use
def own_tokenizer():
    evaluate("local-completions", f"{V1}/completions", **OWN)


@use
def remote_tokenizer():
    evaluate("local-completions", f"{V1}/completions", tokenizer_backend="remote")


@use
def remote_tokenizer_and_ids():
    where = f"{V1}/completions"
    evaluate("local-completions", where, tokenizer_backend="remote", tokenized_requests=True)


@use
def tokenizer_that_is_found():
    evaluate("local-completions", f"{V1}/completions", kinds=["multiple_choice"])


@use
def remote_tokenizer_by_itself():
    remote = RemoteTokenizer(f"{V1}/completions")
    ids = remote.encode("12+30=")
    assert remote.decode(ids) == "12+30=" and remote.bos_token_id != remote.eos_token_id
    chat = [{"role": "user", "content": "12+30="}]
    assert "12+30=" in remote.apply_chat_template(chat, tools=None)
    assert check_remote_tokenizer_support(f"{V1}/completions")


@use
def own_tokenizer_with_a_template():
    words = ("--apply_chat_template", "--fewshot_as_multiturn", "true")
    evaluate(
        "local-completions",
        f"{V1}/completions",
        *words,
        **OWN,
        tokenized_requests=True,
        kinds=["generate_until"],
    )


@use
def chats():
    evaluate(
        "local-chat-completions",
        f"{V1}/chat/completions",
        "--apply_chat_template",
        kinds=["generate_until"],
    )


main()
