"""A byte-level BPE tokenizer with DeepSeek's special tokens, trained on a few lines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from ds_runtime.text.tokenizer import Tokenizer as OurTokenizer

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
LINES = [
    "The quick brown fox jumps over the lazy dog, again and again and again.",
    "Hello, how are you today? I am fine, thank you. STOP here, stop there.",
    "def add(a, b):\n    return a + b\n",
    "你好，世界。今天的天气很好。 Größe, naïve, café — “quotes” … 👍🏽",
]


def write_bpe(folder: Path) -> Path:
    """tokenizer.json, tokenizer_config.json, generation_config.json and config.json."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[BOS, EOS, PAD],
        show_progress=False,
    )
    backend.train_from_iterator(LINES * 4, trainer)
    backend.add_tokens(
        [AddedToken(t, special=False) for t in ("<｜User｜>", "<｜Assistant｜>", "<think>")]
    )
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "add_bos_token": True,
        "bos_token": {"content": BOS, "lstrip": False},
        "eos_token": EOS,
        "pad_token": PAD,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1], "temperature": 0.6, "top_p": 0.95})
    )
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    shutil.copy(
        Path(__file__).parent / "fixtures" / "chat_template.jinja", folder / "chat_template.jinja"
    )
    return folder


@pytest.fixture(scope="session")
def bpe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bpe(tmp_path_factory.mktemp("bpe"))


@pytest.fixture(scope="session")
def bpe(bpe_folder: Path) -> OurTokenizer:
    return OurTokenizer.load(bpe_folder)
